"""Accelerate and Fabric on two processes: their stores are those of plain DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nightly import NIGHT
from tests.test_store.ranks.support.rank_processes import preload, run_ranks
from tests.test_store.support.distributed import rank_training
from tests.test_store.training.distributed.test_ddp import values

pytestmark = pytest.mark.slow

pytest.importorskip("accelerate")
pytest.importorskip("lightning")


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    preload(*rank_training.PRELOAD)


def test_packages_and_plain_training_continue_each_other(tmp_path: Path) -> None:
    before = None
    jobs = [
        ("accelerate", "DistributedDataParallel AcceleratedOptimizer"),
        ("fabric", "_FabricModule FabricAdagrad"),
        ("plain", "DistributedDataParallel Adagrad"),
    ]
    if NIGHT:
        jobs.append(jobs[0])
    for package, kind in jobs:
        found = values(run_ranks(2, rank_training.wrapped, tmp_path, package, 2, deadline_seconds=120))
        for each in found:
            assert each["kind"] == kind
            if before is not None:
                assert each["loaded"] == before["trained"]
                assert max(each["rows"]) <= 60  # deltas of what the others saved
        assert found[1]["lines"] == []
        before = found[0]
    assert before is not None
    assert before["start"] == 2 * (len(jobs) - 1)
