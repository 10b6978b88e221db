"""Grids that move with state that decays: rows that are not looked up are not written, and every reader finds the
values that the version's grid gives them.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam, SparseAdam

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing.faulty import FaultyBackend
from cnr_store import Checkpointer
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import CorruptionError, FormatError, SaveError
from cnr_store.format import layout, record_document
from cnr_store.format.record_document import NO_DIGEST, with_digest
from cnr_store.training.saving import decays
from tests.nightly import at_night
from tests.test_docs import block
from tests.test_store.chains.test_relative import RELATIVE, count_relative
from tests.test_store.training.saving.test_compared import stored

ROWS, DIM = 3000, 8
FIRST, SECOND = "tables/users/exp_avg", "tables/users/exp_avg_sq"
Values = np.ndarray[Any, Any]


class Job:
    """A table under Adam, of which each interval looks up a few rows, and what each version is to give back."""

    def __init__(
        self,
        url: Path,
        policy: Any = "consecutive",
        betas: Any = (0.9, 0.999),
        is_sparse: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.url, self.random = url, np.random.default_rng(0)
        self.storage: Any = str(url)
        self.options = {
            "policy": policy,
            "codec": {"*": RELATIVE},
            "bits": "auto",
            "state_bits": "m3",
            **options,
        }
        self.model = nn.ModuleDict({"users": nn.Embedding(ROWS, DIM, sparse=is_sparse)})
        kind: Any = SparseAdam if is_sparse else Adam
        self.optimizer: Any = kind(self.model.parameters(), lr=0.01, betas=betas)
        self.expected: dict[str, dict[str, Values]] = {}
        self.train(np.arange(0, ROWS, 2))

    def train(self, ids: Any = None, steps: int = 3, scale: float = 1.0) -> None:
        users: Any = self.model["users"]
        for _ in range(steps):
            chosen = self.random.integers(ROWS, size=40) if ids is None else ids
            self.optimizer.zero_grad()
            rows = users(torch.from_numpy(chosen))
            (rows * torch.from_numpy(self.random.normal(0, scale, rows.shape)).float()).sum().backward()
            self.optimizer.step()

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(
            self.storage, self.model, self.optimizer, tracking=cnr_store.Tracking(audit=False), **self.options
        )

    def save(self, checkpointer: Checkpointer, step: int, full: bool = False) -> str:
        version = checkpointer.save(step, full=full).result().id
        state = self.optimizer.state[self.model.get_parameter("users.weight")]
        entries = entries_of(self.url, version)
        self.expected[version] = {
            path: stored(state[path.rsplit("/", 1)[1]], entries[path].codec) for path in (FIRST, SECOND)
        }
        return version

    def run(self, saves: int = 4) -> list[str]:
        with self.checkpointer() as checkpointer:
            for step in range(saves):
                self.train()
                self.save(checkpointer, step)
        return [*self.expected]


def entries_of(url: Path, version: str) -> Mapping[str, Any]:
    return Catalog(open_backend(str(url))).record(version).arrays


def moves(url: Path, version: str) -> list[tuple[float, int]]:
    return [entries_of(url, version)[path].move for path in (FIRST, SECOND)]


def held(url: Path, version: str, path: str) -> Values:
    array: Any = cnr_store.open(str(url), version)[path]
    return np.asarray(array[:])


def total(move: tuple[float, int]) -> float:
    return move[0] * 2.0 ** move[1]


@pytest.fixture(scope="module")
def first_moved(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(tmp_path_factory.mktemp("moved"))
    job.run()
    return job


@pytest.fixture
def moved(first_moved: Job, tmp_path: Path) -> Job:
    """A job of 4 versions, each test's own copy."""
    job = copy.copy(first_moved)
    job.url = Path(shutil.copytree(first_moved.url, tmp_path / "store"))
    return job


@pytest.mark.parametrize("policy", ["consecutive", *map(at_night, ("intermittent", "one-shot", "auto"))])
def test_rows_that_only_decay_are_not_written_and_have_their_values(tmp_path: Path, policy: str) -> None:
    job = Job(tmp_path, policy)
    versions = job.run()
    names: dict[str, Any] = {}
    exec(compile(block("reader"), "docs/format.md", "exec"), names)
    for number, version in enumerate(versions):
        entries = entries_of(tmp_path, version)
        for path, factor in ((FIRST, 0.9**3), (SECOND, 0.999**3)):
            if number:
                assert entries[path].kind == "delta"
                assert entries[path].rows <= 130 * number, (path, number)
            assert total(entries[path].move) == pytest.approx(factor**-number, rel=1e-5)
            expected = job.expected[version][path]
            np.testing.assert_array_equal(held(tmp_path, version, path), expected)
            assert names["read_rows"](tmp_path, version, path).tobytes() == expected.tobytes()
        assert ("moving" in Catalog(open_backend(str(tmp_path))).record(version).requires) == (number > 0)
    assert count_relative(str(tmp_path), versions[-1], SECOND) > 0
    assert not cnr_store.verify(str(tmp_path), deep=True).problems


