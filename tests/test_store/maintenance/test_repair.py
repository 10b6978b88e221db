"""`repair` commits a sound version out of a damaged one, and deletes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import BackendError, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import (
    Checkpointer,
    CheckpointError,
    CorruptionError,
    EmptyStoreError,
    OptionError,
    SupersededError,
)
from tests.test_store.chains.test_relative import RELATIVE
from tests.test_store.support.damaged_store import (
    DAMAGES,
    SLOT,
    WEIGHT,
    SavedStore,
    load,
    new_job,
    shard_of,
    train,
)

POLICIES = ("consecutive", "intermittent", "one-shot")


@pytest.fixture(scope="module", params=POLICIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedStore:
    options: Any = {"codec": RELATIVE} if request.param == "consecutive" else {"bits": 4}
    return SavedStore(tmp_path_factory.mktemp("saved") / "store", request.param, **options)


@pytest.fixture(scope="module")
def consecutive(tmp_path_factory: pytest.TempPathFactory) -> SavedStore:
    return SavedStore(tmp_path_factory.mktemp("consecutive") / "store", "consecutive", bits=4)


def objects(folder: Path) -> dict[str, bytes]:
    # The reserve is as large as there is room.
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "reserve")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def check_repaired(folder: Path) -> cnr_store.RepairReport:
    """Repair the newest version, and compare what it is then with what a salvaging load of it gave before."""
    expected, restored = load(folder, salvage=True)
    before, versions = objects(folder), cnr_store.versions(folder)
    looked = cnr_store.repair(folder, dry_run=True)
    assert (looked.outcome, looked.repaired) == ("repairable", None)
    assert objects(folder) == before
    done = cnr_store.repair(folder)
    assert (done.outcome, done.version) == ("repaired", versions[-1].id)
    assert done.damaged == looked.damaged
    for name, lost in restored.salvaged.items():
        for version, rows in lost.by_version.items():
            assert np.array_equal(done.salvaged[name].by_version[version], rows)
    assert set(done.salvaged) == set(restored.salvaged)
    after = objects(folder)
    assert {key: after.get(key) for key in before} == before
    newest = cnr_store.versions(folder)[-1]
    assert (newest.id, newest.step, newest.kind, newest.previous) == (
        done.repaired,
        versions[-1].step,
        "baseline",
        versions[-1].id,
    )
    assert newest.bytes == done.bytes
    found, _ = load(folder)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert done.repaired in cnr_store.verify(folder, deep=True).restorable
    return done


@pytest.mark.slow
@pytest.mark.some_by_day(7)
@pytest.mark.parametrize(
    ("damage", "path"), [*((damage, WEIGHT) for damage in DAMAGES), ("codes flipped", SLOT)]
)
def test_damaged_delta(saved: SavedStore, tmp_path: Path, damage: str, path: str) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES[damage](shard_of(folder, saved.ids[-1], path))
    done = check_repaired(folder)
    assert done.damaged == ("emb" if path == WEIGHT else "emb/sum",)


@pytest.mark.slow
def test_lost_manifest_in_the_middle(consecutive: SavedStore, tmp_path: Path) -> None:
    folder = consecutive.copy(tmp_path / "store")
    (folder / "versions" / consecutive.ids[2] / "manifest").unlink()
    assert set(check_repaired(folder).damaged) == {"emb", "emb/sum"}


def test_lost_manifest_of_a_base_that_a_fold_stands_for(consecutive: SavedStore, tmp_path: Path) -> None:
    folder = consecutive.copy(tmp_path / "store")
    cnr_store.compact(folder, consecutive.ids[3])
    (folder / "versions" / consecutive.ids[0] / "manifest").unlink()
    DAMAGES["lost"](shard_of(folder, consecutive.ids[4]))
    check_repaired(folder)


def test_damaged_fold_loses_nothing(consecutive: SavedStore, tmp_path: Path) -> None:
    folder = consecutive.copy(tmp_path / "store")
    cnr_store.compact(folder)
    fold = next(each for each in (folder / "folds").rglob("c/0/0") if WEIGHT in str(each))
    DAMAGES["codes flipped"](fold)
    done = check_repaired(folder)
    assert (done.damaged, done.salvaged) == (("emb",), {})
    found, _ = load(folder)
    assert np.array_equal(found["emb"], consecutive.values[-1]["emb"])


def test_sound_version(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    before = objects(folder)
    assert cnr_store.repair(folder) == cnr_store.RepairReport(saved.ids[-1], "sound")
    assert objects(folder) == before


def test_training_goes_on_from_a_repaired_version(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["codes flipped"](shard_of(folder, saved.ids[-1]))
    cnr_store.repair(folder)
    model, optimizer = new_job()
    with Checkpointer(folder, model, optimizer, policy="consecutive", bits=4) as checkpointer:
        checkpointer.load()
        train(model, optimizer, 9)
        assert checkpointer.save(9).result().kind == "delta"
    assert load(folder)[1].step == 9
    assert cnr_store.versions(folder)[-1].id in cnr_store.verify(folder, deep=True).restorable


@pytest.mark.parametrize("name", ["state/main.json", "dense/model/top.weight/c/0/0", "manifest"])
def test_damage_of_something_else_is_an_error(saved: SavedStore, tmp_path: Path, name: str) -> None:
    folder = saved.copy(tmp_path / "store")
    file = folder / "versions" / saved.ids[-1] / name
    file.write_bytes(file.read_bytes()[:-1])
    before = objects(folder)
    with pytest.raises(CorruptionError):
        cnr_store.repair(folder)
    assert objects(folder) == before


def test_rows_without_any_value_are_an_error(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["lost"](shard_of(folder, saved.ids[0]))
    before = objects(folder)
    with pytest.raises(CorruptionError, match="no older value"):
        cnr_store.repair(folder)
    assert objects(folder) == before


def test_beside_a_run_that_may_be_live(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["codes flipped"](shard_of(folder, saved.ids[-1]))
    model, optimizer = new_job()
    with Checkpointer(folder, model, optimizer, bits=4) as checkpointer:
        checkpointer.load(salvage=True)
        checkpointer.save(9).result()
        before = objects(folder)
        assert cnr_store.repair(folder, saved.ids[-1], dry_run=True).outcome == "repairable"
        with pytest.raises(SupersededError, match=r"has not closed its claim.*cnr gc --end-run"):
            cnr_store.repair(folder, saved.ids[-1])
        assert objects(folder) == before
    assert cnr_store.repair(folder, saved.ids[-1]).outcome == "repaired"


def end_second_run(folder: Path) -> None:
    """Remove its claim, which it could not close if it never learned that it had one."""
    for claim in (folder / "writers").glob("000002*"):
        claim.unlink()


@pytest.mark.slow
@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("kind", ["before", "after", "full"])
def test_storage_that_fails_at_any_operation(consecutive: SavedStore, tmp_path: Path, kind: Fault) -> None:
    """Then the version is repaired, or it is as it was, and a second attempt repairs it."""
    damaged = consecutive.copy(tmp_path / "damaged")
    DAMAGES["codes flipped"](shard_of(damaged, consecutive.ids[-1]))
    expected, _ = load(damaged, salvage=True)
    before = objects(damaged)
    operation, struck = 0, True
    while struck:
        folder = Path(shutil.copytree(damaged, tmp_path / str(operation)))
        backend = FaultyBackend(
            open_backend(folder), lambda *at, number=operation: kind if at[2] == number else None
        )
        try:
            cnr_store.repair(backend)
        except (CheckpointError, BackendError):
            assert [info.id for info in cnr_store.versions(folder)] == consecutive.ids
            end_second_run(folder)
            assert cnr_store.repair(folder).outcome == "repaired"
        after = objects(folder)
        assert {key: after.get(key) for key in before} == before
        found, _ = load(folder)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        shutil.rmtree(folder)
        struck, operation = len(backend.log) > operation, operation + 1
    assert operation > 5


def test_options(saved: SavedStore, tmp_path: Path) -> None:
    workers: Any
    for workers in (0, True, 1.5):
        with pytest.raises(OptionError, match="workers"):
            cnr_store.repair(saved.folder, workers=workers)
    with pytest.raises(EmptyStoreError):
        cnr_store.repair(tmp_path / "empty")


class Mixed(nn.Module):
    """A table beside dense tensors of other types, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(3000, 8)
        self.narrow = nn.Embedding(500, 8).to(torch.bfloat16)
        self.top = nn.Linear(8, 8).to(torch.bfloat16)
        self.same = self.emb
        self.register_buffer("count", torch.tensor(7))


