"""The store that two ranks wrote once: read to the same bits, sound, and loaded on other ranks."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_store
from cnr_store.catalog.catalog import open_record
from cnr_store.format.layout import COLUMN_BOUNDARIES, STATE_PARTS
from tests.nightly import at_night
from tests.test_store.golden.golden_values import Array
from tests.test_store.ranks.support.rank_processes import preload, run_ranks

FOLDER = Path(__file__).parent / "of_ranks"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("of_ranks")
    with zipfile.ZipFile(FOLDER / "store.zip") as packed:
        packed.extractall(folder)
    return str(folder)


def expected() -> dict[int, dict[str, Array]]:
    """Arrays by path, by step."""
    found: dict[int, dict[str, Array]] = {}
    with np.load(FOLDER / "expected.npz") as values:
        for name in values:
            step, _, path = name.partition("/")
            found.setdefault(int(step), {})[path] = values[name]
    return found


def test_the_versions_are_those_that_were_saved(url: str) -> None:
    facts = [[info.id, info.step, info.kind, info.rows, info.bytes] for info in cnr_store.versions(url)]
    assert facts == json.loads((FOLDER / "expected.json").read_text())
    assert [kind for _, _, kind, _, _ in facts] == ["baseline", "delta", "delta"]


def test_it_has_what_only_many_ranks_write(url: str) -> None:
    _, record = open_record(url, "latest")
    assert {STATE_PARTS, COLUMN_BOUNDARIES} <= {*record.requires}


def test_all_arrays_of_each_version_are_read_bit_for_bit(url: str) -> None:
    for step, arrays in expected().items():
        group: Any = cnr_store.open(url, step)
        for path, values in arrays.items():
            assert group[path][...].tobytes() == values.tobytes(), (step, path)


def test_it_is_sound(url: str) -> None:
    report = cnr_store.verify(url, deep=True)
    assert report.ok, report.problems
    assert not report.suspicious


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="needs TorchRec")
@pytest.mark.slow
@pytest.mark.parametrize("world", [3, at_night(2)])
def test_ranks_load_it_bit_for_bit(url: str, world: int) -> None:
    preload("torchrec")
    arrays = expected()[2]
    for outcome in run_ranks(world, "tests.test_store.golden.golden_sharded:load", url, deadline_seconds=120):
        assert not outcome.error, outcome.where
        assert outcome.value
        for path, first_row, first_column, values in outcome.value:
            columns = arrays[path].reshape(len(arrays[path]), -1)
            rows, width = values.shape
            held = columns[first_row : first_row + rows, first_column : first_column + width]
            assert held.tobytes() == values.tobytes(), path
