"""A checkpointer among threads, signals, forks, removed stores and the end of its process."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import Backend, BackendError, open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store.catalog.catalog import Catalog
from cnr_store.training.model import row_arrays, tensors
from cnr_store.training.saving import snapshot


class Job:
    """A small table under SGD whose steps move the rows they are given."""

    def __init__(self, place: Any, rows: int = 2000, **options: Any) -> None:
        self.model = nn.EmbeddingBag(rows, 8, mode="sum", sparse=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.checkpointer = cnr_store.Checkpointer(place, self.model, self.optimizer, bits=32, **options)
        self.place = place

    def step(self, *ids: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor([ids])).sum().backward()
        self.optimizer.step()

    def assert_newest_is_now(self) -> None:
        stored = cnr_store.state_dict(self.place)["weight"]
        assert np.array_equal(stored, self.model.weight.detach().numpy())


@pytest.mark.slow
def test_saves_from_several_threads_take_turns(tmp_path: Path) -> None:
    job = Job(tmp_path, policy="consecutive")
    failures: list[BaseException] = []

    def saves() -> None:
        try:
            for step in range(5):
                job.checkpointer.save(step)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=saves) for _ in range(3)]
    for ids in range(0, 100, 10):
        job.step(ids)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job.checkpointer.close()
    assert not failures
    assert len(cnr_store.versions(tmp_path)) == 15
    job.assert_newest_is_now()


def test_a_save_within_a_save_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)

    class Reader:
        def state_dict(self) -> dict[str, int]:
            job.checkpointer.save(1)
            return {}

    with pytest.raises(cnr_store.BusyError, match="save: called while this thread is inside"):
        job.checkpointer.save(0, reader=Reader())
    job.checkpointer.save(2).result()
    job.assert_newest_is_now()


def test_an_interrupt_while_rows_are_read_commits_nothing_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives while the background still reads the model, as in a notebook; then training goes on."""
    job = Job(tmp_path, limits=cnr_store.Limits(snapshot_bytes=0))
    job.checkpointer.save(0).result()
    job.step(3, 4)
    copy_rows, interrupted = tensors.copy_rows, threading.Event()

    def interrupting(*arguments: Any) -> Any:
        if not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)
        return copy_rows(*arguments)

    monkeypatch.setattr(row_arrays, "copy_rows", interrupting)
    with pytest.raises(KeyboardInterrupt):
        job.checkpointer.save(1)
        signal.raise_signal(signal.SIGINT)  # if the save was faster than the signal
    job.step(5)
    job.checkpointer.save(2).result()
    job.assert_newest_is_now()
    job.checkpointer.close()


def test_a_save_that_cannot_be_planned_forgets_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    job.checkpointer.save(0).result()
    job.step(7)
    with monkeypatch.context() as patched:
        patched.setattr(snapshot.Copies, "rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.checkpointer.save(1)
    assert job.checkpointer.save(2).result().rows == 1
    job.assert_newest_is_now()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["one-shot", "consecutive", "intermittent"])
def test_a_table_that_grew_is_saved_whole(tmp_path: Path, policy: str) -> None:
    job = Job(tmp_path, rows=1000, policy=policy)
    job.checkpointer.save(0).result()
    job.step(1)
    job.checkpointer.save(1).result()
    job.model.weight.data = torch.cat([job.model.weight.data, torch.ones(100, 8)])
    job.step(1050)
    assert job.checkpointer.save(2).result().rows == 1100
    job.assert_newest_is_now()
    job.step(1051)
    assert job.checkpointer.save(3).result().rows == 1
    job.assert_newest_is_now()


@pytest.mark.parametrize("what", ["all", "baseline"])
def test_a_removed_base_is_noticed_and_the_next_save_is_whole(tmp_path: Path, what: str) -> None:
    store = tmp_path / "store"
    job = Job(store)
    baseline = job.checkpointer.save(0).result()
    shutil.rmtree(store if what == "all" else store / "versions" / baseline.id)
    job.step(1)
    with pytest.raises(
        cnr_store.BaseLostError, match="was removed while training ran; the next save writes everything"
    ):
        job.checkpointer.save(1).result()
    assert job.checkpointer.save(2).result().kind == "baseline"
    job.assert_newest_is_now()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lost base", "failed load"])
