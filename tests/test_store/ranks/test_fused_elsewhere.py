"""The state of fused optimizers is saved where the rank that commits has none of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import cnr_store
from tests.test_store.ranks.support.rank_processes import preload, run_ranks

JOB = "tests.test_store.support.distributed.fused_elsewhere"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="needs TorchRec")
def test_the_first_rank_may_hold_no_fused_table(tmp_path: Path) -> None:
    preload("torchrec")
    outcomes = run_ranks(2, f"{JOB}:run", str(tmp_path), deadline_seconds=120)
    assert not any(each.error for each in outcomes), [each.where for each in outcomes]
    (none, _), (before, after) = (each.value for each in outcomes)
    assert none == []
    assert before == after
    assert any(number for row in before for number in row)
    assert cnr_store.verify(tmp_path, deep=True).ok
