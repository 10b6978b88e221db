"""Of tables whose changed rows hooks can't tell, ranks compare the rows that they write: as one process writes them."""

from __future__ import annotations

import re
import signal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.format import grid
from tests.nightly import NIGHT, at_night
from tests.test_store.chains.test_relative import count_relative
from tests.test_store.ranks.support import compared_job, comparing_ranks
from tests.test_store.ranks.support.failing_save import POINT, TIMEOUT_SECONDS
from tests.test_store.ranks.support.rank_processes import Outcome, run_ranks
from tests.test_store.ranks.support.shared_model import GRID_LIMITS_BYTES
from tests.test_store.training.saving.test_compared import FORMS, MAKERS, ROWS, assert_holds, stored


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned, which must have raised nothing."""
    assert [each.where for each in outcomes] == [""] * len(outcomes)
    return [each.value for each in outcomes]


pytestmark = pytest.mark.slow

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
    tmp_path: Path,
    policy: str,
    form: str,
    optimizer: str,
    seed: int,
    world: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saves, loads, failures and folds: the same rows of each array, and what its codec makes of the model's."""
    for name, nbytes in GRID_LIMITS_BYTES.items():  # or deltas of one process would take fewer bytes
        monkeypatch.setattr(grid, name, nbytes)
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
        held = read_held(ranks[1], other)
        stores = {path: stored(each, entries[path].codec) for path, each in held.items()}
        live = held if form == "uniform" else None
        assert_holds(ranks[0], other, stores, MAKERS[optimizer], torch.float32, live)
    assert not cnr_store.verify(ranks[0], deep=True).problems


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 2)])
def test_a_job_goes_on_with_other_ranks(tmp_path: Path, form: str, worlds: tuple[int, int]) -> None:
    """Each rank notes of the rows that it loads what it writes of them: the first save is a delta at once."""
    first, second = (
        run_ranks(world, comparing_ranks.go_on, str(tmp_path / "store"), form, 2 * place)
        for place, world in enumerate(worlds)
    )
    assert values(first)[0][0] == ("baseline", ROWS + 90)
    for kind, rows in (values(first)[0][1], *values(second)[0]):
        assert (kind, rows < ROWS / 4) == ("delta", True), (first, second)


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("how", ["interrupt", "error"])
@pytest.mark.parametrize("victim", [1, 0])
def test_no_rank_saves_where_one_can_not_compare(tmp_path: Path, victim: int, how: str) -> None:
    found = values(run_ranks(2, comparing_ranks.compare_with_trouble, str(tmp_path / "store"), victim, how))
    for rank, (error, text, (kind, rows)) in enumerate(found):
        own = {"error": "MemoryError", "interrupt": "KeyboardInterrupt"}[how]
        assert error == (own if rank == victim else "SaveError"), text
        assert rank == victim or (f"rank {victim}" in text and own in text)
        assert (kind, 0 < rows < ROWS / 4) == ("delta", True)
    assert len(cnr_store.versions(str(tmp_path / "store"))) == 2


@pytest.mark.nightly
def test_ranks_wait_for_one_that_compares(tmp_path: Path) -> None:
    for saved in values(run_ranks(3, comparing_ranks.compare_slowly, str(tmp_path / "store"), 1.5)):
        assert [kind for kind, _ in saved] == ["baseline", "delta"]


def check_held(url: str, version: str, arrays: dict[str, Any]) -> None:
    """Check that a version gives back what its codecs make of arrays."""
    entries = Catalog(open_backend(url)).record(version).arrays
    expected = {path: stored(torch.from_numpy(each), entries[path].codec) for path, each in arrays.items()}
    assert_holds(url, version, expected, MAKERS["Adam"], torch.float32)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("poor", "form", "policy"),
    [*product(([0], [1], [2], [0, 1], [0, 1, 2]), ("relative", "lattice"), ("consecutive", "intermittent"))],
)
def test_ranks_may_know_what_is_stored_in_unlike_ways(
    tmp_path: Path, poor: list[int], form: str, policy: str
) -> None:
    """Some have digests of their rows, and write these absolute; the others have codes."""
    url = str(tmp_path / "store")
    found = values(run_ranks(3, comparing_ranks.know_unlike, url, form, policy, poor))
    assert [[version for version, _ in each] for each in found] == [[version for version, _ in found[0]]] * 3
    for version, arrays in found[0]:
        check_held(url, version, arrays)
    records = [Catalog(open_backend(url)).record(version) for version, _ in found[0][1:]]
    for number, record in enumerate(records):
        entry = record.arrays["tables/a/weight"]
        assert (entry.kind, 50 < entry.rows < ROWS / 2) == ("delta", True)
        relative = count_relative(url, record.id, "tables/a/weight")
        if form != "relative" or len(poor) == 3:
            assert relative == 0
        elif number < (
            3 if policy == "consecutive" else 2
        ):  # a load leaves rows over the whole version unknown
            share = relative / entry.rows
            assert abs(share - (3 - len(poor)) / 3) < 0.25, (number, share)
    assert not cnr_store.verify(url, deep=True).problems


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("victim", range(3))
def test_a_rank_that_falls_silent_as_it_compares_is_named(tmp_path: Path, victim: int, how: str) -> None:
    """No rank saves, the version before stays, and the job goes on from it with whatever ranks are left."""
    url, sent = str(tmp_path / "store"), {(victim, POINT): [(victim, signal.Signals[how])]}
    found = run_ranks(3, comparing_ranks.fall_silent, url, victim, signals=sent, wake=True)
    for rank, each in enumerate(found):
        if rank == victim and how == "SIGKILL":
            assert each.signal == signal.SIGKILL
            continue
        error, text, seconds, first = each.value
        assert error == "SaveError"
        if rank != victim:
            assert seconds < 3 * TIMEOUT_SECONDS
            assert re.search(rf"compare: .*rank {victim} did not answer", text), text
    (version,) = cnr_store.versions(url)
    check_held(url, version.id, first)
    again = values(run_ranks(2, comparing_ranks.go_on_after_silence, url))
    for rows, held in again:
        assert [kind for kind, _ in rows] == ["delta", "delta"]
        assert rows[0] == ("delta", 1)
        for number, arrays in held:
            check_held(url, number or version.id, arrays)
