"""Training that goes on although saves fail, and saves that try again."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import cnr_store
from cnr_backends.testing.faulty import Fault
from cnr_store import Checkpointer, OptionError, SaveError, StateError, SupersededError, TrackingError
from tests.test_store.support.lasting_store import assert_newest, make_model
from tests.test_store.training.saving.weathered_job import PATIENCE_SECONDS, Clock, Job


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses take no time; the seconds that they would have taken, by clock."""
    return Clock(monkeypatch).slept


# on_failure="log"


def test_failures_that_are_logged_end_nothing_and_forget_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, failures=cnr_store.Failures(on_failure="log"))
    with job.checkpointer:
        first = job.checkpointer.save(0).result()
        for step in (1, 2):
            job.change(step)
            job.fail(step)
        job.change(3)
        info = job.checkpointer.save(3).result()
        assert (info.rows, info.previous) == (3, first.id)
        # Counted in a row: two more are borne again.
        for step in (4, 5):
            job.fail(step)
        job.checkpointer.save(6).result()
    assert_newest(tmp_path, job.model)
    assert [each.step for each in cnr_store.versions(tmp_path)] == [0, 3, 6]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [message.split(" failed: ")[0] for message in errors] == [
        f"save of step {step}" for step in (1, 2, 4, 5)
    ]


def test_too_many_failures_in_a_row_are_raised(tmp_path: Path) -> None:
    job = Job(tmp_path, failures=cnr_store.Failures(on_failure="log", max_failures=2))
    job.checkpointer.save(0).result()
    for step in (1, 2):
        job.change(step)
        job.fail(step)
    with pytest.raises(SaveError, match="step 2 was not saved") as caught:
        job.checkpointer.save(3)
    assert "It is failure 2 in a row. That of step 3 was not begun" in caught.value.__notes__[0]
    job.change(4)
    assert job.checkpointer.save(4).result().rows == 3
    job.checkpointer.close()
    assert_newest(tmp_path, job.model)


def test_the_last_failure_is_raised_at_the_end(tmp_path: Path) -> None:
    """No later save has its rows."""
    job = Job(tmp_path, failures=cnr_store.Failures(on_failure="log"))
    job.checkpointer.save(0).result()
    job.fail(1)
    with pytest.raises(SaveError, match="step 1 was not saved"):
        job.checkpointer.close()


def test_who_asks_for_a_result_gets_the_failure(tmp_path: Path) -> None:
    job = Job(tmp_path, failures=cnr_store.Failures(on_failure="log"))
    with job.checkpointer:
        job.breaks()
        with pytest.raises(SaveError):
            job.checkpointer.save(1).result()
        job.heals()


@pytest.mark.slow
def test_a_newer_writer_is_never_only_logged(tmp_path: Path) -> None:
    job = Job(tmp_path, failures=cnr_store.Failures(on_failure="log"))
    job.checkpointer.save(1).result()
    other = make_model(1)
    with Checkpointer(tmp_path, other) as newer:
        newer.load()
        newer.save(2).result()
    pending = job.checkpointer.save(3)
    while not pending.done():
        threading.Event().wait(0.001)
    with pytest.raises(SupersededError):
        job.checkpointer.save(4)
    job.checkpointer.close()


def test_mistakes_of_the_caller_are_never_only_logged(tmp_path: Path) -> None:
    job = Job(tmp_path, failures=cnr_store.Failures(on_failure="log"))
    with job.checkpointer:
        job.checkpointer.save(0).result()
        with pytest.raises(StateError):
            job.checkpointer.save(1, reader=object())
        job.model.get_parameter("t.weight").data += 1
        with pytest.raises(TrackingError):
            job.checkpointer.save(2)
        job.checkpointer.save(3).result()
    assert_newest(tmp_path, job.model)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("on_failure", "ignore"),
        ("max_failures", 0),
        ("retry_seconds", -1),
        ("retry_seconds", float("nan")),
        ("max_write_bytes_per_second", 0),
        ("max_write_bytes_per_second", "fast"),
    ],
)
def test_options_out_of_range(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"{option}="):
        Checkpointer(tmp_path, make_model(), **{option: value})
    assert not any(tmp_path.iterdir())


# Retries


def strike(job: Job, number: int, fault: Fault) -> list[int]:
    """Let one operation fail, counted from 0. Returns a list of how many there were."""
    count = [0]

    def once(operation: str, key: str) -> Fault:
        count[0] += 1
        return fault if count[0] == number + 1 else None

    job.weather.change(once)
    return count


