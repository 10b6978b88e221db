"""Saves that meet: one waits, is skipped, or is told of the failure of the one before it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store import BusyError, Checkpointer, OptionError, PendingSave, SaveError, SkippedError
from tests.test_store.support.lasting_store import assert_newest, change, make_model

PATIENCE_SECONDS = 60


class Gate(FaultyBackend):
    """Storage that stands still, or fails, while it is told to."""

    def __init__(self, folder: Path) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.fails = False
        super().__init__(open_backend(folder), self._decide)

    def _decide(self, operation: str, key: str, index: int) -> Fault:
        assert self.opened.wait(PATIENCE_SECONDS)
        return "before" if self.fails else None

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.opened.clear()
        try:
            yield
        finally:
            self.opened.set()

    @contextmanager
    def failing(self) -> Iterator[None]:
        self.fails = True
        try:
            yield
        finally:
            self.fails = False


class Job:
    """A model whose rows are changed by hand."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.gate = Gate(folder)
        self.model = make_model()
        optimizer = SGD(self.model.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(
            self.gate, self.model, optimizer, bits=32, policy="consecutive", **options
        )

    def change(self, *ids: int) -> None:
        change(self.checkpointer, self.model, list(ids))


def test_a_save_while_one_is_under_way_is_skipped_and_forgets_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, limits=cnr_store.Limits(overlap="skip"))
    job.checkpointer.save(0).result()
    job.change(1)
    with job.gate.closed():
        under_way = job.checkpointer.save(1)
        job.change(2, 3)
        skipped = job.checkpointer.save(2, full=True)
        assert skipped.skipped
        assert skipped.done()
        assert not under_way.skipped
        assert not under_way.done()
    with pytest.raises(SkippedError, match=r"save of step 2 was skipped, as that of step 1 .*; the rows are"):
        skipped.result()
    assert under_way.result().rows == 1
    last = job.checkpointer.save(3)
    assert last.result().rows == 2
    assert not last.skipped
    job.checkpointer.close()
    assert [info.step for info in cnr_store.versions(tmp_path)] == [0, 1, 3]
    assert_newest(tmp_path, job.model)


@pytest.mark.parametrize(("usual", "asked"), [("wait", None), ("skip", "wait")])
def test_a_save_that_waits_is_never_skipped(tmp_path: Path, usual: Any, asked: Any) -> None:
    job = Job(tmp_path, limits=cnr_store.Limits(overlap=usual))
    with job.checkpointer:
        with job.gate.closed():
            job.checkpointer.save(1)
            threading.Timer(0.05, job.gate.opened.set).start()
            second = job.checkpointer.save(2, overlap=asked)
        assert not second.skipped
    assert [info.step for info in cnr_store.versions(tmp_path)] == [1, 2]


def test_who_asked_in_vain_is_told_of_the_failure_later(tmp_path: Path) -> None:
    """Asking for no longer than it takes tells nothing; also where the save fails as the asking ends."""
    job = Job(tmp_path)
    with job.gate.closed(), job.gate.failing():
        failed = job.checkpointer.save(1)

        class FailsMeanwhile(type(failed.settled)):  # type: ignore[misc]  # a class that is computed
            def wait(self, timeout: float | None = None) -> Any:
                try:
                    return super().wait(timeout)
                finally:
                    if timeout == 0:
                        job.gate.opened.set()
                        failed.callbacks_done.wait(PATIENCE_SECONDS)

        failed.settled.__class__ = FailsMeanwhile
        with pytest.raises(TimeoutError):
            failed.result(0)
        assert failed.done()
    with pytest.raises(SaveError, match="injected"):
        job.checkpointer.close()


