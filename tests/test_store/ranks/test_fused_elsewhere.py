"""The state of fused optimizers, where the rank that commits has none of it and where TorchRec groups tables anew."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import cnr_store
from tests.test_store.ranks.support.rank_processes import preload, run_ranks

JOBS = "tests.test_store.support.distributed"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="needs TorchRec"),
]


def test_the_first_rank_may_hold_no_fused_table(tmp_path: Path) -> None:
    preload("torchrec")
    outcomes = run_ranks(2, f"{JOBS}.fused_elsewhere:run", str(tmp_path), deadline_seconds=120)
    assert not any(each.error for each in outcomes), [each.where for each in outcomes]
    (none, _), (before, after) = (each.value for each in outcomes)
    assert none == []
    assert before == after
    assert any(number for row in before for number in row)
    assert cnr_store.verify(tmp_path, deep=True).ok


@pytest.mark.parametrize("world", [1, 2])
def test_rates_of_tables_that_share_a_kernel_now_are_refused(world: int, tmp_path: Path) -> None:
    preload("torchrec")
    outcomes = run_ranks(world, f"{JOBS}.fused_rates:run", str(tmp_path), deadline_seconds=120)
    for outcome in outcomes:
        told, joined, apart = outcome.value
        assert "bags.A' with 0.1" in told
        assert "bags.B' with 0.5" in told
        assert joined in ([0.1, 0.1], [])
        assert apart in ([0.1, 0.5], [])
    assert outcomes[-1].value[2]
