"""Long histories of a job whose rows and state are integers: each version has those of the values at a row's last save.

A history has several lives of a job, with saves, loads of the newest and of older versions, and folds. In each life a
put or a commit fails, or a rank is killed. What a rank holds it writes down before each save and after each load; all
versions are compared with what the readable quantizers make of that, by every reader.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr

import cnr_store
from cnr_backends import open_backend
from cnr_store import Checkpointer, RanksError, SaveError
from cnr_store.catalog.catalog import Catalog
from cnr_store.format import grid
from cnr_store.format.record import STILL
from cnr_store.training.saving import decays
from tests.nightly import TODAY, at_night
from tests.test_codecs.references import floating, lattice
from tests.test_codecs.references.floating import floating_values
from tests.test_codecs.references.lattice import values_of
from tests.test_codecs.references.moved import moved_codes, moved_values
from tests.test_docs import block
from tests.test_store.chains.test_relative import RELATIVE, count_relative, no_findings
from tests.test_store.ranks.support.failing_save import POINT, TIMEOUT_SECONDS, prepare
from tests.test_store.ranks.support.rank_processes import run_ranks
from tests.test_store.ranks.support.shared_model import (
    DIM,
    GRID_LIMITS_BYTES,
    ITEMS,
    USERS,
    SharedModel,
    Values,
    checkpointer_of,
    cut_small,
    together,
)
from tests.test_store.support.follower import Follower

Item = TypeVar("Item")
PATHS = {
    "users": "tables/users/weight",
    "users/sum": "tables/users/sum",  # of Adagrad
    "users/exp_avg": "tables/users/exp_avg",  # of Adam
    "users/exp_avg_sq": "tables/users/exp_avg_sq",
    "items": "tables/items/weight",
}
MIXED = "consecutive", "intermittent", "auto", "one-shot", "full"
BETAS = (0.9, 0.999), (0.5, 0.75), (0.0, 0.9)
TINY, NAN, HUGE = 5, 13, 21
"""Users whose gradients are so: the moments of the first come to rest at the least normal number."""
SAVES = 6
"""Of a life, one of which fails."""
LIVES, SHORT_LIVES = 8, 2
"""The first make 40 versions, and load 13 times."""
TROUBLES = {
    1: [("put", 0, "raise"), ("commit", 0, "raise")],
    3: [
        ("put", 1, "raise"),
        ("encode", 2, "SIGKILL"),
        ("commit", 0, "raise"),
        ("vote", 1, "SIGKILL"),
        ("outcome", 0, "SIGKILL"),
    ],
}
"""By the number of ranks: phase of a save, rank, and what becomes of it."""


class GridModel(SharedModel):
    """Rows move by parts of a step and by many; half of the items are zeros at first. Adam moves all users."""

    def __init__(self, rank: int, world: int, is_adam: bool) -> None:
        super().__init__(rank, world)
        if is_adam:
            self.users.sparse = False
            self.optimizer = torch.optim.Adam([*self.users.parameters(), *self.top.parameters()], lr=0.03)
        self.items.copy_(self._drawn(0, ITEMS)[self.first :][: len(self.items)])
        self.items[1::2] = 0

    def train(self, step: int, checkpointer: Checkpointer) -> None:  # type: ignore[override]
        """One step, alike on every number of ranks."""
        ids, sizes = torch.arange(step % 7, USERS, 7), torch.ones(USERS)
        sizes[TINY], sizes[NAN], sizes[HUGE] = 1e-37, torch.nan if step > 4 else 1, 1e18
        (self.users(ids[:, None]) * self._drawn(step, len(ids)) * sizes[ids, None]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        changed = torch.arange(step % 5, ITEMS, 5)
        own = changed[(changed >= self.first) & (changed < self.first + len(self.items))]
        self.items[own - self.first] += 0.3 * self._drawn(-step, ITEMS)[own]
        checkpointer.touch("items", changed)

    def held(self) -> Values:
        """Copies of what is on a grid."""
        state = self.optimizer.state[self.users.weight]
        kept = {f"users/{slot}": kept.numpy().copy() for slot, kept in state.items() if kept.ndim}
        return kept | {"users": self.users.weight.detach().numpy().copy(), "items": self.items.numpy().copy()}

    def _drawn(self, step: int, rows: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(1000 + step).normal(0, 1, (rows, DIM)).astype("f4"))


class Notes:
    """What one rank held, in files, which are there after it was killed.

    Of each save: the values, those of the save or load before, and the version of that, "" of none.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / str(rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.before: Values = {}
        self.previous = ""

    def save(self, step: int, values: Values) -> None:
        self._write(
            f"save-{step}", {**values, **{f"before {name}": each for name, each in self.before.items()}}
        )

    def load(self, step: int, version: str, values: Values) -> None:
        self.before, self.previous = values, version
        self._write(f"load-{step}", values)

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        np.savez(self._folder / f"{name}.npz", previous=self.previous, **values)

    def read(self, name: str) -> Values:
        with np.load(self._folder / f"{name}.npz") as found:
            return dict(found)

    def loads(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("load-*.npz"))


def live(
    url: str,
    folder: Path,
    seed: int,
    life: int,
    policy: str,
    is_adam: bool,
    is_exact: bool,
    phase: str,
    victim: int,
    how: str,
) -> None:
    """A rank of a job that loads what there is, saves, and meets trouble at its third save, or dies at its last."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world > 1:
        cut_small()
    decays._LEAST_ROWS = USERS
    random, notes = np.random.default_rng([seed, life]), Notes(folder, rank)
    model = GridModel(rank, world, is_adam)
    trouble, backend = prepare(url, phase if rank == victim else "", how, rank)
    options: dict[str, Any] = {"codec": {"*": RELATIVE}, "bits": "auto", "state_bits": {"*": "m3"}}
    if is_exact:
        codec = {"id": "cnr_floating", "mantissa_bits": 23}
        options = {"codec": {"*": codec}, "state_bits": {"*": "m23"}}
        options["limits"] = cnr_store.Limits(exact_parents=True)
    options |= {
        "policy": MIXED[(seed + life) % len(MIXED)] if policy == "mixed" else policy,
        "retention": cnr_store.Retention(max_chain=64),
        "failures": cnr_store.Failures(timeout_seconds=TIMEOUT_SECONDS),
    }
    checkpointer = checkpointer_of(model, backend, **options)

    def load(step: int, version: str) -> None:
        found = checkpointer.load(version).version.id
        notes.load(step, found, model.held())

    for number in range(SAVES):
        step = SAVES * life + number
        if number == 0 and life:
            load(step, "latest")
        elif number == 3 and life % 4:
            load(step, str(random.choice([each.id for each in cnr_store.versions(url)])))
        if number == 1 and is_adam:
            model.optimizer.param_groups[0]["betas"] = BETAS[int(random.integers(len(BETAS)))]
        model.train(step, checkpointer)
        values, trouble.armed = model.held(), number == (2 if how == "raise" else SAVES - 1)
        notes.save(step, values)
        try:
            version = checkpointer.save(step).result().id
        except (SaveError, RanksError):
            assert number == (2 if how == "raise" else SAVES - 1)
            if how == "SIGKILL":
                return
            continue
        notes.before, notes.previous = values, version
        if rank == 0 and step % 4 == 0:
            fold(url, version)
    checkpointer.close()


def fold(url: str, version: str) -> None:
    """Fold, which changes no bit."""
    there = Catalog(open_backend(url)).record(version).arrays
    before = {path: read(url, version, path) for path in PATHS.values() if path in there}
    cnr_store.compact(url, version)
    for path, values in before.items():
        assert_same_bits(read(url, version, path), values)


def assert_same_bits(found: Any, expected: Any, what: str = "") -> None:
    """Of float32; NaN, too, has the bits that were saved."""
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), expected.view(np.uint32), what)


def read(url: str, version: str, path: str) -> Any:
    array: Any = cnr_store.open(url, version)[path]
    return np.asarray(array[:])


def check(url: str, folder: Path, world: int) -> tuple[dict[str, Values], int]:
    """Compare all versions and all loads with the integers of what was written down.

    Returns what each version has, and how many loads there were.
    """
    ranks, catalog = [Notes(folder, rank) for rank in range(world)], Catalog(open_backend(url))
    expected: dict[str, Values] = {"": {}}
    moves: dict[str, Any] = {}
    for record in catalog.oldest_first():
        parts = [each.read(f"save-{record.step}") for each in ranks]
        (previous,) = {str(each["previous"]) for each in parts}
        values = together(parts)
        names = [name for name, path in PATHS.items() if path in record.arrays]
        before: dict[str, Any] = {name: values.get(f"before {name}") for name in names}
        if previous:
            before["items"] = np.concatenate([each["before items"] for each in parts])
        found = {}
        for name in names:
            path = PATHS[name]
            entry, kept = record.arrays[path], on_grid(values[name], record.arrays[path].codec)
            if entry.kind == "delta" and entry.move == moves[previous][path]:
                bits = (each[name].view(np.uint32) for each in (values, before))
                same = np.equal(*bits).all(axis=1)
                kept = np.where(same[:, None], expected[previous][name], kept)
            assert_same_bits(read(url, record.id, path), kept, f"{record.step} {name}")
            found[name] = kept
        expected[record.id] = found
        moves[record.id] = {path: entry.move for path, entry in record.arrays.items()}
    for name in ranks[0].loads():
        loaded = [each.read(name) for each in ranks]
        (version,) = {str(each["previous"]) for each in loaded}
        for table, held in expected[version].items():
            assert_same_bits(together(loaded)[table], held, f"{name} {table}")
    del expected[""]
    return expected, len(ranks[0].loads())


def spread(whole: Iterable[Item]) -> list[Item]:
    """Some, from the first to the last."""
    found = [*whole]
    return [found[number * (len(found) - 1) // 3] for number in range(4)]


def check_readers(url: str, folder: Path, expected: Mapping[str, Values]) -> None:
    """Compare what other readers find with what versions have; also one that adds the integers of links up by itself.

    Of wholes and folds, readers that know no versions find it, too.
    """
    names: dict[str, Any] = {}
    exec(compile(block("reader"), "docs/format.md", "exec"), names)
    catalog = Catalog(open_backend(url))
    for number, version in enumerate(spread(expected)):
        overlay: Any = zarr.open_group(cnr_store.view(url, version), mode="r")
        exported = str(folder / f"{version}.zarr")
        cnr_store.export(url, exported, version)
        there: Any = zarr.open_group(exported, mode="r")
        for name, values in expected[version].items():
            path, ids = PATHS[name], np.arange(number, len(values), 9)
            assert_same_bits(overlay[path][:], values, path)
            assert_same_bits(names["read_rows"](url, version, path), values, path)
            assert_same_bits(cnr_store.rows(url, path, ids, version), values[ids], path)
            if path in there:  # models alone are exported
                assert_same_bits(there[path][:], values, path)
    for version, arrays in expected.items():
        for home in filter(None, (catalog.record(version), catalog.find_fold(version))):
            folder_of = home.key().rpartition("/")[0]
            plain: Any = zarr.open_group(f"{url}/{folder_of}", mode="r")
            for name, values in arrays.items():
                if PATHS[name] in home.arrays and home.arrays[PATHS[name]].kind == "whole":
                    there = plain[home.key(PATHS[name]).removeprefix(f"{folder_of}/")]
                    assert_same_bits(there[:], values, f"{home.home}, {name}")


def check_diffs(url: str, expected: Mapping[str, Values]) -> None:
    """Compare what `diff` finds of neighbours, and of versions that are far apart, with what they have."""
    versions = [*expected]
    for older, newer in spread([*pairwise(versions), (versions[0], versions[-1])]):
        found = {each.path: each.rows_changed for each in cnr_store.diff(url, older, newer)}
        for name in expected[older].keys() & expected[newer].keys():
            bits = (each[name].view(np.uint32) for each in (expected[older], expected[newer]))
            assert found[PATHS[name]] == int(np.not_equal(*bits).any(axis=1).sum()), (older, newer, name)


def on_grid(values: Any, codec: Any) -> Any:
    """What rows read back as: by the readable quantizers."""
    if codec["id"] == "cnr_lattice":
        codes, raw = lattice.codes_of(values, codec["step"], 32767)
        found = values_of(codes, codec["step"], "float32")
    else:
        mantissa, move = codec["mantissa_bits"], (codec.get("scale", 1.0), codec.get("shift", 0))
        if move == STILL:
            codes, raw = floating.codes_of(values, mantissa, "float32")
            found = floating_values(codes, mantissa, "float32")
        else:
            codes, raw = moved_codes(values, mantissa, *move)
            found = moved_values(codes, mantissa, *move)
    return np.where(raw[:, None], values, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "policy", "is_adam", "is_exact", "lives"),
    [
        (1, "consecutive", False, False, SHORT_LIVES),
        (1, "mixed", True, False, SHORT_LIVES),
        (1, "consecutive", False, True, SHORT_LIVES),
        (3, "mixed", True, True, SHORT_LIVES),
        *(
            at_night(world, policy, is_adam, is_exact, LIVES)
            for world, policy, is_adam, is_exact in product(
                (1, 3), ("consecutive", "intermittent", "mixed"), (False, True), (False, True)
            )
        ),
    ],
)
def test_versions_are_the_integers_of_the_values_at_the_last_saves(
    tmp_path: Path,
    world: int,
    policy: str,
    is_adam: bool,
    is_exact: bool,
    lives: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, folder = str(tmp_path / "store"), tmp_path / "notes"
    for name, nbytes in GRID_LIMITS_BYTES.items():
        monkeypatch.setattr(grid, name, nbytes)
    follower = Follower(open_backend(url))
    for life in range(lives):
        trouble = TROUBLES[world][life % len(TROUBLES[world])]
        arguments = (url, folder, TODAY, life, policy, is_adam, is_exact, *trouble)
        if world == 1:
            live(*arguments)
        else:
            _, victim, how = trouble
            sent = {(victim, POINT): [(victim, signal.SIGKILL)]} if how == "SIGKILL" else {}
            found = run_ranks(world, live, *arguments, signals=sent)
            killed = [rank for rank, each in enumerate(found) if each.signal]
            assert killed == ([victim] if how == "SIGKILL" else [])
            assert not any(each.where for each in found), found
        follower.catch_up()
    expected, loads = check(url, folder, world)
    for update in cnr_store.follow(url):  # one that takes all from the beginning on
        for name, rows, values in update.blocks():
            if rows is not None:
                assert_same_bits(values, expected[update.version.id][name.removesuffix(".weight")][rows])
    for name in ("users", "items"):
        assert_same_bits(follower.arrays[f"{name}.weight"], [*expected.values()][-1][name])
    check_readers(url, tmp_path, expected)
    check_diffs(url, expected)
    assert len(expected) >= (SAVES - 1) * lives
    assert loads == lives - 1 + sum(life % 4 > 0 for life in range(lives))
    records = Catalog(open_backend(url)).oldest_first()
    assert any("moving" in record.requires for record in records) == (is_adam and not is_exact)
    assert sum(count_relative(url, each.id) for each in cnr_store.versions(url)) > 100
    no_findings(Path(url))