def test_folds_carry_the_grid_and_exports_its_values(moved: Job) -> None:
    version = [*moved.expected][-1]
    cnr_store.compact(str(moved.url), version)
    for path, expected in moved.expected[version].items():
        np.testing.assert_array_equal(held(moved.url, version, path), expected)
    fold = Catalog(open_backend(str(moved.url))).find_fold(version)
    assert fold is not None
    assert "moving" in fold.requires
    assert fold.arrays[FIRST].move == moves(moved.url, version)[0]
    names: dict[str, Any] = {}
    exec(compile(block("reader"), "docs/format.md", "exec"), names)
    assert names["read_rows"](moved.url, version, FIRST).tobytes() == moved.expected[version][FIRST].tobytes()
    assert not cnr_store.verify(str(moved.url), deep=True).problems


def test_all_rows_changed_where_the_grid_moved(moved: Job) -> None:
    first, second, *_ = moved.expected
    for each in cnr_store.diff(str(moved.url), first, second):
        if each.path in (FIRST, SECOND):
            old, new = moved.expected[first][each.path], moved.expected[second][each.path]
            assert each.rows_changed == int((old != new).any(axis=1).sum()) > ROWS / 3
    assert {each.status for each in cnr_store.diff(str(moved.url), second, second)} == {"equal"}


def test_no_row_changed_between_branches_that_moved_alike(tmp_path: Path) -> None:
    """Their versions in between have moved less. A factor of a power of two is found without an error."""
    betas = 0.5, 0.75
    first = Job(tmp_path, betas=betas).run(1)[0]
    ends = []
    for _ in range(2):
        job = Job(tmp_path, betas=betas)
        with job.checkpointer() as checkpointer:
            checkpointer.load(first)
            for step in (7, 8):
                job.train()
                job.save(checkpointer, step)
        ends.append([*job.expected][-1])
    assert moves(tmp_path, ends[0])[0] == moves(tmp_path, ends[1])[0] == (1.0, 6)
    found = {each.path: each.rows_changed for each in cnr_store.diff(str(tmp_path), *ends)}
    assert found.get(FIRST, 0) == 0


@pytest.mark.parametrize("policy", [at_night("consecutive"), "intermittent"])
def test_a_load_goes_on_where_the_grid_has_moved_to(tmp_path: Path, policy: str) -> None:
    job = Job(tmp_path, policy)
    version = job.run()[-1]
    again = Job(tmp_path, policy)
    with again.checkpointer() as checkpointer:
        checkpointer.load()
        for step in (7, 8):
            again.train()
            version = again.save(checkpointer, step)
            number = 3 + step - 6
            for path, factor in ((FIRST, 0.9**3), (SECOND, 0.999**3)):
                entry = entries_of(tmp_path, version)[path]
                assert (entry.kind, entry.rows <= 130 * number) == ("delta", True)
                assert total(entry.move) == pytest.approx(factor**-number, rel=1e-5)
                np.testing.assert_array_equal(held(tmp_path, version, path), again.expected[version][path])


def test_whole_versions_begin_anew_and_failed_saves_are_made_up_for(tmp_path: Path) -> None:
    """What a failed save saw, which would have begun anew, tells the next one nothing."""
    job, fails = Job(tmp_path), False
    job.storage = FaultyBackend(open_backend(str(tmp_path)), lambda *_: "full" if fails else None)
    with job.checkpointer() as checkpointer:
        for step, full in enumerate((False, True, False, True)):
            job.train()
            fails = step == 1
            with pytest.raises(SaveError) if fails else nullcontext():
                job.save(checkpointer, step, full)
    assert len(job.expected) == 3
    first, second, third = job.expected
    assert moves(tmp_path, first) == moves(tmp_path, third) == [(1.0, 0), (1.0, 0)]
    for path, factor in ((FIRST, 0.9**6), (SECOND, 0.999**6)):
        entry = entries_of(tmp_path, second)[path]
        assert total(entry.move) == pytest.approx(1 / factor, rel=1e-5)
        assert entry.rows <= 260