def test_everything_of_a_version_is_kept(tmp_path: Path) -> None:
    model = Mixed()
    folder = tmp_path / "store"
    reader: dict[str, Any] = {"positions": np.arange(5000), "rest": (1, b"x")}
    with Checkpointer(folder, model, policy="consecutive", bits=4) as checkpointer:
        for step in range(3):
            with torch.no_grad():
                model.emb.weight[step * 100 : step * 100 + 50] += 1
            checkpointer.touch("emb", range(step * 100, step * 100 + 50))
            checkpointer.save(step, reader=reader, metadata={"a": (1, 2)}).result()
        rng = torch.get_rng_state()
    version = cnr_store.versions(folder)[-1].id
    DAMAGES["lost"](shard_of(folder, version))
    before = cnr_store.state_dict(folder, cnr_store.versions(folder)[-2])
    done = cnr_store.repair(folder)
    assert done.repaired is not None
    other = Mixed()
    torch.manual_seed(0)
    restored = cnr_store.load(folder, other)
    assert (restored.version.id, restored.step, restored.metadata) == (done.repaired, 2, {"a": (1, 2)})
    assert np.array_equal(restored.reader["positions"], reader["positions"])
    assert restored.reader["rest"] == reader["rest"]
    assert torch.equal(torch.get_rng_state(), rng)
    values = cnr_store.state_dict(folder)
    assert values.keys() == before.keys()
    assert all(np.array_equal(values[name], before[name]) for name in before)


def test_a_damaged_root_is_told_before_anything_is_written(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["lost"](shard_of(folder, saved.ids[-1]))
    (folder / "zarr.json").write_bytes(b"{")
    before = objects(folder)
    for version in (saved.ids[-1], "latest"):
        with pytest.raises(CheckpointError, match=r"zarr\.json"):
            cnr_store.repair(folder, version)
    assert objects(folder) == before
