"""A job that loaded before others went on can't take the store back, and nothing newer is lost to it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_store import OptionError, SupersededError
from cnr_store.catalog.claims import check_no_live_writer
from tests.nightly import at_night, sample
from tests.test_store.support.places import memory_url, quick_folder
from tests.test_store.support.processes import Jobs
from tests.test_store.support.retention_helpers import (
    Trainer,
    check_exact,
    contents,
    objects,
    save_many,
    visible,
)
from tests.test_store.support.small_model import make_model

MONTH = 30 * 24 * 3600.0
REFUSED = r"this job is stale: nothing was written\. Stop this job; call load\(\) only if it is to take over"
MOMENTS = ["loaded", "claim"]
ROUNDS = 6


@pytest.fixture
def url() -> Iterator[str]:
    with quick_folder() as folder:
        yield folder


def claim_is_closed(backend: Backend) -> bool:
    """Whether the newest one is, as an import asks."""
    try:
        check_no_live_writer(backend)
    except SupersededError:
        return False
    return True


def was_refused(outcome: list[str]) -> bool:
    return len(outcome) == 1 and "this job is stale" in outcome[0]


# A stale job


@pytest.mark.slow
@pytest.mark.some_by_day(1)
@pytest.mark.parametrize(
    ("moment", "skew"),
    [
        ("loaded", 0),
        ("claim", -MONTH),
        ("loaded", MONTH),
        at_night("claim", 0),
        at_night("loaded", -MONTH),
        at_night("claim", MONTH),
    ],
)
def test_a_stopped_job_that_wakes_changes_nothing(jobs: Jobs, url: str, moment: str, skew: float) -> None:
    """It computes, or is stopped, while another job loads the same version, saves twenty and removes old ones."""
    backend = open_backend(url)
    jobs.run("train", url, saves=10)
    stale, stopped = jobs.run("train", url, stop=moment, saves=1, keep_last=1, skew=skew)
    assert stopped is True
    trainer = Trainer(backend, keep_last=5)
    assert trainer.checkpointer.load().step == 10
    for step in range(11, 31):
        trainer.save(step, full=step % 7 == 0)
    trainer.checkpointer._upkeep.wait()
    before, expected = objects(backend), contents(backend)
    assert jobs.wake(stale) is False
    assert was_refused(jobs.outcome(stale))
    assert objects(backend) == before
    trainer.save(31)
    trainer.close()
    assert cnr_store.versions(url)[-1].step == 31
    check_exact(backend, {**contents(backend), **expected})


@pytest.mark.slow
def test_a_stale_job_is_told_and_may_take_over_by_a_load(jobs: Jobs, url: str) -> None:
    backend = open_backend(url)
    jobs.run("train", url, saves=2)
    trainer = Trainer(backend, keep_last=1)
    trainer.checkpointer.load()
    live, _ = jobs.run("train", url, saves=3, stop="saved")
    before = objects(backend)
    for step in (11, 12):
        with pytest.raises(SupersededError, match=REFUSED):
            trainer.save(step)
        assert objects(backend) == before
    restored = trainer.checkpointer.load()
    assert restored.version.id == visible(backend)[-1] == jobs.outcome(live)[0]
    taken = trainer.save(restored.step + 1)
    assert jobs.wake(live) is False
    assert "another checkpointer, so it can't save any more; stop this job" in jobs.outcome(live)[1]
    assert visible(backend)[-1] == taken
    trainer.close()


@pytest.mark.slow
def test_one_load_and_one_save_go_by_what_the_load_saw(jobs: Jobs, url: str) -> None:
    backend = open_backend(url)
    jobs.run("train", url, saves=2)
    stale, _ = jobs.run("once", url, stop="loaded", saves=1, keep_last=1)
    save_many(backend, [10, 20, 30])
    before = objects(backend)
    assert jobs.wake(stale) is False
    assert was_refused(jobs.outcome(stale))
    assert objects(backend) == before


def test_one_save_after_another_goes_by_the_first(jobs: Jobs, url: str) -> None:
    backend = open_backend(url)
    process, _ = jobs.run("once", url, back=None, stop="saved", saves=3, keep_last=1)
    save_many(backend, [10, 20])
    before = objects(backend)
    assert jobs.wake(process) is False
    saved, refused = jobs.outcome(process)
    assert (visible(backend)[0], "this job is stale" in refused) == (saved, True)
    assert objects(backend) == before


@pytest.mark.slow
def test_one_save_after_a_version_that_is_named(jobs: Jobs, url: str) -> None:
    model, optimizers = make_model("adagrad", 1)
    first = cnr_store.save(url, model, optimizers, 1)
    second = cnr_store.save(url, model, optimizers, 2, after=first)
    third = cnr_store.save(url, model, optimizers, 3, after=second.id, keep_last=1)
    assert ([info.id for info in cnr_store.versions(url)], third.previous) == ([third.id], second.id)
    jobs.run("train", url, saves=1)
    newest = cnr_store.versions(url)[-1]
    with pytest.raises(SupersededError, match=REFUSED):
        cnr_store.save(url, model, optimizers, 4, after=third)
    with pytest.raises(SupersededError, match=REFUSED):
        cnr_store.save(url, model, optimizers, 4)
    assert cnr_store.versions(url)[-1] == newest
    assert cnr_store.save(url, model, optimizers, 5, after=newest).previous == newest.id
    for wrong in (5, "latest", b"x"):
        with pytest.raises(OptionError, match="give the id or the VersionInfo"):
            cnr_store.save(url, model, optimizers, 6, after=wrong)  # type: ignore[arg-type]  # deliberately wrong
    with pytest.raises(cnr_store.VersionNotFoundError):
        cnr_store.save(url, model, optimizers, 6, after=first)


def test_a_job_that_still_saves_is_not_taken_over_unawares(jobs: Jobs, url: str) -> None:
    """What it commits under a claim that the other job has seen is newer than what that one loaded."""
    backend = open_backend(url)
    trainer = Trainer(backend)
    trainer.save(1)
    process, _ = jobs.run("train", url, stop="loaded", saves=1)
    newer = trainer.save(2)
    assert jobs.wake(process) is False
    assert f"version {newer} was committed" in jobs.outcome(process)[0]
    assert trainer.save(3) == visible(backend)[-1]
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("version", ["latest", 1])
def test_what_is_no_writer_stands_in_nobodys_way(jobs: Jobs, url: str, version: str | int) -> None:
    """Folds, pins, collections and crashed attempts come between the load and the save."""
    made = save_many(open_backend(url), [1, 2, 3])
    process, _ = jobs.run("train", url, stop="loaded", saves=2, back=0 if version == "latest" else 2)
    cnr_store.compact(url)
    cnr_store.pin(url, 2)
    cnr_store.verify(url)
    cnr_store.gc(url, keep_last=3)
    attempt = f"{made[0].partition('.')[0]}.00000099"
    open_backend(url).put(f"versions/{attempt}/manifest", b"a manifest")
    assert jobs.wake(process) is False
    assert len(jobs.outcome(process)) == 2
    assert visible(open_backend(url))[-2:] == jobs.outcome(process)


# Races


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("writers", [2, 3])
def test_of_several_first_saves_exactly_one_wins(jobs: Jobs, url: str, writers: int, moment: str) -> None:
    backend = open_backend(url)
    jobs.run("train", url, saves=1)
    for number in sample(range(ROUNDS), 2):
        before = contents(backend)
        racing = []
        for writer in range(writers):
            options = {"seed": 10 * number + writer, "skew": (writer - 1) * MONTH}
            process, stopped = jobs.run("train", url, stop=moment, saves=2, keep_last=3, **options)
            assert stopped is True
            racing.append(process)
        jobs.wake_all(racing)
        outcomes = [jobs.outcome(process) for process in racing]
        won = [outcome for outcome in outcomes if not was_refused(outcome)]
        assert len(won) == 1
        assert len(won[0]) == 2
        assert visible(backend)[-2:] == won[0]
        assert list(before)[-1] in visible(backend)
        check_exact(backend, {**contents(backend), **before})


def test_a_crash_between_claim_and_first_commit_is_seen(jobs: Jobs, url: str) -> None:
    """The next process counts the claim; so does one that began in the store when there was nothing else."""
    for number in range(3):
        _, ended = jobs.run("train", url, stop="claim", signal="SIGKILL", at=None)
        assert ended == "killed"
        backend = open_backend(url)
        backend.put(f"writers/{number + 1:06d}", b"{")  # as if it had been made
        trainer = Trainer(backend)
        with pytest.raises(cnr_store.EmptyStoreError):
            trainer.checkpointer.load()
    assert trainer.save(1).startswith("000004-")
    trainer.close()


# What a load says


@pytest.mark.slow
def test_a_load_warns_of_a_job_that_may_be_live(
    jobs: Jobs, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    process, _ = jobs.run("train", url, stop="saved", saves=2)
    with caplog.at_level(logging.WARNING, "cnr_store"):
        trainer = Trainer(open_backend(url))
        trainer.checkpointer.load()
        (warning,) = [record.getMessage() for record in caplog.records]
        assert f"(process {process} on " in warning
        assert "stop one of the two" in warning
        caplog.clear()
        trainer.save(7)
        for again in (trainer, Trainer(open_backend(url))):
            again.checkpointer.load()  # this process's own claim
            again.close()
        jobs.wake(process)
        jobs.run("train", url, saves=1)  # it closes its claim
        Trainer(open_backend(url)).checkpointer.load()
        jobs.run("train", url, stop="saved", saves=2, skew=-MONTH)
        Trainer(open_backend(url)).checkpointer.load()  # long ago
        assert caplog.text == ""


# Retention


@pytest.mark.slow
@pytest.mark.parametrize("loads", [True, False])
def test_a_job_removes_its_own_versions_and_those_it_has_seen(jobs: Jobs, url: str, loads: bool) -> None:
    backend = open_backend(url)
    jobs.run("train", url, saves=3, policy="full")
    earlier = visible(backend)
    trainer = Trainer(backend, policy="full", keep_last=1)
    if loads:
        trainer.checkpointer.load()
    made = [trainer.save(step) for step in (10, 11, 12)]
    trainer.close()
    assert visible(backend) == ([] if loads else earlier) + made[-1:]
    assert cnr_store.gc(url, keep_last=1).removed == (() if loads else tuple(earlier))


def test_an_interrupted_file_of_a_claim_is_no_trap(url: str) -> None:
    """A claim that can't be read is another writer's; load() counts it."""
    backend = open_backend(url)
    save_many(backend, [1])
    trainer = Trainer(backend)
    trainer.checkpointer.load()
    backend.put("writers/000002", b"")
    with pytest.raises(SupersededError, match="claim 000002 was made"):
        trainer.save(2)
    trainer.checkpointer.load()
    assert trainer.save(2).startswith("000003-")
    trainer.close()


def test_where_create_is_not_atomic_the_claim_is_read_back() -> None:
    """Another writer's claim took the place of this one's, unseen by either."""
    with memory_url() as url:
        backend = open_backend(url)
        trainer = Trainer(backend)
        first = trainer.save(1)
        claim = json.loads(backend.get("writers/000001"))
        backend.put("writers/000001", json.dumps({**claim, "token": "00000000"}).encode())
        with pytest.raises(SupersededError, match="superseded by 000001-00000000"):
            trainer.save(2)
        assert visible(backend) == [first]
        trainer.close()
        assert not claim_is_closed(backend)