@pytest.mark.parametrize("state_bits", [at_night(32), at_night(8), "m23"])
def test_state_that_leaves_its_grid_is_whole(moved: Job, state_bits: Any) -> None:
    """A reader could not mix its rows with those beneath."""
    job = Job(moved.url, state_bits=state_bits)
    with job.checkpointer() as checkpointer:
        checkpointer.load()
        job.train()
        version = checkpointer.save(9).result().id
    entries = entries_of(moved.url, version)
    assert [entries[path].kind for path in (FIRST, SECOND)] == ["whole", "whole"]
    assert entries["tables/users/weight"].kind == "delta"
    assert moves(moved.url, version) == [(1.0, 0), (1.0, 0)]


def test_state_of_other_bits_keeps_the_grid(moved: Job) -> None:
    """Or it is whole: no value may change that is not written."""
    job = Job(moved.url, state_bits="m2")
    with job.checkpointer() as checkpointer:
        checkpointer.load()
        job.train()
        version = job.save(checkpointer, 9)
    for path, expected in job.expected[version].items():
        np.testing.assert_array_equal(held(moved.url, version, path), expected)


def test_rows_that_hooks_tell_keep_their_grid(tmp_path: Path) -> None:
    """Most of them decay by one factor, but nothing tells that those without a flag do."""
    Job(tmp_path, is_sparse=True).run(1)
    job = Job(tmp_path, is_sparse=True)
    with job.checkpointer() as checkpointer:
        checkpointer.load()
        job.train(np.arange(ROWS - 100), steps=1, scale=0.0)
        version = job.save(checkpointer, 9)
    assert entries_of(tmp_path, version)[FIRST].kind == "delta"
    assert moves(tmp_path, version) == [(1.0, 0), (1.0, 0)]
    for path, expected in job.expected[version].items():
        np.testing.assert_array_equal(held(tmp_path, version, path), expected)


