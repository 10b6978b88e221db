"""Policies weigh what any number of ranks writes alike: not what each has of readers and random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from tests.test_store.ranks.support.small_job import SmallJob, find_small_models
from tests.test_store.support.places import quick_folder

SAVES = 5
WEIGHED = ("full", "since", "past", "offer", "reason")


def decisions(policy: str, world: int) -> list[dict[str, Any]]:
    """What a policy saw and decided, with a reader on each rank that has much to say."""
    with quick_folder() as url:
        with SmallJob(url, world, policy=policy) as job:

            def save(rank: int) -> None:
                reader = {"seen": np.full(5_000, rank), "at": step}
                job.checkpointers[rank].save(step, reader=reader).result()

            for step in range(1, SAVES + 1):
                job.train(step)
                job.each(save)
        records = Catalog(open_backend(url)).oldest_first()
        return [{name: record.policy[name] for name in WEIGHED} for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "intermittent"])
def test_the_number_of_ranks_tips_no_scales(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_small_models(monkeypatch)
    alone = decisions(policy, 1)
    assert len(alone) == SAVES
    assert alone[-1]["past"]["written"]["deltas"] > 0
    assert decisions(policy, 3) == alone
