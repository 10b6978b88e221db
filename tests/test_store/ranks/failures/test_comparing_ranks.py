"""Ranks that compare what they write: one knows it in another way, works for long, or falls silent.

Ranks are threads here. `training/distributed/test_compared_tables.py` has the like of processes, which are killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import SaveError
from cnr_store.training.saving import planner
from cnr_store.training.tracking import comparison
from tests.test_store.chains.test_relative import count_relative
from tests.test_store.ranks.support import small_job
from tests.test_store.ranks.support.small_job import SmallJob, find_small_models, load_alone
from tests.test_store.ranks.support.spread_model import TableKind
from tests.test_store.ranks.support.thread_job import this_rank
from tests.test_store.support.places import quick_folder
from tests.test_store.training.saving.test_compared import RELATIVE, stored

pytestmark = pytest.mark.slow

WORLD, VICTIM = 3, 1
OPTIONS: dict[str, Any] = {
    "tracking": cnr_store.Tracking(audit="all"),
    "bits": None,
    "codec": RELATIVE | {"rms_step": 0.05},
    "state_bits": "m3",
}


@pytest.fixture(autouse=True)
def _small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    find_small_models(monkeypatch)
    # Of columns enough for differences to take less than codes
    kinds = (
        TableKind("A", 400, 16, torch.float32, {"momentum1": True}),
        TableKind("B", 300, 16, torch.float32, {}),
    )
    monkeypatch.setattr(small_job, "KINDS", kinds)


def check_newest(url: str, job: SmallJob) -> None:
    """Check that one process loads what the codecs make of what the job holds."""
    record = Catalog(open_backend(url)).record(cnr_store.versions(url)[-1].id)
    configs = {
        (path.split(".")[-1].split("/")[0], path.split("/")[-1]): each.codec
        for path, each in record.arrays.items()
    }
    found = load_alone(url)
    for (table, slot), values in job.truth.items():
        expected = stored(torch.from_numpy(values), configs[table, slot or "weight"])
        np.testing.assert_array_equal(found[table, slot], expected.reshape(values.shape))


def saved(url: str) -> list[tuple[str, int]]:
    return [(each.kind, each.rows) for each in cnr_store.versions(url)]


def nudge(job: SmallJob, step: int) -> None:
    """Move every seventh row by a step of its lattice, where some hook sees it."""
    for name in ("A", "B"):
        ids, truth = np.arange(step % 7, len(job.truth[name, ""]), 7), dict(job.truth)
        truth[name, ""] = truth[name, ""].copy()
        truth[name, ""][ids] += 0.06
        job.truth = truth
        job.change(name, ids, truth, np.random.default_rng(step))


def test_ranks_may_know_what_is_stored_in_unlike_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has no memory for codes: its digests tell which rows changed, and it alone writes these absolute."""
    changed, shares = 100, []
    for poor in (set[int](), {VICTIM}):
        monkeypatch.setattr(planner, "free_bytes", lambda poor=poor: 0 if this_rank() in poor else 1 << 40)
        with quick_folder() as url, SmallJob(url, WORLD, **OPTIONS) as job:
            job.save(0)
            for step in (1, 2):
                nudge(job, step)
                job.save(step)
                check_newest(url, job)
                job.load()
            assert saved(url)[1:] == [("delta", changed), ("delta", changed)]
            shares.append([count_relative(url, each.id) / changed for each in cnr_store.versions(url)[1:]])
    assert shares[0] == [1, 1]
    assert shares[1] == pytest.approx([2 / 3, 2 / 3], abs=0.05)


@pytest.fixture
def seen_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Has a function called as one rank compares a block of a few rows."""
    monkeypatch.setattr(comparison, "_BLOCK_BYTES", 512)
    begin, values, own = comparison.Comparison.changed, comparison._values, list[Any]()

    def arm(call: Callable[[], Any]) -> None:
        def changed(self: comparison.Comparison, array: Any, known: Any) -> Any:
            if this_rank() == VICTIM:
                own.append(array)
            return begin(self, array, known)

        def block_values(array: Any, block: slice) -> Any:
            if any(array is each for each in own):
                call()
            return values(array, block)

        monkeypatch.setattr(comparison.Comparison, "changed", changed)
        monkeypatch.setattr(comparison, "_values", block_values)

    return arm


def test_ranks_wait_for_one_that_compares_for_long(seen_by: Callable[[Callable[[], Any]], None]) -> None:
    """Longer than they would wait for one that does nothing: each block tells them that it works."""
    timeout, never, blocks = 1.0, threading.Event(), list[int]()

    def work() -> None:
        blocks.append(1)
        never.wait(timeout / 8)

    with quick_folder() as url, SmallJob(url, WORLD, timeout_seconds=timeout, **OPTIONS) as job:
        job.save(0)
        seen_by(work)
        nudge(job, 1)
        job.save(1)
        assert len(blocks) / 8 > timeout
        check_newest(url, job)
        assert [kind for kind, _ in saved(url)] == ["baseline", "delta"]


def test_a_rank_that_falls_silent_as_it_compares_is_named(
    seen_by: Callable[[Callable[[], Any]], None],
) -> None:
    """No rank saves, the version before stays, and the next save has the rows of the one that failed."""
    timeout, gone_on, told = 0.5, threading.Event(), list[int]()

    with quick_folder() as url, SmallJob(url, WORLD, timeout_seconds=timeout, **OPTIONS) as job:
        job.save(0)
        before = load_alone(url)
        nudge(job, 1)
        seen_by(gone_on.wait)

        def save(rank: int) -> None:
            try:
                job.checkpointers[rank].save(1)
            finally:
                told.append(rank)
                if len(told) == WORLD - 1:
                    gone_on.set()

        for error in job.attempt(save):
            assert isinstance(error, SaveError)
            assert "compare: rank 1 did not answer within 0.5 s" in str(error)
        assert saved(url) == [("baseline", 700)]
        assert load_alone(url).keys() == before.keys()
        nudge(job, 2)
        job.save(2)
        assert saved(url)[1:] == [("delta", 200)]
        check_newest(url, job)
