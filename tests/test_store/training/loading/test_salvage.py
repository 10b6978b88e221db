"""A load with ``salvage=True`` brings back a damaged version: rows that can't be read have their newest older value."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import cnr_store
from cnr_backends import BackendError
from cnr_store import Checkpointer, CheckpointError, CorruptionError
from cnr_store.policies.policy import PolicyName
from tests.nightly import NIGHT, TODAY
from tests.test_store.chains.test_relative import RELATIVE
from tests.test_store.support.damaged_store import (
    DAMAGES,
    ROWS,
    SLOT,
    WEIGHT,
    SavedStore,
    load,
    new_job,
    shard_of,
    train,
    values_of,
)
from tests.test_store.support.zarr_nodes import array_of

POLICIES = ("consecutive", "intermittent", "one-shot")


@pytest.fixture(scope="module", params=POLICIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedStore:
    return SavedStore(tmp_path_factory.mktemp("saved") / "store", request.param)


def check_salvaged(
    saved: SavedStore, folder: Path, older: int, version: int = -1, names: tuple[str, ...] = ("emb",)
) -> cnr_store.Restored:
    """What a damaged version is salvaged to: rows of an `older` version where it says so, else as it was saved."""
    with pytest.raises(CorruptionError):
        load(folder, saved.ids[version])
    found, restored = load(folder, saved.ids[version], salvage=True)
    expected = saved.values[version]
    assert set(restored.salvaged) == set(names)
    for name, values in found.items():
        rows = restored.salvaged[name].rows if name in names else np.empty(0, np.int64)
        kept = np.setdiff1d(np.arange(len(values)), rows)
        assert np.array_equal(values[kept], expected[name][kept]), name
        assert np.array_equal(values[rows], saved.values[older][name][rows]), name
        if name in names:
            assert rows.size
            for source, part in restored.salvaged[name].by_version.items():
                assert np.array_equal(values[part], saved.values[saved.ids.index(source)][name][part])
    return restored


@pytest.mark.slow
@pytest.mark.some_by_day(7)
@pytest.mark.parametrize(
    ("damage", "path"), [*((damage, WEIGHT) for damage in DAMAGES), ("codes flipped", SLOT)]
)
def test_rows_of_a_damaged_delta_have_the_value_before_it(
    saved: SavedStore, tmp_path: Path, damage: str, path: str
) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES[damage](shard_of(folder, saved.ids[-1], path))
    check_salvaged(saved, folder, older=-2, names=("emb" if path == WEIGHT else "emb/sum",))


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_of_a_damaged_link_in_the_middle(tmp_path: Path, damage: str, consecutive: SavedStore) -> None:
    folder = consecutive.copy(tmp_path / "store")
    DAMAGES[damage](shard_of(folder, consecutive.ids[2]))
    restored = check_salvaged(consecutive, folder, older=1)
    # A row that a newer delta holds is not lost.
    changed = (consecutive.values[4]["emb"] != consecutive.values[2]["emb"]).any(axis=1)
    assert not changed[restored.salvaged["emb"].rows].any()


@pytest.fixture(scope="module")
def consecutive(tmp_path_factory: pytest.TempPathFactory) -> SavedStore:
    return SavedStore(tmp_path_factory.mktemp("consecutive") / "store", "consecutive")


@pytest.mark.slow
def test_only_rows_of_the_damaged_chunk_are_salvaged(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["codes flipped"](shard_of(folder, saved.ids[-1]))
    chunk = check_salvaged(saved, folder, older=-2).salvaged["emb"].rows
    folder = saved.copy(tmp_path / "lost")
    DAMAGES["lost"](shard_of(folder, saved.ids[-1]))
    shard = check_salvaged(saved, folder, older=-2).salvaged["emb"].rows
    assert set(chunk) <= set(shard)


@pytest.mark.slow
def test_just_the_rows_of_a_chunk_whose_row_sets_are_proven(saved: SavedStore, tmp_path: Path) -> None:
    """Payloads prove their row sets apart from their codes, so no other row is named."""
    folder, version = saved.copy(tmp_path / "store"), saved.ids[-1]
    array = array_of(zarr.open_group(folder / "versions" / version, mode="r"), WEIGHT)
    written = ~np.isnan(np.asarray(array[...])).any(axis=1)
    DAMAGES["codes flipped"](shard_of(folder, version))
    rows = check_salvaged(saved, folder, older=-2).salvaged["emb"].rows
    assert np.array_equal(rows, np.flatnonzero(written[: min(array.chunks[0], ROWS)]))


def test_the_next_save_is_whole_and_loads(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["codes flipped"](shard_of(folder, saved.ids[-1]))
    model, optimizer = new_job()
    with Checkpointer(folder, model, optimizer, policy="consecutive", bits=32) as checkpointer:
        assert checkpointer.load(salvage=True).salvaged
        train(model, optimizer, 9)
        assert checkpointer.save(9).result().kind == "baseline"
        train(model, optimizer, 10)
        assert checkpointer.save(10).result().kind == "delta"
    values, restored = load(folder)
    assert restored.step == 10
    for name, expected in values_of(model, optimizer).items():
        assert np.array_equal(values[name], expected), name


def test_resume_salvages_what_load_does(
    saved: SavedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["codes flipped"](shard_of(folder, saved.ids[-1]))
    expected, restored = load(folder, salvage=True)
    assert restored.salvaged
    model, optimizer = new_job()
    with Checkpointer(folder, model, optimizer) as checkpointer:
        assert checkpointer.resume() == len(saved.ids) - 2
        caplog.clear()
        assert checkpointer.resume(salvage=True) == len(saved.ids) - 1
        assert "rows" in caplog.text
        found = values_of(model, optimizer)
        assert all(np.array_equal(found[name], values) for name, values in expected.items())
        assert checkpointer.save(9).result().kind == "baseline"


@pytest.mark.parametrize("name", ["zarr.json", "manifest", f"{WEIGHT}/c/0/0"])
@pytest.mark.parametrize("number", [0, 2])
def test_after_damage_was_found_the_next_save_is_whole(tmp_path: Path, name: str, number: int) -> None:
    """A delta would depend on what the load could not read, wherever that lies and however early it was found."""
    model, optimizer = new_job()
    with Checkpointer(tmp_path, model, optimizer, policy="consecutive", bits=32) as checkpointer:
        for step in range(3):
            train(model, optimizer, step)
            checkpointer.save(step).result()
        versions = cnr_store.versions(tmp_path)
        damaged = tmp_path / "versions" / versions[number].id / name
        damaged.write_bytes(damaged.read_bytes()[:-40])
        with pytest.raises(CorruptionError):
            checkpointer.load()
        train(model, optimizer, 3)
        made, expected = checkpointer.save(3).result(), values_of(model, optimizer)
    assert made.kind == "baseline"
    found, _ = load(tmp_path, made.id)
    assert all(np.array_equal(found[each], values) for each, values in expected.items())


def test_a_load_without_damage_salvages_nothing(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    model, optimizer = new_job()
    with Checkpointer(folder, model, optimizer, policy="consecutive", bits=32) as checkpointer:
        assert checkpointer.load(salvage=True).salvaged == {}
        train(model, optimizer, 9)
        assert checkpointer.save(9).result().kind == "delta"


def test_a_warning_counts_the_rows(
    saved: SavedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["lost"](shard_of(folder, saved.ids[-1]))
    with caplog.at_level(logging.WARNING, logger="cnr_store"):
        _, restored = load(folder, salvage=True)
    (message,) = [each.getMessage() for each in caplog.records if "of emb," in each.getMessage()]
    assert f"{len(restored.salvaged['emb'].rows):,} rows" in message
    assert saved.ids[-1] in message


@pytest.mark.parametrize("lost", [["t/sum"], ["t%2Fsum/weight"], ["t/sum", "t%2Fsum/weight"]])
def test_two_arrays_of_one_name_are_shown_together(tmp_path: Path, lost: list[str]) -> None:
    model = nn.ModuleDict({"t": nn.Embedding(9, 2), "t/sum": nn.Embedding(9, 2)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer, bits=32, policy="consecutive") as checkpointer:
        checkpointer.save(0).result()
        for name, row in (("t", 3), ("t/sum", 7)):
            model[name](torch.tensor([row])).sum().backward()
        optimizer.step()
        newest = checkpointer.save(1).result()
    tables = tmp_path / "versions" / newest.id / "tables"
    for path in lost:
        next(each for each in (tables / path).rglob("*") if each.is_file()).unlink()
    assert set(cnr_store.repair(tmp_path, dry_run=True).salvaged["t/sum"].rows) == set(range(9))
    restored = cnr_store.load(tmp_path, model, optimizer, salvage=True)
    assert list(restored.salvaged) == ["t/sum"]
    assert set(restored.salvaged["t/sum"].rows) == set(range(9))


def test_lost_manifest_of_a_link(consecutive: SavedStore, tmp_path: Path) -> None:
    folder = consecutive.copy(tmp_path / "store")
    (folder / "versions" / consecutive.ids[2] / "manifest").unlink()
    check_salvaged(consecutive, folder, older=1, names=("emb", "emb/sum"))


@pytest.mark.parametrize("damage", ["lost", "altered"])
def test_record_of_a_link_that_is_gone(consecutive: SavedStore, tmp_path: Path, damage: str) -> None:
    """Nothing tells what a version continued whose record is lost, so rows that only it may lead to are lost."""
    folder = consecutive.copy(tmp_path / "store")
    record = folder / "versions" / consecutive.ids[2] / "zarr.json"
    if damage == "lost":
        record.unlink()
    else:
        record.write_bytes(record.read_bytes().replace(b'"step":2', b'"step":3'))
    with pytest.raises(CorruptionError, match="no older value of them can be read"):
        load(folder, salvage=True)


def test_record_of_the_base_that_is_lost_beneath_a_fold(consecutive: SavedStore, tmp_path: Path) -> None:
    folder = consecutive.copy(tmp_path / "store")
    cnr_store.compact(folder, consecutive.ids[3])
    (folder / "versions" / consecutive.ids[1] / "zarr.json").unlink()
    DAMAGES["lost"](shard_of(folder, consecutive.ids[4]))
    check_salvaged(consecutive, folder, older=3)


def test_damaged_fold_of_a_sound_chain_loses_nothing(consecutive: SavedStore, tmp_path: Path) -> None:
    folder = consecutive.copy(tmp_path / "store")
    cnr_store.compact(folder)
    fold = next(each for each in (folder / "folds").rglob("c/0/0") if WEIGHT in str(each))
    DAMAGES["codes flipped"](fold)
    check_salvaged(consecutive, folder, older=4, names=())


def test_rows_without_any_value_are_an_error_that_names_them(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["lost"](shard_of(folder, saved.ids[0]))
    with pytest.raises(CorruptionError, match=rf"{saved.ids[-1]}, {WEIGHT}: [0-9]+ rows, .*no older value"):
        load(folder, salvage=True)


@pytest.mark.slow
def test_fallback_takes_the_version_before_if_one_cannot_be_salvaged(
    saved: SavedStore, tmp_path: Path
) -> None:
    folder = saved.copy(tmp_path / "store")
    next((folder / "versions" / saved.ids[-1] / "dense").rglob("c/0/0")).unlink()
    DAMAGES["lost"](shard_of(folder, saved.ids[-2]))
    with pytest.raises(CorruptionError):
        load(folder, salvage=True)
    _, restored = load(folder, fallback=True, salvage=True)
    assert (restored.version.id, [name for name, _ in restored.skipped]) == (saved.ids[-2], [saved.ids[-1]])
    assert restored.salvaged


def test_chosen_rows_alone_are_salvaged(saved: SavedStore, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "store")
    DAMAGES["lost"](shard_of(folder, saved.ids[-1]))
    model, optimizer = new_job()
    restored = cnr_store.load(folder, model, optimizer, rows={"emb": range(50)}, salvage=True)
    assert set(restored.salvaged["emb"].rows) <= set(range(50))
    assert np.array_equal(model.emb.weight.detach().numpy()[:50], saved.values[-2]["emb"][:50])


@pytest.mark.slow
def test_quantized_rows_are_salvaged_bit_for_bit(tmp_path: Path) -> None:
    saved = SavedStore(tmp_path / "saved", "consecutive", bits=4)
    folder = saved.copy(tmp_path / "store")
    DAMAGES["codes flipped"](shard_of(folder, saved.ids[3]))
    check_salvaged(saved, folder, older=2)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "is_folded"), [("consecutive", True), ("intermittent", False)])
def test_damage_of_any_object(tmp_path: Path, policy: PolicyName, is_folded: bool) -> None:
    """Whatever is damaged: an error, or rows as they were saved but for those named, which are as they say."""
    saved = SavedStore(tmp_path / "saved", policy, versions=3, codec=RELATIVE)
    if is_folded:
        cnr_store.compact(saved.folder)
    folder, salvaged = saved.copy(tmp_path / "store"), 0
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    for number, file in enumerate(files):
        sound = file.read_bytes()
        middle = len(sound) // 2
        flipped = sound[:middle] + bytes([sound[middle] ^ 0x10]) + sound[middle + 1 :]
        damages = (None, sound[:middle], flipped)
        for damaged in damages if NIGHT else (damages[(number + TODAY) % 3],):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            salvaged += check_any(saved, folder)
            file.write_bytes(sound)
    # A damaged fold costs no row, for the chain beneath it has the same.
    assert (salvaged > 0) != is_folded


def check_any(saved: SavedStore, folder: Path) -> bool:
    """Load what may be damaged, and say whether something of it was."""
    try:
        found, restored = load(folder, salvage=True)
    except (CheckpointError, BackendError):
        return False
    number = saved.ids.index(restored.version.id)
    for name, values in found.items():
        lost = restored.salvaged.get(name)
        rows = np.empty(0, np.int64) if lost is None else lost.rows
        kept = np.setdiff1d(np.arange(len(values)), rows)
        assert np.array_equal(values[kept], saved.values[number][name][kept])
        for source, part in lost.by_version.items() if lost is not None else ():
            assert source < restored.version.id
            assert np.array_equal(values[part], saved.values[saved.ids.index(source)][name][part])
    return bool(restored.salvaged)
