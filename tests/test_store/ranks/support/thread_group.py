"""A group whose ranks are threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cnr_store.errors import RanksError
from cnr_store.ranks.decisions import Decisions
from cnr_store.ranks.group import Document, Group, Judge, Piece, joined
from cnr_store.ranks.keyvalue import MemoryKeyValue


class _Meeting:
    """What threads share: keys, arrays that all of them bring, and messages from one to another."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.keyvalue = MemoryKeyValue()
        self.brought: dict[int, dict[int, Any]] = {}
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], SimpleQueue[memoryview]] = {}

    def box(self, number: int, source: int, target: int) -> SimpleQueue[memoryview]:
        with self.changed:
            return self.mail.setdefault((number, source, target), SimpleQueue())


class ThreadGroup(Group):
    """One rank of a group of threads.

    Attributes
    ----------
    sent_bytes
        Bytes of all messages to other ranks so far.
    """

    def __init__(self, meeting: _Meeting, rank: int, timeout_seconds: float) -> None:
        self.rank, self.world = rank, meeting.world
        self.timeout_seconds = timeout_seconds
        self.keyvalue = meeting.keyvalue
        self.sent_bytes = 0
        self._meeting = meeting
        self._decisions = Decisions(meeting.keyvalue, rank, meeting.world, timeout_seconds)
        self._number = 0

    def decide(self, phase: str, said: Document, judge: Judge) -> Document:
        return self._decisions.decide(phase, said, judge)

    def sum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(np.sum(self._all(values.copy()), axis=0, dtype=np.int64))

    def either(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.asarray(np.bitwise_or.reduce(self._all(bits.copy())))

    def broadcast(self, data: bytes | None) -> bytes:
        found = self._all(data)[0]
        assert isinstance(found, bytes)
        return found

    def _all(self, value: Any) -> list[Any]:
        """What all ranks bring, in rank order."""
        self._number += 1
        meeting = self._meeting
        with meeting.changed:
            brought = meeting.brought.setdefault(self._number, {})
            brought[self.rank] = value
            meeting.changed.notify_all()
            if not meeting.changed.wait_for(lambda: len(brought) == self.world, self.timeout_seconds):
                raise RanksError(f"only ranks {sorted(brought)} came")
        return [brought[rank] for rank in range(self.world)]

    def exchange(
        self,
        messages: Mapping[int, Sequence[Piece]],
        expected: Collection[int],
        number: int = 0,
        still_alive: Callable[[], None] | None = None,
    ) -> dict[int, memoryview]:
        for target, pieces in messages.items():
            message = joined(pieces)
            self.sent_bytes += len(message)
            self._meeting.box(number, self.rank, target).put(message)
        deadline = time.monotonic() + self.timeout_seconds
        found: dict[int, memoryview] = {}
        for source in expected:
            box = self._meeting.box(number, source, self.rank)
            while source not in found:
                try:
                    found[source] = box.get(timeout=0.05)
                except Empty:
                    if still_alive is not None:
                        still_alive()
                    if time.monotonic() > deadline:
                        raise RanksError(f"rank {source} sent nothing") from None
        return found

    def close(self) -> None:
        """Nothing is held."""


def thread_groups(world: int, timeout_seconds: float = 60) -> list[ThreadGroup]:
    """The ranks of a new group."""
    meeting = _Meeting(world)
    return [ThreadGroup(meeting, rank, timeout_seconds) for rank in range(world)]
