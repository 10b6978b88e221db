"""Ranks that do not do the same are told so, all alike and in time, and none saves without the others."""

from __future__ import annotations

from pathlib import Path

import pytest

import cnr_store
from tests.test_store.ranks.support.differing_ranks import (
    LONG_SECONDS,
    SHORT_SECONDS,
    Told,
    lose_outcome,
    make_differently,
    save_differently,
)
from tests.test_store.ranks.support.rank_processes import run_ranks
from tests.test_store.ranks.support.shared_model import assert_equal, load_alone, together

pytestmark = pytest.mark.slow

WORLD = 2
AT_ONCE_SECONDS, IN_TIME_SECONDS = LONG_SECONDS / 2, 4 * SHORT_SECONDS


def steps(url: str) -> list[int]:
    return [version.step for version in cnr_store.versions(url)]


@pytest.mark.each_by_day
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize(
    ("option", "kind", "text"),
    [
        ("url", "OptionError", "url differs between ranks"),
        ("memory", "OptionError", "lies in the memory of one process"),
        ("keep_last", "OptionError", "keep_last differs between ranks: None on rank 0; 3 on rank 1"),
        ("overlap", "OptionError", "overlap differs between ranks: 'wait' on rank 0; 'skip' on rank 1"),
        (
            "exact_parents",
            "OptionError",
            "exact_parents differs between ranks: False on rank 0; True on rank 1",
        ),
        ("wrong", "OptionError", "keep_last"),
        ("absent", "RanksError", "construct: rank 1 did not answer"),
    ],
)
def test_checkpointers_are_made_alike(tmp_path: Path, option: str, kind: str, text: str) -> None:
    found: list[Told] = [each.value for each in run_ranks(WORLD, make_differently, str(tmp_path), option)]
    if option == "absent":
        found.pop()
    if option == "wrong":  # the other rank hears what this one raised
        error, message, _ = found[0]
        assert error == "RanksError"
        assert "rank 1 does not take part: OptionError" in message
        found.pop(0)
    for error, message, seconds in found:
        assert (error, text in message) == (kind, True), message
        assert seconds < (IN_TIME_SECONDS if option == "absent" else AT_ONCE_SECONDS)


@pytest.mark.some_by_day(3)
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("step", "rank 0 in save of step 2; rank 1 in save of step 3"),
        ("full", "full differs between ranks: False on rank 0; True on rank 1"),
        ("interrupt in snapshot", "rank 1 does not take part: KeyboardInterrupt"),
        ("interrupt in settling", "rank 1 failed: KeyboardInterrupt"),
        ("interrupt in planning", "rank 1 failed: KeyboardInterrupt"),
        ("absent", "save of step 2: rank 1 did not answer within 3 s"),
        ("closed", "rank 1 does not take part: its checkpointer was closed"),
    ],
)
def test_saves_are_made_alike(tmp_path: Path, how: str, text: str) -> None:
    url = str(tmp_path / "store")
    outcomes = run_ranks(WORLD, save_differently, url, how)
    assert [each.where for each in outcomes] == [""] * WORLD
    found: list[Told] = [each.value[0] for each in outcomes]
    if how in ("absent", "closed"):
        assert found.pop()[0] == ""
    elif how.startswith("interrupt"):
        assert found.pop()[0] == "KeyboardInterrupt"
    for error, message, seconds in found:
        assert error in ("SaveError", "RanksError")
        assert text in message
        assert seconds < (IN_TIME_SECONDS if how == "absent" else AT_ONCE_SECONDS)
    if how in ("absent", "closed"):
        assert steps(url) == [1]
        return
    assert [each.value[1][0] for each in outcomes] == [""] * WORLD
    assert steps(url) == [1, 4]
    assert_equal(load_alone(url), together([each.value[2] for each in outcomes]))


def test_an_outcome_that_a_rank_did_not_hear_is_found_out(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    outcomes = run_ranks(WORLD, lose_outcome, url)
    assert [each.where for each in outcomes] == [""] * WORLD
    first, last = (each.value[0] for each in outcomes)
    assert first[0] == ""
    assert last[0] == "SaveError"
    assert "rank 1 can't tell whether version" in last[1]
    assert steps(url) == [1, 2, 3]
    assert [version.kind for version in cnr_store.versions(url)] == ["baseline", "delta", "baseline"]
    assert_equal(load_alone(url), together([each.value[2] for each in outcomes]))
