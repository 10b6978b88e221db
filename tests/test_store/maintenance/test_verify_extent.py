"""`verify` says how far damage reaches: how many rows it concerns, and which versions can't be restored for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cnr_store
from cnr_store import CorruptionError, EmptyStoreError, VersionNotFoundError
from tests.test_store.support.damaged_store import DAMAGES, ROWS, WEIGHT, SavedStore, load, shard_of


@pytest.fixture(scope="module", params=["consecutive", "intermittent"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedStore:
    return SavedStore(tmp_path_factory.mktemp("saved") / "store", request.param, versions=4)


def unloadable(saved: SavedStore, folder: Path) -> tuple[str, ...]:
    lost = []
    for version in saved.ids:
        try:
            load(folder, version)
        except (CorruptionError, VersionNotFoundError, EmptyStoreError):
            lost.append(version)
    return tuple(lost)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard(saved: SavedStore, tmp_path: Path, damage: str, number: int) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES[damage](shard_of(folder, saved.ids[number]))
    report = cnr_store.verify(folder, deep=True)
    (finding,) = [each for each in report.problems if each.rows is not None]
    assert finding.versions == unloadable(saved, folder)
    assert finding.versions == tuple(each for each in report.versions if each not in report.restorable)
    changed = saved.values[number]["emb"] != saved.values[max(number - 1, 0)]["emb"]
    written = next(info.rows for info in cnr_store.versions(folder) if info.id == saved.ids[number])
    in_chunk = int(changed.any(axis=1)[: len(changed) // 8].sum())
    assert in_chunk <= finding.row_count <= written
    if damage == "codes flipped":
        assert finding.row_count < ROWS  # of one chunk of several


def test_quick_check_counts_a_lost_shard(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    info = cnr_store.versions(folder)[1]
    shard_of(folder, info.id).unlink()
    (finding,) = cnr_store.verify(folder).problems
    assert (finding.path, finding.row_count) == (WEIGHT, info.rows)


@pytest.mark.parametrize("name", ["manifest", "zarr.json", "state/main.json", "dense/model/top.weight/c/0/0"])
@pytest.mark.parametrize("number", [0, 1])
def test_damaged_object_of_another_kind(saved: SavedStore, tmp_path: Path, name: str, number: int) -> None:
    folder = saved.copy(tmp_path / "store")
    file = folder / "versions" / saved.ids[number] / name
    file.write_bytes(file.read_bytes()[:-1])
    report = cnr_store.verify(folder)
    lost = set(unloadable(saved, folder)) & set(report.versions)
    named = {version for finding in report.problems for version in finding.versions}
    assert named == lost
    if name == "manifest":
        (finding,) = report.problems
        entry_rows = cnr_store.versions(folder)[number].rows
        assert finding.row_count >= 2 * entry_rows  # of the table, and of its optimizer state


def test_damaged_fold(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    cnr_store.compact(folder, saved.ids[2])
    fold = next(each for each in (folder / "folds").rglob("c/0/0") if WEIGHT in str(each))
    DAMAGES["codes flipped"](fold)
    report = cnr_store.verify(folder, deep=True)
    found = [finding for finding in report.problems if finding.path == WEIGHT]
    assert found[0].versions == unloadable(saved, folder)


def test_sound_store_concerns_nothing(saved: SavedStore) -> None:
    assert not cnr_store.verify(saved.folder, deep=True).problems
    assert np.isfinite(saved.values[-1]["emb"]).all()