def test_integers_that_have_no_room_are_whole_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = (1 << 15 >> 3) - decays._SPARE_OCTAVES  # of codes of 3 bits
    monkeypatch.setattr(decays, "_SPARE_OCTAVES", decays._SPARE_OCTAVES + most - 2)
    job = Job(tmp_path)
    versions = job.run(9)
    shifts = [moves(tmp_path, version)[0][1] for version in versions]
    kinds = [entries_of(tmp_path, version)[FIRST].kind for version in versions]
    assert kinds == ["whole", *["delta"] * 5, "whole", "delta", "delta"], shifts
    for version, arrays in job.expected.items():
        np.testing.assert_array_equal(held(tmp_path, version, FIRST), arrays[FIRST])


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_lost_has_its_older_value_on_its_own_grid(moved: Job, whole: bool) -> None:
    """And all other rows the values of the version that is read."""
    *_, third, last = moved.expected
    (key,) = [key for key, _ in open_backend(str(moved.url)).list_keys(f"versions/{last}/{FIRST}/c")]
    data = bytearray((moved.url / key).read_bytes())
    data[len(data) // 2] ^= 1  # the payload still tells which rows it has
    (moved.url / key).write_bytes(b"damaged" if whole else data)
    with pytest.raises(CorruptionError):
        held(moved.url, last, FIRST)
    other = Job(moved.url)
    found = cnr_store.load(str(moved.url), other.model, other.optimizer, version=last, salvage=True)
    rows = found.salvaged["users/exp_avg"].by_version
    values = other.optimizer.state[other.model.get_parameter("users.weight")]["exp_avg"].numpy()
    lost = np.zeros(ROWS, bool)
    for version, ids in rows.items():
        lost[ids] = True
        np.testing.assert_array_equal(values[ids], moved.expected[version][FIRST][ids])
    assert [*rows] == [third]  # also where rows that it did not write are stored in older versions
    assert lost.all() if whole else 0 < lost.sum() <= 130
    np.testing.assert_array_equal(values[~lost], moved.expected[last][FIRST][~lost])
    cnr_store.repair(str(moved.url), last)
    assert held(moved.url, "latest", FIRST).tobytes() == values.tobytes()
    assert not cnr_store.verify(str(moved.url), "latest", deep=True).problems


def test_a_job_goes_on_from_what_was_repaired(moved: Job) -> None:
    """Repaired rows are raw: they lie on the grid, and do not move with it."""
    last = [*moved.expected][-1]
    (key,) = [key for key, _ in open_backend(str(moved.url)).list_keys(f"versions/{last}/{FIRST}/c")]
    data = bytearray((moved.url / key).read_bytes())
    data[len(data) // 2] ^= 1
    (moved.url / key).write_bytes(data)
    cnr_store.repair(str(moved.url), last)
    job = Job(moved.url)
    with job.checkpointer() as checkpointer:
        checkpointer.load()
        for step in (7, 8):
            job.train()
            job.save(checkpointer, step)
    assert total(moves(moved.url, [*job.expected][-1])[0]) > total(moves(moved.url, last)[0])
    for version, arrays in job.expected.items():
        for path, expected in arrays.items():
            np.testing.assert_array_equal(held(moved.url, version, path), expected)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_bits_that_change_and_change_back_over_a_fold(tmp_path: Path, is_sparse: bool) -> None:
    """A fold holds rows of both grids under one codec. A value of the coarser one lies on the finer one, too."""
    for number, state_bits in enumerate(("m3", "m2", "m3")):
        job = Job(tmp_path, is_sparse=is_sparse, state_bits=state_bits)
        with job.checkpointer() as checkpointer:
            if number:
                checkpointer.load()
            for step in range(2):
                job.train()
                version = job.save(checkpointer, 10 * number + step)
        cnr_store.compact(str(tmp_path), version)
        if number == 2:
            for each, arrays in job.expected.items():
                changed = held(tmp_path, each, FIRST), arrays[FIRST]
                # Rows that were written at m2 and did not change since keep those values.
                assert np.abs(changed[0] - changed[1]).max() <= np.abs(changed[1]).max() / 8
    assert not cnr_store.verify(str(tmp_path), deep=True).problems


def test_relative_rows_are_composed_on_the_grid_of_what_was_salvaged(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.checkpointer() as checkpointer:
        for step in range(4):
            job.train(np.arange(0, 300, 7))
            job.save(checkpointer, step)
    *_, third, last = job.expected
    (key,) = [key for key, _ in open_backend(str(tmp_path)).list_keys(f"versions/{last}/{SECOND}/c")]
    data = bytearray((tmp_path / key).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / key).write_bytes(data)
    assert count_relative(str(tmp_path), third, SECOND) > 0
    other = Job(tmp_path)
    found = cnr_store.load(str(tmp_path), other.model, other.optimizer, version=last, salvage=True)
    (version, rows), *more = found.salvaged["users/exp_avg_sq"].by_version.items()
    assert (version, more) == (third, [])
    values = other.optimizer.state[other.model.get_parameter("users.weight")]["exp_avg_sq"].numpy()
    np.testing.assert_array_equal(values[rows], job.expected[third][SECOND][rows])


def test_older_readers_refuse_it_by_name(moved: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    version = [*moved.expected][-1]
    monkeypatch.setattr(record_document, "FEATURES", layout.FEATURES - {"moving"})
    with pytest.raises(FormatError, match="requires moving: install a newer cnr-store"):
        cnr_store.open(str(moved.url), version)


NOWHERE, ELSEWHERE = "its grid has moved to", "and the record says|moved further"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"scale": scale}, NOWHERE) for scale in (None, 0.0, 0.5, 2.0, 2.5)),
        *(({"shift": shift}, NOWHERE) for shift in (-1, 1 << 14, 0.5)),
        ({"scale": 1.25}, ELSEWHERE),
        ({"shift": 2}, ELSEWHERE),
        ({"scale": 1.0, "shift": 0}, ELSEWHERE),
        ({"scale": 1.0, "shift": 16_383}, ELSEWHERE),  # beyond all exponents
    ],
)
def test_a_record_that_says_another_grid_is_damage(moved: Job, wrong: dict[str, Any], message: str) -> None:
    version = [*moved.expected][-1]

    def change(cnr: dict[str, Any]) -> None:
        for form in cnr["tables"]["forms"]:
            if "shift" in form["codec"]:
                form["codec"] |= wrong

    key = moved.url / "versions" / version / "zarr.json"
    doc = json.loads(key.read_bytes())
    cnr = doc["attributes"]["cnr"]
    change(cnr)
    cnr["digest"] = NO_DIGEST
    key.write_bytes(with_digest(json.dumps(doc, separators=(",", ":")).encode()))
    with pytest.raises(CorruptionError, match=message):
        held(moved.url, version, FIRST)
