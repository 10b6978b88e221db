"""State of any element type is saved as it is by ranks of which some have nothing of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import cnr_store
from cnr_store.ranks.placement import Piece
from tests.test_store.ranks.support.small_job import assert_same, find_small_models
from tests.test_store.ranks.support.spread_model import Cut, TableKind
from tests.test_store.ranks.support.thread_job import ThreadJob, changed

SAVES = 3


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", ["consecutive", "auto"])
def test_ranks_learn_the_type_of_what_others_have(
    dtype: torch.dtype, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_small_models(monkeypatch)
    url, random = str(tmp_path), np.random.default_rng(0)
    kinds = [TableKind(name, 400, 8, torch.float32, {"momentum1": name == "C"}, dtype) for name in "ABC"]
    cuts = {
        "A": Cut((0,), (Piece(0, 400, 0, 8, 0),)),
        "B": Cut((0,), (Piece(0, 400, 0, 8, 1),)),
        "C": Cut((0,), (Piece(0, 150, 0, 8, 1), Piece(150, 250, 0, 8, 2))),
    }
    alone = {kind.name: cuts[kind.name].alone(kind.rows, kind.dim) for kind in kinds}
    with ThreadJob(
        url, 3, kinds, cuts, policy=policy, bits=32, tracking=cnr_store.Tracking(audit=False)
    ) as job:
        truth = job.new_truth(random)
        job.fill(truth)
        for step in range(1, SAVES + 1):
            for kind in kinds:
                ids = np.arange(step, kind.rows, 7)
                truth = changed(truth, kind.name, ids, random, job)
                job.change(kind.name, ids, truth, random)
            job.save(step)
    assert cnr_store.verify(tmp_path, deep=True).ok
    for world, where in ((1, alone), (3, cuts)):
        with ThreadJob(url, world, kinds, where, bits=32, tracking=cnr_store.Tracking(audit=False)) as other:
            other.load()
            assert_same(other.found(), truth)