def test_restores_are_counted_on_where_nothing_can_be_leant_on(tmp_path: Path, how: str) -> None:
    store, failing = tmp_path / "store", threading.Event()

    def fault(operation: str, key: str, index: int) -> Fault:
        return "before" if failing.is_set() and "/weight/" in key else None

    first = Job(store).checkpointer.save(0).result()
    job = Job(FaultyBackend(open_backend(store), fault, reads=True))
    assert job.checkpointer.load().step == 0
    last = job.checkpointer.save(1).result()
    job.step(1)
    if how == "lost base":
        shutil.rmtree(store / "versions" / first.id)
        with pytest.raises(cnr_store.BaseLostError):
            job.checkpointer.save(2).result()
    else:
        failing.set()
        with pytest.raises(BackendError, match="injected"):
            job.checkpointer.load()
        failing.clear()
    saved = job.checkpointer.save(3).result()
    assert (saved.kind, saved.previous) == ("baseline", last.id)
    assert Catalog(open_backend(store)).record(saved.id).restores == 1
    job.assert_newest_is_now()


def test_generations_that_ran_out_are_said_so(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    backend.put("writers/999999", b"{}")
    job = Job(tmp_path)
    with pytest.raises(cnr_store.SaveError, match="999999 uses the last generation"):
        job.checkpointer.save(0).result()
    assert backend.list_names("writers") == ["999999"]
    backend.delete("writers/999999")
    job.checkpointer.save(1).result()
    job.assert_newest_is_now()


def test_a_fork_cannot_use_its_parents_checkpointer(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.checkpointer.save(0).result()
    job.checkpointer._guard._process += 1  # as a fork sees it
    for call in (lambda: job.checkpointer.save(1), job.checkpointer.load, job.checkpointer.close):
        with pytest.raises(cnr_store.ClosedError, match="belongs to process"):
            call()


def test_an_error_in_the_block_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(type(open_backend(tmp_path))):  # type: ignore[misc]  # whichever backend serves a folder
        def put(self, key: str, data: Any) -> None:
            raise OSError("no")

    backend: Backend = Failing(str(tmp_path))
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(KeyError, match="mine"),
        Job(backend).checkpointer as checkpointer,
    ):
        checkpointer.save(0)
        raise KeyError("mine")
    assert "save of step 0 failed" in caplog.text


@pytest.mark.slow
def test_a_row_too_wide_to_store_is_refused_before_writing(tmp_path: Path) -> None:
    model = nn.Embedding(1, (64 << 18) + 1)
    with cnr_store.Checkpointer(tmp_path, model) as checkpointer:
        with pytest.raises(cnr_store.UnsupportedModelError, match="split the table's columns"):
            checkpointer.save(0)
    assert not list(tmp_path.iterdir())


def test_names_too_long_to_store(tmp_path: Path) -> None:
    model = nn.ModuleDict({"表" * 2000: nn.Embedding(3, 2)})
    with pytest.raises(cnr_store.UnsupportedModelError, match="shorten the modules' names"):
        cnr_store.Checkpointer(tmp_path, model)
    with cnr_store.Checkpointer(tmp_path, nn.Embedding(3, 2)) as checkpointer:
        reader = {"k" * 250: np.arange(5000), "k" * 251: np.arange(5001)}
        checkpointer.save(0, reader=reader).result()
        restored = checkpointer.load().reader
    assert [len(values) for values in restored.values()] == [5000, 5001]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["zarr.json", "manifest"])
def test_a_save_after_a_load_that_found_damage_is_whole(tmp_path: Path, lost: str) -> None:
    """Its base may be what was damaged, and a delta over a lost one could never be loaded."""
    job = Job(tmp_path, policy="consecutive")
    with job.checkpointer as checkpointer:
        base = checkpointer.save(0).result()
        for step in (1, 2):
            job.step(step)
            checkpointer.save(step).result()
        (tmp_path / "versions" / base.id / lost).unlink()
        with pytest.raises(cnr_store.CorruptionError) as caught:
            checkpointer.load()
        assert "load(fallback=True)" in caught.value.__notes__[-1]
        job.step(3)
        checkpointer.save(3).result()
    job.assert_newest_is_now()
