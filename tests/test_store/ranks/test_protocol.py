"""A save of many ranks ends alike on all of them, whoever fails, is silent or wakes late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cnr_store import RanksError
from cnr_store.ranks.keyvalue import MemoryKeyValue
from cnr_store.ranks.protocol import SaveRound
from tests.test_store.ranks.support.rank_threads import CountedKeys, StoppedStore, on_threads

SECONDS = 0.5
PHASES = ("announce", "encode", "put", "vote", "record")
WORLD = 3

Step = Callable[[SaveRound, int, str], None]


def nothing(save: SaveRound, rank: int, phase: str) -> None:
    """At each phase of each rank."""


def saving(keys: Any, rank: int, world: int, at: Step, seconds: float) -> Callable[[], Any]:
    """One rank's part: the outcome that it believes."""

    def lead(save: SaveRound) -> Any:
        at(save, 0, "announce")
        save.announce({"version": "v1"})
        for phase in ("encode", "put", "vote"):
            save.beat(phase)
            at(save, 0, phase)
        save.vote({"part": 0})
        parts = save.votes()
        at(save, 0, "record")
        save.check()
        return {"parts": [each["part"] for each in parts]}

    def follow(save: SaveRound) -> None:
        at(save, rank, "announce")
        assert save.announced() == {"version": "v1"}
        for phase in ("encode", "put", "vote"):
            save.beat(phase)
            at(save, rank, phase)
        save.vote({"part": rank})

    def run() -> Any:
        save = SaveRound(keys, rank, world, 7, seconds)
        if rank == 0:
            try:
                outcome = lead(save)
            except RanksError as error:
                outcome = {"void": str(error)}
            save.conclude(outcome)
            return outcome
        try:
            follow(save)
        except RanksError as error:
            return save.outcome(), str(error)
        return save.outcome()

    return run


def save_all(at: Step = nothing, world: int = WORLD, seconds: float = SECONDS) -> list[Any]:
    keys = MemoryKeyValue()
    return on_threads(*(saving(keys, rank, world, at, seconds) for rank in range(world)))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_hear_the_outcome(world: int) -> None:
    assert save_all(world=world, seconds=30) == [{"parts": [*range(world)]}] * world


@pytest.mark.parametrize("phase", PHASES[:-1])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_failure_is_heard_by_all(culprit: int, phase: str) -> None:
    def fail(save: SaveRound, rank: int, where: str) -> None:
        if (rank, where) == (culprit, phase):
            save.fail(phase, "disk full")
            save.check()

    text = f"{phase}: rank {culprit} failed: disk full"
    found = save_all(fail, seconds=30)
    assert found[0] == {"void": text}
    for each in found[1:]:  # some had voted before they could hear of it
        assert each in ({"void": text}, ({"void": text}, text))


def stopped_in(culprit: int, phase: str) -> list[Any]:
    """What each rank believes where one stops at a phase, and goes on when all others have given up."""
    wake = threading.Event()

    def stop(save: SaveRound, rank: int, where: str) -> None:
        if (rank, where) == (culprit, phase):
            wake.wait(60)
            with pytest.raises(RanksError, match=f"rank {culprit} made no progress"):
                save.check()

    keys = MemoryKeyValue()
    ranks = [saving(keys, rank, WORLD, stop, SECONDS) for rank in range(WORLD)]
    late = ranks.pop(culprit)

    def others() -> list[Any]:
        try:
            return on_threads(*ranks)
        finally:
            wake.set()

    found, last = on_threads(others, late)
    return [*found[:culprit], last, *found[culprit:]]


Stopped = dict[tuple[int, str], list[Any]]
STOPS = [*((0, phase) for phase in PHASES), *((rank, phase) for rank in (1, 2) for phase in PHASES[:-1])]


