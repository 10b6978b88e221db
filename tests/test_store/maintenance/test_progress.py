"""Work on a store tells how far it is, and is the same on any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cnr_store
from tests.test_store.support.damaged_store import DAMAGES, SavedStore, shard_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedStore:
    return SavedStore(tmp_path_factory.mktemp("saved") / "store", "consecutive", bits=4)


def damaged(saved: SavedStore, folder: Path) -> Path:
    store = saved.copy(folder)
    DAMAGES["codes flipped"](shard_of(store, saved.ids[-1]))
    return store


@pytest.mark.parametrize(
    "work",
    [
        lambda url, **options: cnr_store.verify(url, deep=True, **options),
        lambda url, **options: replace(cnr_store.compact(url, 2, **options), bytes=0, seconds=0.0),
        lambda url, **options: replace(cnr_store.repair(url, **options), repaired=None, bytes=0),
    ],
    ids=["verify", "compact", "repair"],
)
def test_any_number_of_workers_does_the_same_and_tells_its_progress(
    saved: SavedStore, tmp_path: Path, work: Callable[..., Any]
) -> None:
    found, seen = [], list[tuple[int, int | None]]()
    for workers in (1, 3):
        seen.clear()
        store = damaged(saved, tmp_path / str(workers))
        found.append(
            str(work(store, workers=workers, progress=lambda done, known: seen.append((done, known))))
        )
        assert seen
        assert seen == sorted(seen)
    assert found[0] == found[1]


def test_retention_tells_its_progress(tmp_path: Path) -> None:
    SavedStore(tmp_path / "store", "full", versions=3)
    seen: list[tuple[int, int | None]] = []
    report = cnr_store.gc(tmp_path / "store", 1, progress=lambda done, known: seen.append((done, known)))
    assert len(report.removed) == 2
    assert seen[-1] == (2, 2)


def test_a_fold_tells_what_it_wrote(saved: SavedStore, tmp_path: Path) -> None:
    store = saved.copy(tmp_path / "store")
    report = cnr_store.compact(store, saved.ids[2])
    written = [path.stat().st_size for path in (store / "folds").rglob("*") if path.is_file()]
    assert (report.version, report.outcome, report.bytes) == (saved.ids[2], "folded", sum(written))
    assert report.links == 3
    assert {"tables/emb/weight", "tables/emb/sum"} <= set(report.arrays)
    assert report.rows > 0
    assert report.seconds > 0
