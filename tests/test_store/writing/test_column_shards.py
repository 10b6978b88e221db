"""State that follows column shards keeps its boundaries, whatever is done with its version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_store
from cnr_backends import open_backend
from cnr_codecs import LosslessRows
from cnr_store import CheckpointError, SaveError
from cnr_store.catalog.catalog import open_record
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.format import layout
from cnr_store.format.layout import slot_path, weight_path
from cnr_store.training.saving.snapshot import StagedRows
from cnr_store.writing.plan import Plan, RowsWrite
from cnr_store.writing.writer import Writer

ROWS, DIM = 50, 8
WEIGHT, SLOT = weight_path("items"), slot_path("items", "momentum1")
BOUNDARIES = (0, 3, 8)
STATE = {"reader": None, "rng": None}
CHANGED = np.array([3, 7])


def rows_of(path: str, columns: int, value: float, base: str | None, boundaries: Any = ()) -> RowsWrite:
    ids = None if base is None else CHANGED
    values = np.full((ROWS if ids is None else len(ids), columns), value, np.float32)
    source = StagedRows(values)
    return RowsWrite(
        path, (ROWS, columns), "float32", base, ids, source, LosslessRows(), boundaries=boundaries
    )


def plan(step: int, base: str | None, boundaries: tuple[int, ...] = BOUNDARIES) -> Plan:
    rows = [
        rows_of(WEIGHT, DIM, step, base),
        rows_of(SLOT, len(boundaries) - 1, step + 0.5, base, boundaries),
    ]
    needs = () if base is None else (base,)
    parts = {0: {"reader": "a", "rng": None}, 1: {"reader": "b", "rng": None}}
    return Plan(step, base, rows, [], STATE, {"policy": "full"}, needs, state_parts=parts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A baseline and a delta over it."""
    writer = Writer(open_backend(tmp_path / "store"), workers=1)
    writer.write(plan(2, writer.write(plan(1, None)).id))
    writer.close()
    return tmp_path / "store"


def slot_of(folder: Path) -> np.ndarray[Any, Any]:
    """The slot's rows, once its boundaries are found to be as written."""
    catalog, record = open_record(folder, "latest")
    assert record.arrays[SLOT].boundaries == BOUNDARIES
    assert {layout.COLUMN_BOUNDARIES, layout.STATE_PARTS} <= set(record.requires)
    reader = ArrayReader(catalog, record, SLOT)
    out = np.empty((ROWS, 2), np.float32)
    reader.read(0, out)
    report = cnr_store.verify(folder, deep=True)
    assert (report.problems, report.leftovers) == ((), ())
    return out


def test_boundaries_stay(folder: Path) -> None:
    expected = np.full((ROWS, 2), 1.5, np.float32)
    expected[CHANGED] = 2.5
    assert np.array_equal(slot_of(folder), expected)
    assert cnr_store.compact(folder).outcome == "folded"
    assert np.array_equal(slot_of(folder), expected)
    cnr_store.gc(folder, keep_last=1)
    assert np.array_equal(slot_of(folder), expected)


def test_a_repaired_version_has_its_boundaries(folder: Path) -> None:
    (folder / layout.version_key(cnr_store.versions(folder)[-1].id, SLOT, "c/0/0")).unlink()
    assert cnr_store.repair(folder).outcome == "repaired"
    catalog, record = open_record(folder, "latest")
    assert record.arrays[SLOT].boundaries == BOUNDARIES
    assert layout.COLUMN_BOUNDARIES in record.requires
    assert catalog.state(record)["ranks"] == catalog.state(catalog.find(1))["ranks"]
    out = np.empty((ROWS, 2), np.float32)
    ArrayReader(catalog, record, SLOT).read(0, out)
    assert np.array_equal(out, np.full((ROWS, 2), 1.5, np.float32))


@pytest.mark.parametrize("boundaries", [(0, 3, 7), (0, 3, 9), (1, 3, 8), (0, 8, 8)])
def test_boundaries_of_another_table_are_not_committed(tmp_path: Path, boundaries: tuple[int, ...]) -> None:
    writer = Writer(open_backend(tmp_path / "store"), workers=1)
    with pytest.raises(SaveError, match="boundaries"):
        writer.write(plan(1, None, boundaries))
    assert cnr_store.versions(tmp_path / "store") == []


def test_more_parts_than_readers_accept_are_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.writing.writer.MAX_RANKS", 1)
    with pytest.raises(CheckpointError, match="2 ranks save one version, and at most 1 can"):
        Writer(open_backend(tmp_path / "store"), workers=1).write(plan(1, None))
