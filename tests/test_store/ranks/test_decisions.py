"""Ranks decide alike, whoever is absent, elsewhere or wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cnr_store import OptionError, RanksError, SaveError
from cnr_store.errors import CheckpointError
from cnr_store.ranks.decisions import Decisions
from cnr_store.ranks.group import Alone, Document
from cnr_store.ranks.keyvalue import MemoryKeyValue
from tests.test_store.ranks.support.rank_threads import CountedKeys, StoppedStore, on_threads

SECONDS = 0.5
WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])


def total(documents: list[Document]) -> Document:
    return {"total": sum(each["n"] for each in documents), "order": [each["n"] for each in documents]}


def group(world: int, seconds: float = SECONDS) -> tuple[MemoryKeyValue, list[Decisions]]:
    keys = MemoryKeyValue()
    return keys, [Decisions(keys, rank, world, seconds) for rank in range(world)]


def deciding(ranks: list[Decisions], phase: str = "save", judge: Callable[..., Any] = total) -> list[Any]:
    """Let ranks decide at once."""

    def of(number: int, rank: Decisions) -> Callable[[], Any]:
        return lambda: rank.decide(phase, {"n": number}, judge)

    return on_threads(*(of(number, rank) for number, rank in enumerate(ranks)))


def same_errors(found: list[Any], kind: type[CheckpointError] = RanksError) -> str:
    assert {type(each) for each in found} == {kind}, found
    (text,) = {str(each) for each in found}
    return text


@WORLDS
def test_all_ranks_have_the_verdict(world: int) -> None:
    _, ranks = group(world, 30)
    for _ in range(3):
        expected = {"total": sum(range(world)), "order": [*range(world)]}
        assert deciding(ranks) == [expected] * world


@WORLDS
def test_keys_do_not_pile_up(world: int) -> None:
    keys, ranks = group(world, 30)
    for _ in range(5):
        deciding(ranks)
    left = len(keys._values)
    for _ in range(5):
        deciding(ranks)
    assert len(keys._values) == left == world + 1


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("absent", [0, 1])
def test_an_absent_rank_is_named(world: int, absent: int) -> None:
    _, ranks = group(world)
    late = ranks.pop(absent)
    found = deciding(ranks)
    assert {type(each) for each in found} == {RanksError}
    for each in found:
        assert f"save: rank {absent} did not answer within 0.5 s" in str(each)
    # Whoever comes late hears the same, at once, and the next decision is of all again.
    with pytest.raises(RanksError, match=f"rank {absent} did not answer"):
        late.decide("save", {"n": 0}, total)
    ranks.insert(absent, late)
    assert deciding(ranks)[0]["order"] == [*range(world)]


@pytest.mark.slow
def test_those_who_came_are_named_too() -> None:
    _, ranks = group(4)
    text = same_errors(deciding([ranks[0], ranks[1]]))
    assert text.startswith("save: ranks 2, 3 did not answer within 0.5 s (ranks 0, 1 did)")


@pytest.mark.parametrize("elsewhere", [0, 1, 2])
def test_ranks_in_different_calls_fail_at_once(elsewhere: int) -> None:
    _, ranks = group(3, 30)
    start = time.monotonic()
    phases = ["load" if rank == elsewhere else "save" for rank in range(3)]

    def of(rank: int) -> Callable[[], Any]:
        return lambda: ranks[rank].decide(phases[rank], {"n": 1}, total)

    text = same_errors(on_threads(*(of(rank) for rank in range(3))))
    assert f"rank {elsewhere} in load" in text
    assert time.monotonic() - start < 10
    assert deciding(ranks)[0]["total"] == 3


def test_what_the_judge_raises_is_raised_on_all() -> None:
    def refuse(documents: list[Document]) -> Document:
        raise OptionError(f"steps differ: {[each['n'] for each in documents]}")

    _, ranks = group(3, 30)
    assert same_errors(deciding(ranks, judge=refuse), OptionError) == "steps differ: [0, 1, 2]"


def test_an_error_of_a_class_of_ones_own_is_raised_as_its_nearest() -> None:
    class OwnError(SaveError):
        pass

    def refuse(documents: list[Document]) -> Document:
        raise OwnError("no")

    _, ranks = group(2, 30)
    assert same_errors(deciding(ranks, judge=refuse), SaveError) == "no"


@pytest.mark.slow
def test_a_late_rank_has_its_own_deadline() -> None:
    """Rank 0 comes when the others have nearly given up, rank 2 when they would have."""
    _, ranks = group(3, 2)

    def late(rank: int, seconds: float) -> Callable[[], Any]:
        def call() -> Any:
            threading.Event().wait(seconds)
            return ranks[rank].decide("save", {"n": rank}, total)

        return call

    assert on_threads(late(0, 1.5), late(1, 0), late(2, 2.9)) == [{"total": 3, "order": [0, 1, 2]}] * 3


def test_a_store_that_ended_is_an_error_with_the_phase() -> None:
    keys = StoppedStore(MemoryKeyValue(), RanksError("the store did not answer"))
    keys.stopped = True
    with pytest.raises(RanksError, match="save: the store did not answer"):
        Decisions(keys, 0, 2, SECONDS).decide("save", {}, total)


def test_one_rank_talks_to_itself() -> None:
    alone = Alone()
    assert alone.decide("save", {"n": 1}, lambda said: {"all": said}) == {"all": [{"n": 1}]}
    assert alone.broadcast(b"x") == b"x"
    assert bytes(alone.exchange({0: [b"a", b"", b"b"]}, {0})[0]) == b"ab"
    assert alone.exchange({}, set()) == {}


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_makes_progress_is_waited_for(slow: int) -> None:
    """It works for several times as long as others wait for one that does nothing."""
    _, ranks = group(3)

    def work() -> Any:
        done = 0
        with ranks[slow].beats.working("load", lambda: done):
            for done in range(40):  # noqa: B007 - the beats look at it
                threading.Event().wait(SECONDS / 10)
        return ranks[slow].decide("load", {"n": slow}, total)

    def wait(rank: int) -> Callable[[], Any]:
        return lambda: ranks[rank].decide("load", {"n": rank}, total)

    calls = [work if rank == slow else wait(rank) for rank in range(3)]
    assert on_threads(*calls) == [{"total": 3, "order": [0, 1, 2]}] * 3


@pytest.mark.slow
def test_a_rank_that_works_without_progress_is_given_up() -> None:
    _, ranks = group(2)

    def hang() -> Any:
        with ranks[1].beats.working("load", lambda: 0):
            threading.Event().wait(4 * SECONDS)
        return ranks[1].decide("load", {"n": 1}, total)

    found = on_threads(lambda: ranks[0].decide("load", {"n": 0}, total), hang)
    assert "rank 1 did not answer within 0.5 s" in same_errors(found)


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_a_rank_that_refuses_is_named_at_once(refusing: int) -> None:
    _, ranks = group(3, 30)
    ranks[refusing].refuse("save", "KeyboardInterrupt")
    others = [rank for number, rank in enumerate(ranks) if number != refusing]
    text = same_errors(deciding(others))
    assert text == f"save: rank {refusing} does not take part: KeyboardInterrupt"
    assert deciding(ranks)[0]["total"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_passes_over_calls_that_it_never_made(absent: int) -> None:
    _, ranks = group(3)
    others = [rank for number, rank in enumerate(ranks) if number != absent]
    for phase in ("save of step 1", "save of step 2"):
        assert f"rank {absent} did not answer" in str(deciding(others, phase)[0])
    assert deciding(ranks, "save of step 3")[0]["total"] == 3


def test_what_rank_0_asks_does_not_grow_with_the_ranks() -> None:
    keys = CountedKeys()
    for rank in range(1, 2048):
        keys.set(f"decide/1/{rank}", b'{"phase": "save", "said": {"n": 1}}')
    before = keys.requests
    assert Decisions(keys, 0, 2048, 600).decide("save", {"n": 1}, total)["total"] == 2048
    assert keys.requests - before <= 8


@pytest.mark.slow
@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("absent", [1, 0])
def test_a_rank_that_missed_a_call_is_not_behind_for_ever(absent: int) -> None:
    """The phase does not tell calls apart: the rank takes the next one for the one it missed, but not the third."""
    _, ranks = group(3)
    others = [rank for number, rank in enumerate(ranks) if number != absent]
    assert f"rank {absent} did not answer" in str(deciding(others, "load")[0])
    assert f"rank {absent} did not answer" in str(deciding(ranks, "load")[absent])
    assert [each["total"] for each in deciding(ranks, "load")] == [3] * 3
