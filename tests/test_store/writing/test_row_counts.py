"""How many rows of arrays on grids are raw, on a finer step, or zero: in records, `cnr info` and the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_store import Checkpointer
from cnr_store.catalog.catalog import open_record
from cnr_store.format.record import ArrayEntry
from tests.test_store.cli.command import cnr

ROWS, DIM = 600, 8
WEIGHT, MOMENT = "tables/songs/weight", "tables/songs/exp_avg_sq"
LATTICE = {"id": "cnr_lattice", "rms_step": 0.1}


def model_of() -> nn.ModuleDict:
    """A table of normal rows, of which ten are of infinities, twenty are 10,000 times smaller, and thirty are zeros."""
    torch.manual_seed(1)
    songs = nn.Embedding(ROWS, DIM)
    with torch.no_grad():
        songs.weight[:10], songs.weight[200:230] = torch.inf, 0
        songs.weight[100:120] *= 1e-4
    return nn.ModuleDict({"songs": songs})


def entries(url: Path, version: Any = "latest") -> Mapping[str, ArrayEntry]:
    return open_record(str(url), version)[1].arrays


def counts(url: Path, path: str) -> tuple[int, ...]:
    return tuple(entries(url)[path].counts.values())


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("then", [[], [{"id": "zstd", "level": 1}]])
def test_each_version_counts_the_rows_that_it_has(tmp_path: Path, relative: bool, then: list[Any]) -> None:
    model, codec = model_of(), LATTICE | {"relative": relative} | ({"then": then} if then else {})
    table: Any = model["songs"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options: Any = {"codec": codec, "state_bits": "m3", "policy": "consecutive"}
    with Checkpointer(str(tmp_path), model, optimizer, **options) as checkpointer:
        table(torch.arange(50, 80)).sum().backward()
        optimizer.step()
        checkpointer.save(1).result()
        assert counts(tmp_path, WEIGHT) == (10, 20, 30)
        assert counts(tmp_path, MOMENT) == (0, 0, ROWS - 30)
        with torch.no_grad():
            table.weight[5], table.weight[7], table.weight[101] = 1, 0, 1
            table.weight[203], table.weight[300:303] = float("nan"), 1e-5
        checkpointer.touch("songs", [5, 7, 101, 203, 300, 301, 302])
        checkpointer.save(2).result()
        assert entries(tmp_path)[WEIGHT].rows == 7
        assert counts(tmp_path, WEIGHT) == (1, 3, 1)
        cnr_store.compact(str(tmp_path), 2)
    catalog, record = open_record(str(tmp_path), 2)
    fold = catalog.find_fold(record.id)
    assert fold is not None
    assert sum(fold.arrays[WEIGHT].counts.values()) == 0
    assert not cnr_store.verify(str(tmp_path), deep=True).problems


def test_info_and_log_tell_the_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cnr_store"):
        cnr_store.save(str(tmp_path), model_of(), codec=LATTICE)
    (line,) = (line for line in caplog.messages if line.startswith("step 0: "))
    assert line.endswith(" s; rows that their grid can't hold were stored as they are: 1.7 % of songs/weight")
    _, shown, _ = cnr(capsys, "info", str(tmp_path))
    head, row = (next(line for line in shown.splitlines() if name in line) for name in ("shape", WEIGHT))
    assert head.split()[-3:] == ["raw", "finer", "zero"]
    assert row.split()[-6:] == ["1.67", "%", "3.33", "%", "5", "%"]
    entry = json.loads(cnr(capsys, "info", str(tmp_path), "--json")[1])["arrays"][WEIGHT]
    assert [entry["raw"], entry["finer"], entry["zero"]] == [10, 20, 30]


def test_without_such_rows_nothing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And a record has not a byte more."""
    model = nn.ModuleDict({"songs": nn.Embedding(ROWS, DIM)})
    with caplog.at_level(logging.INFO, "cnr_store"):
        cnr_store.save(str(tmp_path / "grid"), model, codec=LATTICE)
        cnr_store.save(str(tmp_path / "uniform"), model_of(), codec={"id": "cnr_uniform", "bits": 4})
    assert not any("grid" in line for line in caplog.messages)
    for name in ("grid", "uniform"):
        record = next((tmp_path / name / "versions").glob("*-*/zarr.json"))
        tables = json.loads(record.read_bytes())["attributes"]["cnr"]["tables"]
        assert tables.keys() == {"forms", "bases", "form", "base", "bytes", "rows"}
        assert "finer" not in cnr(capsys, "info", str(tmp_path / name))[1]


def test_lists_and_entries_hold_counts(tmp_path: Path) -> None:
    """An array with other names has an entry of its own, all others stand in lists."""
    model = model_of()
    model["again"], model["own"] = model["songs"], model_of()["songs"]
    cnr_store.save(str(tmp_path), model, codec=LATTICE)
    found = entries(tmp_path)
    held = {path: tuple(entry.counts.values()) for path, entry in found.items()}
    assert held == dict.fromkeys((WEIGHT, "tables/own/weight"), (10, 20, 30))
    assert found[WEIGHT].aliases
    np.testing.assert_array_equal(
        cnr_store.rows(str(tmp_path), "own", range(200, 230)), np.zeros((30, DIM), np.float32)
    )
