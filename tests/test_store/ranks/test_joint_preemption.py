"""A signal on one rank is true on all at the same test, however far apart they are."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from typing import Any

import pytest

from cnr_store.ranks.group import Group
from cnr_store.ranks.keyvalue import MemoryKeyValue
from cnr_store.training.process import preemption
from cnr_store.training.process.preemption import JointPreemption
from tests.test_store.ranks.support.rank_threads import ThreadGroup, on_threads, run_threads

STEPS = 5_000


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_LOOK_SECONDS", 0.01)


def train(group: Group, signalled: int, at: int, steps: threading.Barrier, ahead: int) -> tuple[int, Any]:
    """Steps in lockstep, as collectives hold ranks together; returns at which test the signal was seen."""
    preempted = JointPreemption(group, 1)
    try:
        for step in range(1, STEPS):
            if step == at and group.rank == signalled:
                preempted._notice(signal.SIGTERM, None)
            if preempted:
                return step, preempted.signal
            if step % ahead == 0:
                steps.wait(30)
        return STEPS, None
    finally:
        preempted.close()


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("signalled", [0, 1, 2])
def test_all_ranks_stop_at_one_step(signalled: int, ahead: int) -> None:
    steps = threading.Barrier(3)
    found = run_threads(3, lambda group: train(group, signalled, 7, steps, ahead))
    assert len({step for step, _ in found}) == 1, found
    assert 7 <= found[0][0] < STEPS
    assert {each for _, each in found} == {signal.SIGTERM}


def test_without_a_signal_nothing_is_asked_and_nothing_waits() -> None:
    def look(group: Group) -> bool:
        preempted = JointPreemption(group, 1)
        try:
            return any(bool(preempted) for _ in range(1000))
        finally:
            preempted.close()

    assert run_threads(3, look) == [False, False, False]


@pytest.mark.slow
def test_a_rank_that_never_looks_again_does_not_hold_the_others() -> None:
    keys = MemoryKeyValue()

    def wait(rank: int) -> bool:
        preempted = JointPreemption(ThreadGroup(keys, rank, 3, timeout_seconds=0.5), 1)
        try:
            if rank == 0:
                preempted._notice(signal.SIGTERM, None)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                if preempted:
                    return True
            return False
        finally:
            preempted.close()

    assert on_threads(lambda: wait(0), lambda: wait(1)) == [True, True]


@pytest.mark.parametrize("signalled", [0, 1, 2])
def test_ranks_that_have_left_are_not_waited_for(signalled: int) -> None:
    keys = MemoryKeyValue()
    left = threading.Barrier(2)
    have_left = threading.Event()

    def leave(rank: int) -> bool:
        preempted = JointPreemption(ThreadGroup(keys, rank, 3, timeout_seconds=600), 1)
        if rank != signalled:
            assert not preempted
            preempted.close()
            if left.wait(30) == 0:
                have_left.set()
            return False
        assert have_left.wait(30)
        preempted._notice(signal.SIGTERM, None)
        while not preempted:
            time.sleep(0.01)
        preempted.close()
        return True

    ended = on_threads(*(partial(leave, rank) for rank in range(3)))
    assert ended == [rank == signalled for rank in range(3)]
