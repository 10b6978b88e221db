"""With ``on_failure="log"`` all ranks count the same failures, go on, and raise at the same one. No row is lost."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import cnr_store
from cnr_backends import Backend, Transfer
from cnr_store import SaveError
from cnr_store.ranks.protocol import Team
from cnr_store.writing import stage, writer
from cnr_store.writing.plan import Plan
from cnr_store.writing.stage import Staged
from tests.test_store.ranks.support.small_job import SmallJob, assert_same, find_small_models, load_alone
from tests.test_store.support.places import quick_folder

WORLD = 3
FAILING = {2: 2, 3: 0, 5: 1, 6: 1, 7: 2}
"""By step, the rank that fails."""


@pytest.mark.slow
def test_ranks_go_on_and_give_up_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find_small_models(monkeypatch)

    def stage_or_fail(
        backend: Backend, version: str, plan: Plan, transfer: Transfer, peers: Team, rows_done: Any
    ) -> Staged:
        staged = stage.stage(backend, version, plan, transfer, peers, rows_done)
        if FAILING.get(plan.step) == peers.rank:
            raise OSError("the disk of this rank is full")
        return staged

    monkeypatch.setattr(writer, "stage", stage_or_fail)
    options: Any = {"failures": cnr_store.Failures(on_failure="log", max_failures=3)}
    with quick_folder() as url, SmallJob(url, WORLD, **options) as job:
        for step in range(1, 8):
            job.train(step)
            job.save(step, wait=step not in FAILING)
            if step == 4:
                assert_same(load_alone(url, 4), job.truth)
        job.train(8)
        found = job.attempt(lambda rank: job.checkpointers[rank].save(8))
        assert all(isinstance(each, SaveError) for each in found), found
        for each in found:
            assert "rank 2" in str(each)
            assert "It is failure 3 in a row. That of step 8 was not begun" in each.__notes__[0]
        job.save(9)
        assert_same(load_alone(url), job.truth)
    failures = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(failures) == WORLD * len(FAILING)
