"""Ranks that are threads of one process, over keys in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cnr_store.ranks.decisions import Decisions, pauses
from cnr_store.ranks.group import Document, Group, Judge, Piece, joined
from cnr_store.ranks.keyvalue import KeyValue, MemoryKeyValue


class CountedKeys(MemoryKeyValue):
    """Keys in memory, and how many requests there were."""

    requests = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "get_all", "compare_set", "delete"):
            self.requests += 1
        return super().__getattribute__(name)


class StoppedStore:
    """Keys that a rank reaches until the store is stopped, which answers as a store whose process ended."""

    def __init__(self, keys: KeyValue, error: Exception) -> None:
        self.stopped = False
        self._keys = keys
        self._error = error

    def __getattr__(self, name: str) -> Any:
        if self.stopped:
            raise self._error
        return getattr(self._keys, name)


class ThreadGroup(Group):
    """A rank whose arrays and messages go through memory.

    Attributes
    ----------
    sent_bytes
        Per message that this rank sent to another, its bytes.
    """

    def __init__(self, keys: MemoryKeyValue, rank: int, world: int, timeout_seconds: float = 30) -> None:
        self.rank = rank
        self.world = world
        self.timeout_seconds = timeout_seconds
        self.keyvalue = keys
        self.sent_bytes: list[int] = []
        self._decisions = Decisions(keys, rank, world, timeout_seconds)
        self._turns = 0
        self._rounds: dict[int, int] = {}

    def decide(self, phase: str, said: Document, judge: Judge) -> Document:
        return self._decisions.decide(phase, said, judge)

    def refuse(self, phase: str, reason: str) -> None:
        self._decisions.refuse(phase, reason)

    def working(self, phase: str, progress: Callable[[], int]) -> AbstractContextManager[None]:
        return self._decisions.beats.working(phase, progress)

    def sum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(np.sum(self._all(values), axis=0))

    def either(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.asarray(np.bitwise_or.reduce(self._all(bits), axis=0))

    def broadcast(self, data: bytes | None) -> bytes:
        self._turns += 1
        if data is not None:
            self.keyvalue.set(f"array/{self._turns}/0", b"=" + data)
        return self._awaited(f"array/{self._turns}/0", None)[1:]

    def exchange(
        self,
        messages: Mapping[int, Sequence[Piece]],
        expected: Collection[int],
        number: int = 0,
        still_alive: Callable[[], None] | None = None,
    ) -> dict[int, memoryview]:
        turn = self._rounds[number] = self._rounds.get(number, 0) + 1
        for rank, pieces in messages.items():
            data = bytes(joined(pieces))
            self.sent_bytes += [len(data)] * (rank != self.rank)
            self.keyvalue.set(f"message/{number}/{turn}/{self.rank}/{rank}", data)
        return {
            rank: memoryview(self._awaited(f"message/{number}/{turn}/{rank}/{self.rank}", still_alive))
            for rank in expected
        }

    def close(self) -> None:
        pass

    def _all(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        self._turns += 1
        self.keyvalue.set(f"array/{self._turns}/{self.rank}", b"=" + values.tobytes())
        found = [self._awaited(f"array/{self._turns}/{rank}", None)[1:] for rank in range(self.world)]
        return [np.frombuffer(data, values.dtype).reshape(values.shape) for data in found]

    def _awaited(self, key: str, still_alive: Callable[[], None] | None) -> bytes:
        for _ in pauses(self.timeout_seconds):
            value = self.keyvalue.get(key)
            if value is not None:
                return value
            if still_alive is not None:
                still_alive()
        raise AssertionError(f"nobody sent {key}")


def on_threads(*ranks: Callable[[], Any]) -> list[Any]:
    """Call a function for each rank at once: what each returned, or the exception it raised."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(rank) for rank in ranks]
        return [future.exception() or future.result() for future in futures]


def run_threads(world: int, function: Callable[[Group], Any]) -> list[Any]:
    """Call a function on each rank of a group of threads: what each returned, or the exception it raised."""
    keys = MemoryKeyValue()

    def of(rank: int) -> Callable[[], Any]:
        return lambda: function(ThreadGroup(keys, rank, world))

    return on_threads(*map(of, range(world)))
