"""Ranks quantize on their devices the rows that they have of a shared table. What is stored is what hosts store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_store.format import grid
from cnr_store.ranks.placement import Piece
from cnr_store.training.devices import arithmetic, support
from tests.test_store.ranks.support.spread_model import Cut, TableKind
from tests.test_store.ranks.support.thread_job import ThreadJob, Truth, changed, find_spread_models
from tests.test_store.support.places import quick_folder
from tests.test_store.training.devices.conftest import stays_on_host
from tests.test_store.training.devices.device import DEVICE

DIM, WORLD = 8, 4
BY_ROWS = TableKind("rows", 300, DIM, torch.float32, {})
BY_COLUMNS = TableKind("columns", 100, DIM, torch.float32, {})
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the tables of these ranks are in host memory")


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that are taken for those of devices. Ranks are threads."""
    monkeypatch.setattr(support, "is_elsewhere", lambda device: True)
    monkeypatch.setattr(arithmetic, "WORK_BYTES", 20_000)
    find_spread_models(monkeypatch)
    monkeypatch.setattr(grid, "TARGET_CHUNK_BYTES", 1 << 9)
    monkeypatch.setattr(grid, "TARGET_SHARD_BYTES", 1 << 11)


@pytest.fixture
def quick() -> Iterator[Path]:
    with quick_folder() as folder:
        yield Path(folder)


def cuts() -> dict[str, Cut]:
    """Bands that end within chunks, the last one on two ranks; and one half of the columns on each of two."""
    bands = [(begin, end - begin, 0, DIM) for begin, end in pairwise([0, 101, 177, BY_ROWS.rows])]
    rows = [Piece(*band, rank) for rank, band in enumerate(bands)] + [Piece(*bands[-1], WORLD - 1)]
    columns = [Piece(0, BY_COLUMNS.rows, first, DIM // 2, rank) for rank, first in enumerate((0, DIM // 2))]
    return {"rows": Cut((0,), tuple(rows)), "columns": Cut((0, DIM // 2), tuple(columns))}


def run(url: str, codec: dict[str, Any]) -> Truth:
    """Save a whole version and two deltas, and return what other ranks load."""
    random, kinds = np.random.default_rng(5), [BY_ROWS, BY_COLUMNS]
    options: dict[str, Any] = {"codec": {"*": codec}, "policy": "consecutive"}
    with ThreadJob(url, WORLD, kinds, cuts(), **options) as job:
        truth = job.new_truth(random)
        truth["rows", ""][::7, 3] = np.nan
        job.fill(truth)
        job.save(1)
        for step in (2, 3):
            for kind in kinds:
                ids = np.flatnonzero(random.random(kind.rows) < 0.2)
                truth = changed(truth, kind.name, ids, random, job)
                job.change(kind.name, ids, truth, np.random.default_rng(step))
            job.save(step)
    alone = {kind.name: Cut((0,), (Piece(0, kind.rows, 0, DIM, 0),)) for kind in kinds}
    with ThreadJob(url, 1, kinds, alone, **options) as job:
        job.load()
        return job.found()


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize(
    ("codec", "saves"),
    [
        ({"id": "cnr_uniform", "scheme": "asymmetric", "bits": 4}, 3),
        ({"id": "cnr_lattice", "step": 0.1875}, 3),
        ({"id": "cnr_lattice", "step": 0.1875, "relative": True}, 3),
        ({"id": "cnr_floating", "mantissa_bits": 3, "relative": True}, 3),
        # Ranks add up the squares of their values on the host, for the whole version.
        ({"id": "cnr_lattice", "rms_step": 0.1}, 2),
    ],
    ids=str,
)
def test_shared_rows_are_stored_as_hosts_would(
    quick: Path, codec: dict[str, Any], saves: int, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(str(quick / "devices"), codec)
    assert len(set(encoded)) == 1, "columns of rows are needed as they are"
    assert len(encoded) == saves * WORLD
    stays_on_host(monkeypatch)
    wanted = run(str(quick / "hosts"), codec)
    assert len(encoded) == saves * WORLD
    for key, values in wanted.items():
        np.testing.assert_array_equal(found[key], values)
    for folder in ("devices", "hosts"):
        assert not cnr_store.verify(str(quick / folder), deep=True).problems
    sizes = [[each.bytes for each in cnr_store.versions(str(quick / name))] for name in ("devices", "hosts")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
