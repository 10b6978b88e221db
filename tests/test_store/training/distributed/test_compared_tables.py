"""Of tables whose changed rows hooks can't tell, ranks compare the rows that they write: as one process writes them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from tests.nightly import NIGHT, at_night
from tests.test_store.ranks.support import compared_job
from tests.test_store.ranks.support.rank_processes import Outcome, run_ranks
from tests.test_store.training.saving.test_compared import MAKERS, assert_holds, stored


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned, which must have raised nothing."""
    assert [each.where for each in outcomes] == [""] * len(outcomes)
    return [each.value for each in outcomes]


FOLDERS = "alone", "ranks"


def read(url: str, version: str, path: str) -> Any:
    """An array of a version."""
    array: Any = cnr_store.open(url, version)[path]
    return np.asarray(array[:])


def read_held(folder: Path, version: str) -> dict[str, torch.Tensor]:
    """What the model held, by path."""
    with np.load(folder / f"{version}.npz") as found:
        return {path.replace(" ", "/"): torch.from_numpy(found[path]) for path in found}


@pytest.mark.parametrize(
    ("policy", "form", "optimizer", "seed", "world"),
    [
        ("consecutive", "relative", "Adam", 1, 2),
        ("intermittent", "auto", "momentum", 2, 3),
        *(
            at_night(policy, form, optimizer, seed, 2 + seed % 2)
            for seed, (policy, form, optimizer) in enumerate(
                product(("consecutive", "intermittent", "one-shot"), compared_job.FORMS, ("Adam", "momentum"))
            )
        ),
    ],
)
def test_ranks_write_what_one_process_writes(
    tmp_path: Path, policy: str, form: str, optimizer: str, seed: int, world: int
) -> None:
    """Saves, loads, failures and folds: the same rows of each array, and what its codec makes of the model's."""
    operations = 40 if NIGHT else 9
    arguments: Any = policy, form, optimizer, seed, operations
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    alone, ranks = ((str(tmp_path / name / "store"), tmp_path / name) for name in FOLDERS)
    own = compared_job.live(*alone, *arguments)
    (versions, *others) = values(run_ranks(world, compared_job.live, *ranks, *arguments))
    assert others == [versions] * (world - 1)
    for one, other in zip(own, versions, strict=True):
        entries = Catalog(open_backend(ranks[0])).record(other).arrays
        written = {path: (entry.kind, entry.rows) for path, entry in entries.items()}
        expected = Catalog(open_backend(alone[0])).record(one).arrays
        assert written == {path: (entry.kind, entry.rows) for path, entry in expected.items()}
        for path in entries:
            if path.startswith("tables/"):
                found = read(ranks[0], other, path)
                np.testing.assert_array_equal(found, read(alone[0], one, path), path)
        if form != "auto":  # which stores moments without their small values
            held = read_held(ranks[1], other)
            stores = {path: stored(each, entries[path].codec) for path, each in held.items()}
            live = held if form == "uniform" else None
            assert_holds(ranks[0], other, stores, MAKERS[optimizer], torch.float32, live)
    assert not cnr_store.verify(ranks[0], deep=True).problems
