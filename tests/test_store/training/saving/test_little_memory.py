"""Where there is no room for the codes of rows, digests of them tell which rows changed, and no delta is relative."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_codecs.comparing import stored_digests
from cnr_codecs.payload.coded import Grid
from cnr_store.catalog.catalog import Catalog
from cnr_store.training.process import memory
from cnr_store.training.saving import planner
from tests.test_store.training.saving.test_compared import (
    DIM,
    FORMS,
    MAKERS,
    ROWS,
    WAYS,
    Job,
    assert_holds,
    by_data,
    check_history,
)

GRIDDED = ["relative", "lattice", "parents"]
ALL = 5 * ROWS * DIM  # bytes of codes of the large table: one for each weight, two for each value of a moment


def leave(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(planner, "free_bytes", lambda: nbytes)


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("policy", ["intermittent", "consecutive", "auto"])
@pytest.mark.parametrize("form", GRIDDED)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("room", [0, 2 * ALL])  # codes of some arrays
def test_each_version_holds_what_its_codecs_make_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any, form: str, name: str, room: int
) -> None:
    leave(monkeypatch, room * (3 if form == "parents" else 1))
    check_history(tmp_path, policy, form, MAKERS[name], seed=2, operations=14)


@pytest.mark.parametrize("way", [by_data, WAYS[-1]])
def test_rows_of_other_codes_alone_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: Any
) -> None:
    leave(monkeypatch, 0)
    job = Job(MAKERS["Adam"])
    job.weight.data[9, 3] = torch.inf  # raw
    options = FORMS["relative"] | {"policy": "consecutive", "tracking": cnr_store.Tracking(audit=False)}
    with caplog.at_level(logging.WARNING, "cnr_store"):
        with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **options) as checkpointer:
            job.train(np.random.default_rng(0))
            checkpointer.save(0).result()
            step = (
                Catalog(open_backend(tmp_path))
                .record(checkpointer.save(1).result().id)
                .arrays["tables/a/weight"]
                .codec
            )
            assert step is not None
            job.weight.data += 1e-3 * step["step"]  # of a table in which few codes change
            few = checkpointer.save(2).result()
            way(job.weight)
            one = checkpointer.save(3).result()
            explained = checkpointer.explain()
        assert few.rows < ROWS / 5
        assert one.rows == 1
        assert (explained.code_bytes, explained.digest_bytes) == (0, 3 * 8 * (ROWS + 90))
        assert "0.0 kB of codes, 19.0 kB of digests" in str(explained)
        told = [each.getMessage() for each in caplog.records if "Digests" in each.getMessage()]
        assert len(told) == 1
        assert told[0].startswith("tables/a/weight: its codes take 0.0 MB of memory, and 0.0 MB are left.")
        newer = Job(MAKERS["Adam"])
        with cnr_store.Checkpointer(tmp_path, newer.model, newer.optimizer, **options) as checkpointer:
            checkpointer.load()
            assert checkpointer.save(4).result().rows == 0
            way(newer.weight)
            info = checkpointer.save(5).result()
    assert info.rows == 1
    assert_holds(tmp_path, info.id, newer.expected(tmp_path, info.id), newer.make, torch.float32)


def test_room_is_half_of_the_free_memory_and_codes_are_kept_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    for free in (4 * ALL, 4 * ALL - 4):
        leave(monkeypatch, free)
        job = Job(MAKERS["Adam"])
        job.train(np.random.default_rng(0))
        url = tmp_path / str(free)
        with cnr_store.Checkpointer(url, job.model, job.optimizer, **FORMS["relative"]) as checkpointer:
            checkpointer.save(0).result()
            checkpointer.save(1).result()
            kept.append(checkpointer.explain().code_bytes)
    assert kept[0] == ALL
    assert kept[1] < ALL


@pytest.mark.parametrize("grid", [Grid(0.125), Grid(mantissa=3)])
def test_digests_are_of_what_is_stored(grid: Grid) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(500, 8)).astype(np.float32)
    rows[3, 1], rows[4] = np.nan, 0
    digests = stored_digests(rows, grid, "float32", 7)
    moved = rows * np.float32(1 + 1e-7)
    alike = stored_digests(moved, grid, "float32", 7) == digests
    assert alike[[*range(3), *range(4, 500)]].mean() > 0.95
    other = rows.copy()
    other[np.arange(500), random.integers(8, size=500)] += np.float32(1)
    assert (stored_digests(other, grid, "float32", 7) != digests)[[*range(3), *range(4, 500)]].all()
    assert (stored_digests(-rows, grid, "float32", 7) != digests)[rows.any(axis=1)].all()
    assert stored_digests(rows, grid, "float32", 8)[0] != digests[0]


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:    5 kB\n"}, 5 << 10),
        ({"meminfo": "MemAvailable: 5 kB", "memory.max": "max\n", "memory.current": "7"}, 5 << 10),
        ({"meminfo": "MemAvailable: 5 kB", "memory.max": "2000", "memory.current": "700"}, 1300),
        (
            {"memory.max": "2000", "memory.current": "1900", "memory.stat": "anon 1\ninactive_file 600\n"},
            700,
        ),
        ({"memory/memory.limit_in_bytes": "2000", "memory/memory.usage_in_bytes": "3000"}, 0),
    ],
)
def test_free_memory_is_that_of_the_machine_and_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int
) -> None:
    for name, text in files.items():
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert memory.free_bytes() == free
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.free_bytes() == free // 4