def test_a_failure_is_raised_by_the_next_save_once_and_nothing_is_forgotten(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.checkpointer.save(0).result()
    job.change(5)
    with job.gate.failing():
        failed = job.checkpointer.save(1)
        failed.future.exception()  # unlike `result`, this is not the caller's asking
    job.change(6)
    with pytest.raises(SaveError) as caught:
        job.checkpointer.save(2)
    assert caught.value.__notes__ == [
        "This is about the save of step 1, whose result nobody asked for. That of step 2 was not begun: call save "
        "again."
    ]
    assert job.checkpointer.save(2).result().rows == 2
    job.checkpointer.close()
    assert_newest(tmp_path, job.model)


def test_a_failure_before_a_load_is_raised_at_the_end_if_no_save_follows(tmp_path: Path) -> None:
    for number, saves_again in enumerate((False, True)):
        job = Job(tmp_path / str(number))
        job.checkpointer.save(0).result()
        job.change(5)
        with job.gate.failing():
            job.checkpointer.save(1).future.exception()
        job.checkpointer.load()
        if saves_again:
            job.checkpointer.save(2).result()
            job.checkpointer.close()
        else:
            with pytest.raises(SaveError, match="injected"):
                job.checkpointer.close()


@pytest.mark.parametrize("how", ["result", "exception"])
def test_a_failure_that_was_asked_for_is_not_raised_again(tmp_path: Path, how: str) -> None:
    job = Job(tmp_path)
    with job.gate.failing():
        failed = job.checkpointer.save(1)
        if how == "result":
            with pytest.raises(SaveError):
                failed.result()
        else:
            assert isinstance(failed.exception(), SaveError)
    done = job.checkpointer.save(2)
    assert done.exception() is None
    assert done.result().step == 2
    job.checkpointer.close()


def test_a_failure_does_not_keep_anyone_from_loading(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.checkpointer.save(0).result()
    job.change(5)
    with job.gate.failing():
        job.checkpointer.save(1).future.exception()
    assert job.checkpointer.load().step == 0
    assert job.checkpointer.save(2).result().rows == 0
    job.checkpointer.close()
    assert_newest(tmp_path, job.model)


def test_on_done_is_told_of_every_outcome_on_the_thread_that_writes(tmp_path: Path) -> None:
    told: list[tuple[int, bool, str]] = []

    def on_done(pending: PendingSave) -> None:
        assert pending.done()
        told.append((pending.step, pending.exception() is None, threading.current_thread().name))

    job = Job(tmp_path, on_done=on_done, limits=cnr_store.Limits(overlap="skip"))
    with job.checkpointer:
        with job.gate.failing():
            job.checkpointer.save(1).future.exception()
        with job.gate.closed():
            job.checkpointer.save(2)  # its callback has asked for the failure, so that it is not raised here
            job.checkpointer.save(3)
    assert [(step, committed) for step, committed, _ in told] == [(1, False), (2, True)]
    assert all(name.startswith("cnr-save") for _, _, name in told)


def test_what_on_done_raises_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def on_done(pending: PendingSave) -> None:
        raise SystemExit(f"step {pending.step}")

    with (
        caplog.at_level(logging.ERROR, "cnr_store"),
        Job(tmp_path, on_done=on_done).checkpointer as checkpointer,
    ):
        checkpointer.save(1).result()
        checkpointer.save(2).result()
    assert [record.getMessage() for record in caplog.records] == [
        f"on_done of the save of step {step} failed" for step in (1, 2)
    ]
    assert len(cnr_store.versions(tmp_path)) == 2


class BrokenHandler(logging.Handler):
    """A log that can't be written to, and says so by raising."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the log's disk is full")


def test_a_log_that_fails_keeps_nobody_waiting(tmp_path: Path) -> None:
    def on_done(pending: PendingSave) -> None:
        raise KeyError(pending.step)

    log, handler = logging.getLogger("cnr_store"), BrokenHandler()
    job = Job(tmp_path, on_done=on_done)
    log.addHandler(handler)
    try:
        with job.gate.failing():
            assert isinstance(job.checkpointer.save(1).exception(PATIENCE_SECONDS), SaveError)
        assert job.checkpointer.save(2).result(PATIENCE_SECONDS).step == 2
        job.checkpointer.close()
    finally:
        log.removeHandler(handler)


def test_on_done_must_not_work_on_the_checkpointer(tmp_path: Path) -> None:
    refused: list[str] = []

    def on_done(pending: PendingSave) -> None:
        for call in (lambda: job.checkpointer.save(7), job.checkpointer.load, job.checkpointer.close):
            with pytest.raises(BusyError) as caught:
                call()
            refused.append(str(caught.value))

    job = Job(tmp_path, on_done=on_done)
    job.checkpointer.save(1)
    job.checkpointer.save(2)
    job.checkpointer.close()
    assert len(refused) == 6
    assert refused[0] == "save: called by on_done, which others wait for; call it on the training thread"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": {"overlap": "Skip"}}, "overlap='Skip': give 'wait' or 'skip'"),
        ({"limits": {"overlap": None}}, "overlap=None: give"),
        ({"on_done": 3}, "on_done=3: give a function"),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        if "limits" in options:
            options["limits"] = cnr_store.Limits(**options["limits"])
        Job(tmp_path, **options)


def test_overlap_of_one_save_out_of_range(tmp_path: Path) -> None:
    with Job(tmp_path).checkpointer as checkpointer:
        with pytest.raises(OptionError, match="overlap=True: give 'wait' or 'skip'"):
            checkpointer.save(1, overlap=True)  # type: ignore[arg-type]