@pytest.fixture(scope="module")
def stopped() -> Stopped:
    """All of `STOPS` at once, since they wait most of the time."""
    return dict(zip(STOPS, on_threads(*(partial(stopped_in, *each) for each in STOPS)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_silent_leader_is_given_up(stopped: Stopped, phase: str) -> None:
    leader, *others = stopped[0, phase]
    assert "rank 0 made no progress for 0.5 s" in leader["void"]
    for each in others:
        assert each is None or each[0] is None


@pytest.mark.slow
@pytest.mark.parametrize(("silent", "phase"), [each for each in STOPS if each[0] != 0])
def test_a_silent_rank_is_named_with_its_last_phase(stopped: Stopped, silent: int, phase: str) -> None:
    shown = "begin" if phase == "announce" else phase
    text = f"{shown}: rank {silent} made no progress for 0.5 s"
    found = stopped[silent, phase]
    assert found[0] == {"void": text}
    assert found[silent] == ({"void": text}, text)


@pytest.mark.slow
@pytest.mark.parametrize("tell", [lambda save: save.beat("put"), SaveRound.pause], ids=["beats", "pauses"])
def test_a_slow_rank_that_tells_of_itself_is_waited_for(tell: Callable[[SaveRound], None]) -> None:
    def slow(save: SaveRound, rank: int, where: str) -> None:
        if (rank, where) == (1, "put"):
            end = time.monotonic() + 4 * SECONDS
            while time.monotonic() < end:
                tell(save)
                threading.Event().wait(0.02)

    found = save_all(slow)
    assert found == [{"parts": [0, 1, 2]}] * WORLD


def test_a_pause_raises_nothing() -> None:
    inner = MemoryKeyValue()
    keys = StoppedStore(inner, RanksError("the store did not answer"))
    save = SaveRound(keys, 1, WORLD, 1, SECONDS)
    save.fail("put", "disk full")
    save.pause()
    keys.stopped = True
    time.sleep(SECONDS / 5)  # until a beat is due
    save.pause()
    with pytest.raises(RanksError, match="put: rank 1 failed: disk full"):
        save.check()


def test_a_lost_rank_is_named_with_its_last_phase() -> None:
    keys = MemoryKeyValue()
    saves = [SaveRound(keys, rank, WORLD, 1, 30) for rank in range(WORLD)]
    saves[1].beat("encode")
    saves[2].lose(1, "the connection broke")
    time.sleep(0.1)  # a rank that has just asked does not ask again
    for save in saves:
        with pytest.raises(RanksError, match="encode: rank 1 is gone: the connection broke"):
            save.check()


@pytest.mark.slow
def test_a_rank_that_voted_early_is_not_silent() -> None:
    """Rank 0 itself works long after the others are done."""

    def slow(save: SaveRound, rank: int, where: str) -> None:
        if (rank, where) in ((0, "put"), (0, "record")):
            end = time.monotonic() + 3 * SECONDS
            while time.monotonic() < end:
                save.beat(where)
                threading.Event().wait(0.02)

    assert save_all(slow) == [{"parts": [0, 1, 2]}] * WORLD


def test_the_first_failure_wins() -> None:
    keys = MemoryKeyValue()
    saves = [SaveRound(keys, rank, WORLD, 1, SECONDS) for rank in range(WORLD)]
    saves[2].fail("put", "disk full")
    saves[1].fail("encode", "no memory")
    for save in saves:
        with pytest.raises(RanksError, match="put: rank 2 failed: disk full"):
            save.check()


def test_a_store_that_ends_ends_the_save() -> None:
    inner = MemoryKeyValue()
    keys = StoppedStore(inner, RanksError("the store did not answer"))

    def stop(save: SaveRound, rank: int, where: str) -> None:
        if (rank, where) == (1, "put"):
            keys.stopped = True

    found = on_threads(*(saving(keys, rank, WORLD, stop, SECONDS) for rank in range(WORLD)))
    assert "did not answer" in found[0]["void"]
    for outcome, text in found[1:]:
        assert outcome is None
        assert "did not answer" in text


def test_keys_are_forgotten() -> None:
    keys = MemoryKeyValue()
    on_threads(*(saving(keys, rank, WORLD, nothing, 30) for rank in range(WORLD)))
    for rank in range(WORLD):
        SaveRound(keys, rank, WORLD, 7, 30).forget()
    assert keys._values == {}


def test_asking_is_rare() -> None:
    """However often a rank beats."""
    keys = CountedKeys()
    save = SaveRound(keys, 1, WORLD, 1, 600)
    start = time.monotonic()
    for _ in range(10_000):
        save.beat("put")
    assert keys.requests <= 4 + 30 * (time.monotonic() - start)


def test_asking_for_votes_does_not_grow_with_the_ranks() -> None:
    keys = CountedKeys()
    for rank in range(1, 2048):
        keys.set(f"save/1/vote/{rank}", b'{"part": 1}')
    save = SaveRound(keys, 0, 2048, 1, 600)
    save.vote({"part": 1})
    before = keys.requests
    assert save.votes() == [{"part": 1}] * 2048
    assert keys.requests - before == 1
