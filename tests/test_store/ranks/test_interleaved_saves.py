"""Saves that are written while training's own collectives run: none stands in the way of the other."""

from __future__ import annotations

from pathlib import Path

import pytest

import cnr_store
from tests.nightly import at_night
from tests.test_store.ranks.support.interleaved_job import load, train_twice
from tests.test_store.ranks.support.rank_processes import run_ranks
from tests.test_store.support.same_arrays import assert_same_arrays

WORLD = 3


@pytest.mark.slow
@pytest.mark.parametrize("saves", [10, at_night(200)])
def test_training_goes_on_as_without_saves(tmp_path: Path, saves: int) -> None:
    url = str(tmp_path / "store")
    found = run_ranks(WORLD, train_twice, url, saves, deadline_seconds=500)
    assert [each.where for each in found] == [""] * WORLD
    expected, _ = found[0].value
    for each in found:
        for trained in each.value:
            assert_same_arrays(trained, expected)
    assert cnr_store.versions(url)[-1].step == saves - 1
    del expected["losses"]
    assert_same_arrays(load(url), expected)