@pytest.mark.parametrize("fault", ["unreachable", "unanswered"])
def test_each_operation_is_tried_again(tmp_path: Path, fault: Fault, quick: list[float]) -> None:
    """One network fault at each operation of a save, one after the other; every save succeeds, once."""
    job = Job(tmp_path)
    with job.checkpointer:
        job.checkpointer.save(0).result()
        for number in range(100):
            count = strike(job, number, fault)
            job.change(number)
            assert job.checkpointer.save(number + 1).result().rows == 1
            if count[0] <= number:
                break
    assert number > 3
    assert quick
    assert [info.step for info in cnr_store.versions(tmp_path)] == [*range(number + 2)]
    assert cnr_store.verify(tmp_path).ok
    assert_newest(tmp_path, job.model)


@pytest.mark.slow
def test_the_first_save_is_tried_again_too(tmp_path: Path, quick: list[float]) -> None:
    """Also the claim, whose answer may get lost."""
    for number in range(100):
        job = Job(tmp_path / str(number))
        count = strike(job, number, "unanswered")
        with job.checkpointer:
            job.checkpointer.save(1).result()
        assert sorted(path.name for path in (tmp_path / str(number) / "writers").iterdir()) == [
            "000001",
            "000001.closed",
        ]
        if count[0] <= number:
            break
    assert number > 5


def test_pauses_grow_until_the_time_is_over(
    tmp_path: Path, quick: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, failures=cnr_store.Failures(retry_seconds=100))
    job.checkpointer.save(0).result()
    job.change(1)
    job.breaks("unreachable")
    began = len(job.backend.log)
    with caplog.at_level(logging.INFO, "cnr_store"), pytest.raises(SaveError, match="step 1 was not saved"):
        job.checkpointer.save(1).result()
    assert 100 <= sum(quick) < 200
    assert 5 < len(job.backend.log) - began < 200
    assert sum("try again" in record.getMessage() for record in caplog.records) == 1
    job.heals()
    job.change(2)
    assert job.checkpointer.save(2).result().rows == 2
    job.checkpointer.close()


@pytest.mark.parametrize("fault", ["before", "after", "full"])
def test_what_no_retry_mends_is_not_tried_again(tmp_path: Path, fault: Fault, quick: list[float]) -> None:
    job = Job(tmp_path)
    with job.checkpointer:
        job.breaks(fault)
        with pytest.raises(SaveError):
            job.checkpointer.save(1).result()
        job.heals()
    assert quick == []


def test_nothing_is_tried_again_for_no_seconds(tmp_path: Path, quick: list[float]) -> None:
    job = Job(tmp_path, failures=cnr_store.Failures(retry_seconds=0))
    with job.checkpointer:
        job.breaks("unreachable")
        with pytest.raises(SaveError):
            job.checkpointer.save(1).result()
        job.heals()
    assert quick == []


def test_another_run_that_takes_over_in_a_pause_wins(tmp_path: Path) -> None:
    """The claims are looked at again before the commit is."""
    job = Job(tmp_path, failures=cnr_store.Failures(retry_seconds=86_400))
    job.checkpointer.save(0).result()
    job.change(1)
    pausing, goes_on = threading.Event(), threading.Event()

    def at_the_commit(operation: str, key: str) -> Fault:
        if operation == "create" and key.endswith("zarr.json") and not goes_on.is_set():
            pausing.set()
            return "unreachable"
        return None

    job.weather.change(at_the_commit)
    pending = job.checkpointer.save(1)
    assert pausing.wait(PATIENCE_SECONDS)
    with Checkpointer(tmp_path, make_model(1)) as newer:
        newer.load()
        newest = newer.save(7).result()
    goes_on.set()
    with pytest.raises(SupersededError):
        pending.result(PATIENCE_SECONDS)
    job.checkpointer.close()
    assert cnr_store.versions(tmp_path)[-1] == newest
    assert [info.step for info in cnr_store.versions(tmp_path)] == [0, 7]


# The rate of writing


def test_puts_are_spaced_out(tmp_path: Path, quick: list[float]) -> None:
    job = Job(tmp_path, rows=60_000, limits=cnr_store.Limits(max_write_bytes_per_second=100_000))
    pending = job.checkpointer.save(1)
    info = pending.result()
    assert pending.stats is not None
    # What is put last needs no time after it.
    assert 0.5 * info.bytes / 100_000 < sum(quick)
    assert pending.stats.seconds_waiting > 0
    job.checkpointer.close()


@pytest.mark.slow
def test_close_lifts_the_rate(tmp_path: Path) -> None:
    job = Job(tmp_path, rows=60_000, limits=cnr_store.Limits(max_write_bytes_per_second=1))
    pending = job.checkpointer.save(1)
    with pytest.raises(TimeoutError):
        pending.result(0.2)
    job.checkpointer.close()
    assert pending.result().rows == 60_000
    assert_newest(tmp_path, job.model)
