"""A version that several ranks saved is verified, kept, repaired, read and loaded with what each of them saved."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import Transfer, open_backend
from cnr_store import Checkpointer, CorruptionError, OptionError
from cnr_store.catalog.catalog import open_record
from cnr_store.cli.app import main
from cnr_store.format import layout
from cnr_store.ranks.group import Alone
from cnr_store.training.loading.load_result import Restored
from cnr_store.training.loading.match import Selection
from cnr_store.training.loading.restore import Restore
from cnr_store.training.model.trained_model import TrainedModel
from tests.test_store.ranks.support.rank_processes import Outcome, run_ranks
from tests.test_store.ranks.support.saved_by_ranks import (
    STEPS,
    make,
    random_numbers,
    save_alone,
    save_on_ranks,
)

WORLD = 2


@dataclass(frozen=True)
class Saved:
    """A store that two ranks saved, what each of them had, and the same store by one process."""

    folder: Path
    ranks: list[dict[str, Any]]
    alone: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    outcomes: list[Outcome] = run_ranks(WORLD, save_on_ranks, str(folder / "ranks"))
    assert [outcome.where for outcome in outcomes] == [""] * WORLD
    save_alone(folder / "alone")
    return Saved(folder / "ranks", [outcome.value for outcome in outcomes], folder / "alone")


@pytest.fixture
def folder(saved: Saved, tmp_path: Path) -> Path:
    return shutil.copytree(saved.folder, tmp_path / "store")


def newest(folder: Path) -> str:
    return cnr_store.versions(folder)[-1].id


def part_of(folder: Path, rank: int, version: str = "") -> Path:
    return folder / layout.version_key(version or newest(folder), layout.state_part(rank))


class At(Alone):
    """One of several ranks, which talks to none."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world


def load_at(folder: Path, rank: int, world: int, rng: bool = True) -> tuple[Restored, bytes]:
    """What one of the ranks of a job loads, and its random numbers then."""
    catalog, record = open_record(folder, "latest")
    model, optimizer = make()
    torch.manual_seed(7)
    trained = TrainedModel.from_arguments(model, optimizer)
    restore = Restore(catalog, record, trained, {}, Selection(), group=At(rank, world))
    with Transfer(2, 4) as transfer:
        restored, _ = restore.run(rng, transfer)
    return restored, random_numbers()


def fresh_numbers() -> bytes:
    torch.manual_seed(7)
    return random_numbers()


def readers_of(restored: Restored) -> list[int]:
    return [reader["rank"] for reader in restored.readers]


@pytest.mark.slow
def test_each_rank_gets_what_it_saved(saved: Saved) -> None:
    for rank, found in enumerate(saved.ranks):
        assert found["reader"] == rank
        assert found["readers"] == ()
        assert found["after"] == found["before"]
        restored, numbers = load_at(saved.folder, rank, WORLD)
        assert restored.reader["rank"] == rank
        assert np.array_equal(restored.reader["large"], np.arange(3000) + rank)
        assert numbers == found["before"]
    assert saved.ranks[0]["before"] != saved.ranks[1]["before"]


def test_what_is_read_is_what_one_process_saves(saved: Saved, tmp_path: Path) -> None:
    ours, theirs = cnr_store.state_dict(saved.folder), cnr_store.state_dict(saved.alone)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert [(info.step, info.kind, info.rows) for info in cnr_store.versions(saved.folder)] == [
        (info.step, info.kind, info.rows) for info in cnr_store.versions(saved.alone)
    ]
    targets = [tmp_path / "ranks.safetensors", tmp_path / "alone.safetensors"]
    for store, target in zip((saved.folder, saved.alone), targets, strict=True):
        cnr_store.export(store, target)
    assert targets[0].read_bytes()[-1000:] == targets[1].read_bytes()[-1000:]
    differing = [{each.path for each in cnr_store.diff(store, 0, 1)} for store in (saved.folder, saved.alone)]
    assert {path for path in differing[0] if "state" not in path} == {
        path for path in differing[1] if "state" not in path
    }
    model, _ = make()
    for update in cnr_store.follow(saved.folder):
        update.apply(model)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    assert all(np.array_equal(weights[name], theirs[name]) for name in theirs)


