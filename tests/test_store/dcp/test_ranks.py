"""DCP on a store with many ranks: what one job saves another loads, and a save that fails leaves nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cnr_store
from tests.test_store.dcp import saved_state
from tests.test_store.ranks.support.rank_processes import run_ranks

pytestmark = pytest.mark.slow


def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the ranks return, which must raise nothing."""
    outcomes = run_ranks(world, function, *arguments, deadline_seconds=200)
    assert [each.where for each in outcomes] == [""] * world
    assert [each.signal for each in outcomes] == [0] * world
    return [each.value for each in outcomes]


def test_two_ranks_save_and_three_and_one_load(tmp_path: Path) -> None:
    urls = {"rows of 2": str(tmp_path / "rows"), "columns of 2": str(tmp_path / "columns")}
    first, second = run(2, saved_state.save_on, urls)
    assert first == second
    run(3, saved_state.load_all, ["rows of 3", "columns of 3", "copies on 3"], [*urls.values()])
    run(1, saved_state.load_all, ["one"], [*urls.values()])
    for url in urls.values():
        assert cnr_store.verify(url, deep=True).ok


def test_meshes_of_two_dimensions(tmp_path: Path) -> None:
    urls = {"rows of 2, twice": str(tmp_path / "twice"), "rows and columns of 4": str(tmp_path / "both")}
    run(4, saved_state.save_on, urls)
    run(2, saved_state.load_all, ["rows of 2"], [*urls.values()])


def test_planners_that_cache_their_plans_save_new_versions(tmp_path: Path) -> None:
    assert run(2, saved_state.save_with_cached_plans, str(tmp_path)) == [[0, 1, 2]] * 2


def test_saves_in_the_background(tmp_path: Path) -> None:
    run(2, saved_state.save_in_the_background, str(tmp_path))
    assert [info.step for info in cnr_store.versions(tmp_path)] == [0, 10]


def test_shards_that_are_no_range_of_rows(tmp_path: Path) -> None:
    run(2, saved_state.save_and_load_shards, str(tmp_path))


def test_a_rank_without_data_fails_the_save_and_not_the_next(tmp_path: Path) -> None:
    for failed, version in run(3, saved_state.fail_and_save_again, str(tmp_path)):
        assert "no such tensor" in failed
        assert [info.id for info in cnr_store.versions(tmp_path)] == [version]


def test_ranks_that_missed_a_save_take_part_in_the_next(tmp_path: Path) -> None:
    for failed, steps in run(2, saved_state.miss_saves_and_save_again, str(tmp_path)):
        assert ["no room" in text for text in failed] == [True] * 3
        assert steps == [0, 1, 2, 3]
    assert [info.step for info in cnr_store.versions(tmp_path)] == [0, 1, 2, 3]


def test_a_rank_whose_storage_fails_leaves_nothing(tmp_path: Path) -> None:
    for failed, *left, _ in run(3, saved_state.lose_a_put_and_save_again, str(tmp_path)):
        assert "rank 2 failed" in failed
        assert left == []
    assert len(cnr_store.versions(tmp_path)) == 1
    assert len(list((tmp_path / "versions").glob("*/manifest"))) == 1


def test_a_rank_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(1, saved_state.save_on, {"one": str(tmp_path)})
    signals = {(2, "resolving"): [(2, signal.SIGKILL)]}
    *others, killed = run_ranks(3, saved_state.save_and_be_killed, str(tmp_path), signals=signals)
    assert killed.signal == signal.SIGKILL
    assert all(each.error for each in others)
    assert len(cnr_store.versions(tmp_path)) == 1
    run(2, saved_state.load_all, ["columns of 2"], [str(tmp_path)])


def test_what_json_does_not_hold_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for said in run(2, saved_state.save_what_json_lacks, str(tmp_path)):
        assert "own" in said
        assert "can't be stored" in said
    assert cnr_store.versions(tmp_path) == []


def test_mistakes_are_named(tmp_path: Path) -> None:
    for alone, collectives, steps, digits in run(2, saved_state.save_with_a_mistake, str(tmp_path)):
        assert "process_group and no_dist" in alone
        assert "use_collectives=False" in collectives
        assert "checkpoint_id differs between ranks: 0 on rank 0; 1 on rank 1" in steps
        assert "give the step in digits" in digits
    assert cnr_store.versions(tmp_path) == []
