"""`verify` says how far damage reaches: how many rows it concerns, and which versions can't be restored for it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import cnr_store
from cnr_store import Checkpointer, CorruptionError, EmptyStoreError, VersionNotFoundError
from tests.test_store.support.damaged_store import DAMAGES, ROWS, WEIGHT, SavedStore, load, shard_of
from tests.test_store.support.lasting_store import change, make_model


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


@pytest.mark.slow
@pytest.mark.some_by_day(12)
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


@pytest.mark.some_by_day(4)
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


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("number", [0, 1])
def test_damage_that_newer_rows_hide(tmp_path: Path, damage: str, number: int) -> None:
    """A load asks for no chunk all of whose rows are newer, so the versions on top of these can be restored."""
    rows, folder, model = 300, tmp_path / "store", make_model(rows=300)
    with Checkpointer(folder, model, policy="consecutive", bits=32) as checkpointer:
        ids = []
        for step, changed in enumerate(([], [1, 2], range(110), range(100, 210), range(200, rows), [7], [])):
            change(checkpointer, model, list(changed))
            ids.append(checkpointer.save(step).result().id)
    assert [info.kind for info in cnr_store.versions(folder)] == ["baseline"] + ["delta"] * 6
    shard = shard_of(folder, ids[number], "tables/t/weight")
    DAMAGES[damage](shard)
    loadable = []
    for version in ids:
        with suppress(CorruptionError):
            cnr_store.load(folder, make_model(rows=300), version=version)
            loadable.append(version)
    assert loadable[-1] == ids[-1]
    assert ids[number] not in loadable
    for deep in (False, True):
        report = cnr_store.verify(folder, deep=deep)
        if report.ok:
            assert not deep
            continue
        assert list(report.restorable) == loadable
        fallen = {version for finding in report.problems for version in finding.versions}
        assert fallen == set(ids) - set(loadable)
    cnr_store.compact(folder, ids[4])  # what the fold holds of the damaged version is nothing
    assert cnr_store.verify(folder, deep=True).restorable == tuple(loadable)


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