def test_a_sound_store_has_no_finding_and_no_leftover(saved: Saved) -> None:
    report = cnr_store.verify(saved.folder, deep=True)
    assert (report.problems, report.leftovers, report.suspicious) == ((), (), ())
    assert len(report.restorable) == STEPS
    listed = {key for key, _ in open_backend(saved.folder).list_keys("versions")}
    assert report.objects == len(listed - {"versions/zarr.json"})


def lose(folder: Path) -> None:
    part_of(folder, 1).unlink()


def alter(folder: Path) -> None:
    part = part_of(folder, 1)
    part.write_bytes(part.read_bytes().replace(b"1", b"2", 1))


def swap(folder: Path) -> None:
    one, other = part_of(folder, 0), part_of(folder, 1)
    one.rename(folder / "one")
    other.rename(one)
    (folder / "one").rename(other)


def take_an_older_one(folder: Path) -> None:
    first = cnr_store.versions(folder)[0].id
    shutil.copyfile(part_of(folder, 1, first), part_of(folder, 1))


@pytest.mark.parametrize("damage", [lose, alter, swap, take_an_older_one])
@pytest.mark.parametrize("deep", [False, True])
def test_a_damaged_part_is_named(folder: Path, damage: Callable[[Path], None], deep: bool) -> None:
    version = newest(folder)
    key = layout.version_key(version, layout.state_part(1))
    damage(folder)
    report = cnr_store.verify(folder, deep=deep)
    assert key in {finding.key for finding in report.problems}
    assert len(report.problems) == (2 if damage is swap else 1)
    assert all(finding.versions == (version,) for finding in report.problems)
    assert report.restorable == (cnr_store.versions(folder)[0].id,)
    assert report.leftovers == ()
    for rank, world in ((1, WORLD), (0, 1)):
        with pytest.raises(CorruptionError, match="state/ranks/00000"):
            load_at(folder, rank, world)
    with pytest.raises(CorruptionError, match="state/ranks/00000"):
        cnr_store.repair(folder)
    model, optimizer = make()
    assert cnr_store.load(folder, model, optimizer, fallback=True).step == 0


def test_a_state_that_is_lost_makes_its_parts_no_leftovers(folder: Path) -> None:
    (folder / layout.version_key(newest(folder), "state/main.json")).unlink()
    report = cnr_store.verify(folder)
    assert [finding.key for finding in report.problems] == [
        layout.version_key(newest(folder), "state/main.json")
    ]
    assert report.leftovers == ()


def test_a_part_too_many_is_a_leftover(folder: Path) -> None:
    shutil.copyfile(part_of(folder, 1), part_of(folder, 2))
    report = cnr_store.verify(folder)
    assert report.problems == ()
    assert sum(leftovers.objects for leftovers in report.leftovers) == 1


