"""Objects of other sizes on each rank: all ranks decide alike, and nothing is saved where they do not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_store
from cnr_store.policies.policy import Decision
from tests.test_store.ranks.support.small_job import SmallJob, assert_same, find_small_models, load_alone
from tests.test_store.ranks.support.thread_job import this_rank

SAVES = 5
LARGE_BYTES = 1 << 20


@dataclass
class Uneven:
    """An object whose state is large on one rank."""

    large_on: int

    def state_dict(self) -> dict[str, Any]:
        return {"values": np.zeros(LARGE_BYTES if this_rank() == self.large_on else 1, np.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def decisions_of_ranks(job: SmallJob) -> list[list[Decision]]:
    """What each rank decides from now on."""
    decided: list[list[Decision]] = [[] for _ in range(job.world)]
    for own, checkpointer in zip(decided, job.checkpointers, strict=True):
        planner: Any = checkpointer._saves.planner

        def decide(*arguments: Any, ask: Any = planner.decide, own: list[Decision] = own) -> Decision:
            own.append(ask(*arguments))
            return own[-1]

        planner.decide = decide
    return decided


@pytest.mark.slow
@pytest.mark.parametrize("large_on", [0, 1])
def test_all_ranks_decide_alike(large_on: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_small_models(monkeypatch)
    with SmallJob(str(tmp_path), 2, policy="auto", state={"uneven": Uneven(large_on)}) as job:
        decided = decisions_of_ranks(job)
        for step in range(1, SAVES + 1):
            job.train(step)
            job.save(step)
            assert decided[0] == decided[1]
        truth = job.truth
    assert any(decision.offer for decision in decided[0])
    assert_same(load_alone(str(tmp_path)), truth)


@pytest.mark.slow
def test_ranks_that_decide_otherwise_save_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_small_models(monkeypatch)
    with SmallJob(str(tmp_path), 3, policy="auto") as job:
        for step in (1, 2):
            job.train(step)
            job.save(step)
        planner: Any = job.checkpointers[1]._saves.planner
        decide = planner.decide

        def otherwise(*arguments: Any) -> Decision:
            decision: Decision = decide(*arguments)
            return replace(decision, since="baseline" if decision.since == "previous" else "previous")

        planner.decide = otherwise
        job.train(3)
        told = job.attempt(lambda rank: job.checkpointers[rank].save(3).result())
        for error in told:
            assert isinstance(error, cnr_store.SaveError)
            assert "rank 1 decided otherwise than rank 0" in str(error)
        assert [info.step for info in cnr_store.versions(tmp_path)] == [1, 2]
        planner.decide = decide
        job.save(4)
        truth = job.truth
    assert_same(load_alone(str(tmp_path)), truth)
