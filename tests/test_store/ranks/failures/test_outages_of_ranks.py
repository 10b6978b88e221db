"""An outage that one rank meets is one for all: none counts it, raises it, or loses a row."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from cnr_backends import StorageError
from cnr_store import OutageError, PendingSave, SaveError
from tests.test_store.ranks.support.small_job import (
    SmallJob,
    assert_same,
    find_small_models,
    load_alone,
    watch_writes,
)
from tests.test_store.support.places import quick_folder

WORLD = 3
PATIENCE_SECONDS = 60


def save(job: SmallJob, step: int, rank: int) -> PendingSave:
    return job.checkpointers[rank].save(step)


@pytest.mark.slow
@pytest.mark.parametrize(("is_away", "victim"), [(True, 0), (True, 2), (False, 2)])
def test_all_ranks_go_on(
    is_away: bool, victim: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or, where no time mends it, all raise it."""
    find_small_models(monkeypatch)
    fails = False

    def fail(operation: str, key: str) -> None:
        if fails and operation == "put":
            error = StorageError(f"{operation} is refused")
            error.transient = is_away
            raise error

    with quick_folder() as url, SmallJob(url, WORLD) as job:
        job.save(1)
        watch_writes(job, victim, fail)
        job.checkpointers[victim]._saves.is_preempted = lambda: True  # so that it tries once
        fails = True
        for step in (2, 3):
            job.train(step)
            found = job.attempt(partial(save, job, step))
            if not is_away and step == 3:
                assert [type(each) for each in found] == [SaveError] * WORLD
                break
            for pending in found:
                assert pending.callbacks_done.wait(PATIENCE_SECONDS)
            assert [type(each.error) for each in found] == [OutageError if is_away else SaveError] * WORLD
            assert all(f"rank {victim} failed: " in str(each.error) for each in found)
        fails = False
        job.train(4)
        job.save(4)
        assert_same(load_alone(url), job.truth)
    began = [each for each in caplog.records if each.getMessage().startswith("storage fails")]
    ended = [each for each in caplog.records if each.getMessage().endswith("by step: 2, 3")]
    assert len(began) == len(ended) == (WORLD if is_away else 0)
    failures = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert len(failures) == (2 if is_away else WORLD)  # the rank in haste logs its own