def cnr(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_info_tells_what_each_rank_wrote(
    saved: Saved, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ranks = saved.ranks[0]["ranks"]
    assert ranks == saved.ranks[1]["ranks"]
    assert ranks["world"] == len(ranks["bytes"]) == len(ranks["seconds"]) == WORLD
    facts = json.loads(cnr(capsys, "info", str(folder), "--json"))
    assert facts["policy"]["ranks"] == ranks
    assert facts["lost"] is None
    # The first rank adds manifest, state and record.
    assert 0 < facts["bytes"] - sum(ranks["bytes"]) < facts["bytes"]
    shown = cnr(capsys, "info", str(folder))
    assert f"saved by 2, {min(ranks['bytes']):,} to {max(ranks['bytes']):,} bytes" in shown
    lose(folder)
    facts = json.loads(cnr(capsys, "info", str(folder), "--json"))
    assert facts["lost"] == f"{layout.version_key(newest(folder), layout.state_part(1))} is lost"


def test_another_number_of_ranks_gets_all_readers_and_numbers_of_its_own(
    saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    found = [load_at(saved.folder, rank, 3) for rank in range(3)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # by the first rank
    assert "saved by another number of ranks (2, and there are 3 now)" in caplog.text
    for restored, _ in found:
        assert restored.reader is None
        assert readers_of(restored) == [0, 1]
    numbers = [each for _, each in found]
    assert len({*numbers, *(each["before"] for each in saved.ranks)}) == 5
    assert [load_at(saved.folder, rank, 3)[1] for rank in range(3)] == numbers
    assert load_at(saved.folder, 1, 3, rng=False)[1] == fresh_numbers()


def test_one_process_s_reader_and_numbers_go_to_no_rank_of_many(saved: Saved) -> None:
    found = [load_at(saved.alone, rank, 2) for rank in range(2)]
    assert [readers_of(restored) for restored, _ in found] == [[0], [0]]
    _, exact = load_at(saved.alone, 0, 1)
    assert len({exact, *(numbers for _, numbers in found)}) == 3


def test_a_load_by_one_process_warns_of_readers(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make()
    with Checkpointer(saved.folder, model, optimizer) as checkpointer:
        restored = checkpointer.load()
        assert readers_of(restored) == [0, 1]
        assert caplog.text.count("another number of ranks saved readers (2, and there are 1 now)") == 1
        caplog.clear()
        checkpointer.load(tables="emb")
        assert "saved readers" not in caplog.text


class Place:
    """A reader that any number of ranks can go on with."""

    def __init__(self) -> None:
        self.state: Any = None

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def split_state(self, states: list[Any], rank: int, world: int) -> Any:
        return [state["rank"] for state in states], rank, world


class Fixed:
    load_state_dict = Place.load_state_dict


def test_a_reader_that_can_be_divided_goes_on(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make()
    with Checkpointer(saved.folder, model, optimizer) as checkpointer:
        place = Place()
        assert checkpointer.resume(place) == STEPS - 1
        assert place.state == ([0, 1], 0, 1)
        assert "reader" not in caplog.text
        with pytest.raises(
            OptionError, match=r"readers of another number of ranks \(2, .*: Fixed has no split_state"
        ):
            checkpointer.resume(Fixed())
        checkpointer.resume()
        assert (
            caplog.text.count("resume() got no reader: the data continues from your reader's own position")
            == 1
        )


def test_a_repaired_version_has_the_parts_of_all_ranks(saved: Saved, folder: Path) -> None:
    version = newest(folder)
    (folder / layout.version_key(version, layout.weight_path("emb"), "c/0/0")).unlink()
    report = cnr_store.repair(folder)
    assert report.outcome == "repaired"
    assert report.repaired is not None
    checked = cnr_store.verify(folder, report.repaired, deep=True)
    assert (checked.problems, checked.leftovers) == ((), ())
    for rank in range(WORLD):
        assert part_of(folder, rank).read_bytes() == part_of(folder, rank, version).read_bytes()
        restored, numbers = load_at(folder, rank, WORLD)
        assert restored.version.id == report.repaired
        assert restored.reader["rank"] == rank
        assert numbers == saved.ranks[rank]["before"]
    _, record = open_record(folder, "latest")
    assert record.policy["ranks"] == {"world": WORLD}


def test_what_is_kept_has_its_parts(folder: Path) -> None:
    cnr_store.compact(folder)
    cnr_store.gc(folder, keep_last=1)
    assert len(cnr_store.versions(folder)) == 1
    report = cnr_store.verify(folder, deep=True)
    assert (report.problems, report.leftovers) == ((), ())
    assert load_at(folder, 1, WORLD)[0].reader["rank"] == 1
