"""Storage that is away for a while: training goes on, and no row is lost."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_store
from cnr_backends import StorageError
from cnr_backends.testing.faulty import Fault
from cnr_store import Checkpointer, OutageError, SaveError
from cnr_store.training.saving import save_queue
from cnr_store.writing.patience import Patience
from tests.test_store.support.lasting_store import assert_newest, make_model, weight
from tests.test_store.support.places import memory_url
from tests.test_store.training.saving.weathered_job import PATIENCE_SECONDS, Clock, Job

RETRY_SECONDS = 300
LATE: dict[str, Any] = {"rows": 2_000, "limits": cnr_store.Limits(snapshot_bytes=0)}
"""All rows are read from the model, while training waits."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged at WARNING and above."""
    return [record.getMessage() for record in caplog.records]


def goes(job: Job, clock: Clock, seconds: float = 15) -> None:
    """Storage is away, from now on by the clock."""
    back = clock.now + seconds

    def away(operation: str, key: str) -> Fault:
        return "unreachable" if clock.now < back else None

    job.weather.change(away)


def steps(place: Any) -> list[int]:
    return [info.step for info in cnr_store.versions(place)]


# Saves that wait, and such as are skipped


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("on_failure", ["raise", "log"])
@pytest.mark.parametrize("late", [{}, LATE], ids=["copied", "read from the model"])
def test_saves_wait_for_storage_that_is_away(
    on_failure: Any, late: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with memory_url() as url:
        job = Job(
            url,
            failures=cnr_store.Failures(on_failure=on_failure, max_failures=1, retry_seconds=RETRY_SECONDS),
            **late,
        )
        with job.checkpointer:
            for step in range(8):
                job.change(step)
                job.checkpointer.save(step)
                clock.now += 1
                if step == 3:
                    job.checkpointer.save(103).result()
                    goes(job, clock)
        assert steps(url) == [0, 1, 2, 3, 103, 4, 5, 6, 7]
        assert_newest(url, job.model)
    began, ended = told(caplog)
    assert began.startswith("storage fails: saves try again, or are skipped, for up to 300 s: put of")
    assert re.fullmatch(r"storage answers again after \d+ s", ended)


def test_an_outage_that_ended_does_not_begin_anew_with_an_older_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    patience, failures = Patience(RETRY_SECONDS, sleep=lambda seconds: None), {"late": 2, "other": 2}
    away = StorageError("away")
    away.transient = True

    def operation(name: str) -> str:
        if name == "late" and failures["late"] == 1:  # it has failed as the storage answers to another one
            assert patience.run(lambda: operation("other")) == "other"
        failures[name] -= 1
        if failures[name] >= 0:
            raise away
        return name

    assert patience.run(lambda: operation("late")) == "late"
    began, ended = told(caplog)
    assert began.startswith("storage fails")
    assert ended.startswith("storage answers again")


def test_saves_are_skipped_while_storage_is_away(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with memory_url() as url:
        job = Job(
            url,
            limits=cnr_store.Limits(overlap="skip"),
            failures=cnr_store.Failures(retry_seconds=RETRY_SECONDS),
        )
        with job.checkpointer:
            job.checkpointer.save(0).result()
            job.change(1)
            clock.runs.clear()
            held_up = job.stuck(1)
            for step in range(2, 9):
                job.change(step)
                assert job.checkpointer.save(step).skipped
            goes(job, clock)
            clock.runs.set()
            assert held_up.result().rows == 1
            assert job.checkpointer.save(9).result().rows == 7
        assert steps(url) == [0, 1, 9]
        assert_newest(url, job.model)
    assert told(caplog)[-1].endswith(
        "; the next save has the rows of those skipped or failed, by step: 2, 3, 4, 5, 6 and 2 more"
    )
    assert len(told(caplog)) == 2


def test_the_end_tells_that_the_last_save_made_no_version(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with memory_url() as url:
        job = Job(
            url,
            limits=cnr_store.Limits(overlap="skip"),
            failures=cnr_store.Failures(retry_seconds=RETRY_SECONDS),
        )
        with job.checkpointer:
            job.checkpointer.save(0).result()
            job.change(1)
            clock.runs.clear()
            held_up = job.stuck(1)
            assert job.checkpointer.save(2).skipped
            goes(job, clock)
            clock.runs.set()
            newest = held_up.result().id
        skipped = "the last save, of step 2, was skipped (with overlap='wait' it would have waited)"
        assert told(caplog)[-1] == f"{skipped}; the newest version is {newest}"
        caplog.clear()
        failing = Job(url)
        failing.breaks("unreachable")
        assert failing.checkpointer.save(3).exception() is not None
        failing.checkpointer.close()
        assert told(caplog)[-1] == "the last save, of step 3, failed; the newest version is none"


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("on_failure", ["raise", "log"])
@pytest.mark.parametrize("reads", [True, False])
def test_saves_that_try_once_fail_uncounted(
    on_failure: Any, reads: bool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as those that read the model, where none may wait: before the claim is made, training waits for them."""
    with memory_url() as url:
        job = Job(
            url,
            reads=reads,
            rows=2_000,
            limits=cnr_store.Limits(snapshot_bytes=0, overlap="skip"),
            failures=cnr_store.Failures(on_failure=on_failure, max_failures=1, retry_seconds=RETRY_SECONDS),
        )
        with job.checkpointer:
            job.breaks("unreachable")
            for step in range(1, 5):
                job.change(step)
                failed = job.try_to_save(step)
                clock.now += 60
            with pytest.raises(OutageError, match=r"step 4 was not saved .* the next save has its rows"):
                failed.result()
            assert clock.slept == []
            job.heals()
            job.checkpointer.save(5).result()
        assert steps(url) == [5]
        assert_newest(url, job.model)
    assert len(told(caplog)) == 2
    assert told(caplog)[1].startswith("storage answers again after 240 s; ")
    assert told(caplog)[1].endswith("by step: 1, 2, 3, 4")


def test_one_fault_that_the_first_retry_mends_is_no_news(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with memory_url() as url:
        job = Job(url)
        with job.checkpointer:
            goes(job, clock, 0.01)
            job.checkpointer.save(0).result()
    assert told(caplog) == []
    assert len(clock.slept) > 0


# Storage that stays away


def test_the_first_failure_after_that_time_is_raised(clock: Clock) -> None:
    with memory_url() as url:
        job = Job(url, failures=cnr_store.Failures(retry_seconds=RETRY_SECONDS))
        job.checkpointer.save(0).result()
        job.change(1)
        job.breaks("unreachable")
        job.checkpointer.save(1)
        with pytest.raises(SaveError, match="step 1 was not saved") as caught:
            job.checkpointer.save(2)
        assert not isinstance(caught.value, OutageError)
        assert RETRY_SECONDS <= clock.now < RETRY_SECONDS + 60
        job.heals()
        assert job.checkpointer.save(3).result().rows == 1
        job.checkpointer.close()
        assert_newest(url, job.model)


def test_after_that_time_failures_count_and_nothing_waits(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with memory_url() as url:
        job = Job(
            url,
            reads=True,
            failures=cnr_store.Failures(on_failure="log", max_failures=3, retry_seconds=RETRY_SECONDS),
        )
        job.checkpointer.save(0).result()
        job.change(1)
        job.breaks("unreachable")
        job.try_to_save(1)
        slept = len(clock.slept)
        for step in (2, 3):
            job.try_to_save(step)
        with pytest.raises(SaveError, match="step 3 was not saved") as caught:
            job.checkpointer.save(4)
        assert "failure 3 in a row" in caught.value.__notes__[0]
        assert len(clock.slept) == slept
        job.heals()
        job.checkpointer.save(5).result()
        # Storage was back, so the next outage is another one.
        goes(job, clock)
        job.change(2)
        assert job.checkpointer.save(6).result().rows == 1
        job.checkpointer.close()
        assert_newest(url, job.model)
    messages = [each.split(": ")[0] for each in told(caplog)]
    assert messages[0] == messages[5] == "storage fails"
    assert messages[1:4] == [f"save of step {step} failed" for step in (1, 2, 3)]
    assert "answers again after" in messages[4]
    assert messages[6].startswith("storage answers again")


def test_storage_that_answers_and_fails_each_save_is_away_all_the_same(clock: Clock) -> None:
    """Or saves that try once would fail for ever, and none would count."""
    with memory_url() as url:
        job = Job(url, failures=cnr_store.Failures(retry_seconds=RETRY_SECONDS))
        with job.checkpointer.preemption([signal.SIGUSR1]):
            job.checkpointer.save(0).result()
            job.change(1)
            signal.raise_signal(signal.SIGUSR1)
            job.breaks("unreachable", "create")  # reads and puts succeed
            with pytest.raises(SaveError, match="step 6 was not saved") as caught:
                for step in range(1, 100):
                    job.try_to_save(step)
                    clock.now += 60
        assert not isinstance(caught.value, OutageError)
        job.heals()
        assert job.checkpointer.save(101).result().rows == 1
        job.checkpointer.close()
        assert_newest(url, job.model)


@pytest.mark.parametrize("fault", ["full", "before"])
def test_what_no_time_mends_counts_at_once(fault: Fault, clock: Clock) -> None:
    """Also during an outage."""
    with memory_url() as url:
        job = Job(
            url,
            rows=2_000,
            limits=cnr_store.Limits(snapshot_bytes=0, overlap="skip"),
            failures=cnr_store.Failures(on_failure="log", max_failures=2, retry_seconds=RETRY_SECONDS),
        )
        job.breaks("unreachable")
        job.try_to_save(1)
        job.breaks(fault)
        for step in (2, 3):
            job.try_to_save(step)
        with pytest.raises(SaveError, match="step 3 was not saved"):
            job.checkpointer.save(4)
        assert clock.slept == []
        job.heals()
        job.checkpointer.save(5).result()
        job.checkpointer.close()
        assert_newest(url, job.model)


# The end


def test_an_orderly_end_waits(clock: Clock) -> None:
    with memory_url() as url:
        job = Job(url, failures=cnr_store.Failures(retry_seconds=RETRY_SECONDS))
        with job.checkpointer:
            job.checkpointer.save(0).result()
            job.change(1)
            clock.runs.clear()
            job.stuck(1)
            goes(job, clock)
            clock.runs.set()
        assert steps(url) == [0, 1]
        assert_newest(url, job.model)


def test_an_orderly_end_waits_no_longer_than_that_time(clock: Clock) -> None:
    with memory_url() as url:
        job = Job(url, failures=cnr_store.Failures(on_failure="log", retry_seconds=RETRY_SECONDS))
        job.checkpointer.save(0).result()
        before = weight(job.model).clone()
        job.change(1)
        job.breaks("unreachable")
        job.checkpointer.save(1)
        with pytest.raises(SaveError, match="step 1 was not saved"):
            job.checkpointer.close()
        assert RETRY_SECONDS <= clock.now < RETRY_SECONDS + 60
        loaded = make_model(1)
        cnr_store.load(url, loaded)
        assert torch.equal(weight(loaded), before)


@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("heals", [True, False])
@pytest.mark.parametrize("end", ["an exception", "a preemption", "the interpreter's end"])
def test_who_is_in_haste_tries_once(
    end: str, heals: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pauses would take a day here."""
    exits = False
    monkeypatch.setattr(save_queue, "is_exiting", lambda: exits)
    with memory_url() as url:
        job = Job(url, failures=cnr_store.Failures(retry_seconds=86_400))
        job.checkpointer.save(0).result()
        job.change(1)
        try:
            with job.checkpointer, job.checkpointer.preemption([signal.SIGUSR1]) as preempted:
                held_up = job.stuck(1)
                if heals:
                    job.heals()
                if end == "an exception":
                    raise ZeroDivisionError
                if end == "a preemption":
                    signal.raise_signal(signal.SIGUSR1)
                    assert preempted
                exits = True
            raised = ""
        except (ZeroDivisionError, OutageError) as error:
            raised = type(error).__name__
        assert raised == ("ZeroDivisionError" if end == "an exception" else "" if heals else "OutageError")
        assert held_up.done()
        assert steps(url) == ([0, 1] if heals else [0])
        if heals:
            assert_newest(url, job.model)
    assert heals != any(each.startswith("save of step 1 failed: ") for each in told(caplog))


def test_a_preempted_save_goes_on_after_one_that_an_outage_cost(tmp_path: Path) -> None:
    """It is not refused to raise the failure of the other; and the end, outside of the block, is in haste, too."""
    job = Job(tmp_path, failures=cnr_store.Failures(retry_seconds=86_400))
    job.checkpointer.save(0).result()
    job.change(1)
    with pytest.raises(OutageError, match="step 2 was not saved"), job.checkpointer:
        with job.checkpointer.preemption([signal.SIGUSR1]) as preempted:
            job.stuck(1)
            signal.raise_signal(signal.SIGUSR1)
            assert preempted
            job.change(2)
            job.checkpointer.save(2)
    job.heals()
    with Checkpointer(tmp_path, make_model()) as checkpointer:
        assert checkpointer.resume() == 0
        assert checkpointer.save(1).result().step == 1


def test_a_preempted_save_has_the_rows_of_one_that_an_outage_cost(tmp_path: Path) -> None:
    job = Job(tmp_path, failures=cnr_store.Failures(retry_seconds=86_400))
    with job.checkpointer, job.checkpointer.preemption([signal.SIGUSR1]):
        job.checkpointer.save(0).result()
        job.change(1)
        held_up = job.stuck(1)
        signal.raise_signal(signal.SIGUSR1)
        assert held_up.callbacks_done.wait(PATIENCE_SECONDS)
        job.heals()
        job.change(2)
        assert job.checkpointer.save(2).result().rows == 2
    assert_newest(tmp_path, job.model)


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["for the save before", "for itself", "in close"])
def test_an_interrupt_ends_the_wait(wait: str, tmp_path: Path) -> None:
    """Ctrl-C while training waits for storage."""
    job = Job(
        tmp_path, failures=cnr_store.Failures(retry_seconds=86_400), **(LATE if wait == "for itself" else {})
    )
    waits = threading.Event()

    def unreachable(operation: str, key: str) -> Fault:
        if waits.is_set():
            waits.clear()
            signal.raise_signal(signal.SIGINT)
        elif wait == "for itself":
            waits.set()  # the next try interrupts
        return "unreachable"

    if wait != "for itself":
        job.stuck(1)
        waits.set()
    job.weather.change(unreachable)
    with pytest.raises(KeyboardInterrupt):
        if wait == "in close":
            job.checkpointer.close()
        else:
            job.checkpointer.save(2)
    job.heals()
    if wait != "in close":
        job.change(2)
        job.checkpointer.save(3).result()
        assert_newest(tmp_path, job.model)
        job.checkpointer.close()


def test_a_load_waits_for_the_save_before_it(clock: Clock) -> None:
    with memory_url() as url:
        job = Job(url, failures=cnr_store.Failures(retry_seconds=RETRY_SECONDS))
        with job.checkpointer:
            job.checkpointer.save(0).result()
            job.change(1)
            clock.runs.clear()
            job.stuck(1)
            goes(job, clock)
            clock.runs.set()
            assert job.checkpointer.load().step == 1


# Any history


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.lists(
        st.sampled_from(["save", "save late", "away", "away for long", "back", "full", "change"]), max_size=12
    ),
    st.sampled_from(["wait", "skip"]),
    st.sampled_from(["raise", "log"]),
)
def test_versions_are_what_the_model_was(history: list[str], overlap: Any, on_failure: Any) -> None:
    """Whatever happens, each version is the model of its step, and the last one has all."""
    with pytest.MonkeyPatch.context() as patch, memory_url() as url:
        clock = Clock(patch)
        job = Job(
            url,
            rows=50,
            limits=cnr_store.Limits(overlap=overlap),
            failures=cnr_store.Failures(on_failure=on_failure, retry_seconds=RETRY_SECONDS),
        )
        saved: dict[int, torch.Tensor] = {}
        for step, what in enumerate(history):
            clock.now += 1
            job.change(step)
            if what in ("away", "away for long"):
                goes(job, clock, 15 if what == "away" else 10 * RETRY_SECONDS)
            elif what == "full":
                job.breaks("full")
            elif what == "back":
                job.heals()
            elif what.startswith("save"):
                saved[step] = weight(job.model).clone()
                try:
                    job.checkpointer.save(step)
                except SaveError:
                    continue
        job.heals()
        while steps(url)[-1:] != [100]:
            try:
                job.checkpointer.save(100, overlap="wait").result()
            except SaveError:
                continue
        job.checkpointer.close()
        saved[100] = weight(job.model)
        for step in steps(url):
            loaded = make_model(1, rows=50)
            cnr_store.load(url, loaded, version=step)
            assert torch.equal(weight(loaded), saved[step])
