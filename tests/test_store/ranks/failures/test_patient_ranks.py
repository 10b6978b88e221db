"""A rank that asks the storage again makes progress: no other rank gives it up, however short the timeout."""

from __future__ import annotations

import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import cnr_store
from cnr_backends import StorageError, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store.ranks.group import Document
from cnr_store.ranks.protocol import SaveRound
from cnr_store.writing import patience
from tests.test_store.ranks.support.rank_processes import run_ranks
from tests.test_store.ranks.support.shared_model import SharedModel, checkpointer_of, cut_small
from tests.test_store.ranks.support.small_job import (
    SmallJob,
    assert_same,
    find_small_models,
    load_alone,
    watch_writes,
)
from tests.test_store.support.places import quick_folder

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 1.5
PAUSE_SECONDS = 4.0


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize(("victim", "operation", "part"), [(0, "create", "zarr.json"), (1, "put", "/c/")])
def test_ranks_wait_while_one_asks_again(
    victim: int, operation: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_small_models(monkeypatch)
    monkeypatch.setattr(patience, "_FIRST_PAUSE_SECONDS", PAUSE_SECONDS)
    monkeypatch.setattr(random, "uniform", lambda *_: 1.0)
    failed = list[str]()

    def fail_once(found: str, key: str) -> None:
        if found == operation and part in key and not failed:
            failed.append(key)
            error = StorageError("injected")
            error.transient = True
            raise error

    with (
        quick_folder() as url,
        SmallJob(
            url,
            timeout_seconds=TIMEOUT_SECONDS,
            failures=cnr_store.Failures(retry_seconds=60),
        ) as job,
    ):
        job.save(1)
        watch_writes(job, victim, fail_once)
        job.train(2)
        job.save(2)
        assert failed
        assert_same(load_alone(url, 2), job.truth)


def save_thrice(url: str) -> list[int]:
    """Rank 1 hears nothing of the second version, and asks again for its record while the others save the third."""
    failed: list[str] = []

    def fail_once(operation: str, key: str, _: int) -> Fault:
        if (dist.get_rank(), operation) != (1, "get") or "zarr.json" not in key or len(steps) != 1 or failed:
            return None
        failed.append(key)
        return "unreachable"

    hear = SaveRound.outcome

    def hear_nothing(save: SaveRound) -> Document | None:
        told = hear(save)  # by then it is committed
        return None if dist.get_rank() == 1 and len(steps) == 1 and not failed else told

    cut_small()
    steps: list[int] = []
    model = SharedModel(dist.get_rank(), dist.get_world_size())
    backend = FaultyBackend(open_backend(url), fail_once, reads=True)
    with (
        patch.object(patience, "_FIRST_PAUSE_SECONDS", PAUSE_SECONDS),
        patch.object(random, "uniform", lambda *_: 1.0),
        patch.object(SaveRound, "outcome", hear_nothing),
        checkpointer_of(
            model, backend, failures=cnr_store.Failures(timeout_seconds=TIMEOUT_SECONDS, retry_seconds=60)
        ) as checkpointer,
    ):
        for step in range(1, 4):
            model.train(step, checkpointer)
            steps.append(checkpointer.save(step).result().step)
    assert bool(failed) == (dist.get_rank() == 1)
    return steps


def test_ranks_wait_while_one_learns_what_became_of_its_save(tmp_path: Path) -> None:
    found = run_ranks(3, save_thrice, str(tmp_path / "store"))
    assert [(each.where, each.value) for each in found] == [("", [1, 2, 3])] * 3
