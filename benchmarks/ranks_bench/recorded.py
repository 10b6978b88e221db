"""Ranks that are threads of which one runs at a time: it runs on until it waits for another rank.

So thousands of ranks run the product's own code in one process, in an order that is always the same. Messages are
handed over as they are: packed, so that their bytes count, but neither copied nor summed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.ranks_bench.counting import piece_nbytes
from cnr_store.ranks import fragments as fragments_module
from cnr_store.ranks.decisions import Decisions
from cnr_store.ranks.fragments import Fragment
from cnr_store.ranks.group import Document, Group, Judge, Piece, joined
from cnr_store.ranks.keyvalue import MemoryKeyValue

T = TypeVar("T")
_STACK_BYTES = 1 << 20
_FOREVER_SECONDS = 1e9
_FROM_FIRST = ("verdict", "announced", "outcome")
"""Keys that rank 0 writes and all others wait for."""


class Parcel(list[Piece]):
    """The pieces of a message, with the fragments that they hold: its receiver need not take it apart."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        with patch.object(fragments_module, "_crc", lambda parts: 0):
            super().__init__(fragments_module.pack(fragments))
        self.fragments = fragments

    @property
    def nbytes(self) -> int:
        return sum(map(piece_nbytes, self))


class _Turns:
    """Who runs."""

    def __init__(self, world: int) -> None:
        self.error: BaseException | None = None
        self._events = [threading.Event() for _ in range(world)]
        self._running = list(range(world))

    def begin(self) -> None:
        self._events[0].set()

    def join(self, rank: int) -> None:
        """Wait for the first turn."""
        self._events[rank].wait()

    def wait(self, rank: int, is_there: Callable[[], bool]) -> None:
        """Let others run until there is what this rank waits for."""
        while not is_there():
            self._events[rank].clear()
            self._pass(rank)
            self._events[rank].wait()
            if self.error is not None:
                raise RuntimeError("another rank failed") from self.error

    def leave(self, rank: int, error: BaseException | None) -> None:
        self.error = self.error or error
        after = self._after(rank)
        self._running.remove(rank)
        if self._running:
            self._events[after].set()

    def _pass(self, rank: int) -> None:
        self._events[self._after(rank)].set()

    def _after(self, rank: int) -> int:
        at = int(np.searchsorted(self._running, rank, side="right"))
        return self._running[at % len(self._running)]


class _Keys(MemoryKeyValue):
    """Keys as one rank sees them: a look at what another rank will write waits for it."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        super().__init__()
        self._values = shared.values
        self._shared, self._rank = shared, rank

    def get(self, key: str) -> bytes | None:
        folder, _, name = key.rpartition("/")
        waits = not folder.endswith("/beat") and name.isdigit() if self._rank == 0 else name in _FROM_FIRST
        # The first look at a verdict is for one that there must not be yet.
        if waits and not (name == "verdict" and f"{folder}/{self._rank}" not in self._values):
            self._shared.turns.wait(self._rank, lambda: key in self._values)
        return self._values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        self._shared.turns.wait(self._rank, lambda: all(key in self._values for key in keys))
        return [self._values[key] for key in keys]


class _Shared:
    def __init__(self, world: int) -> None:
        self.world = world
        self.turns = _Turns(world)
        self.values: dict[str, bytes] = {}
        self.sums: dict[int, list[Any]] = {}
        self.mail: dict[tuple[int, int, int, int], Sequence[Piece]] = {}


class RecordedGroup(Group):
    """One of the ranks."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self.rank, self.world, self.timeout_seconds = rank, shared.world, _FOREVER_SECONDS
        self.keyvalue = _Keys(shared, rank)
        self._shared = shared
        self._decisions = Decisions(self.keyvalue, rank, self.world, self.timeout_seconds)
        self._turn = 0
        self._rounds: Counter[int] = Counter()

    def decide(self, phase: str, said: Document, judge: Judge) -> Document:
        return self._decisions.decide(phase, said, judge)

    def sum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(self._reduced(values, np.add))

    def either(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.asarray(self._reduced(bits, np.bitwise_or))

    def broadcast(self, data: bytes | None) -> bytes:
        found: bytes = self._reduced(data, lambda first, _: first)
        return found

    def _reduced(self, value: Any, join: Callable[..., Any]) -> Any:
        """What comes of the values of all ranks."""
        self._turn += 1
        state = self._shared.sums.setdefault(self._turn, [None, 0])
        state[0] = value if state[0] is None else join(state[0], value)
        state[1] += 1
        self._shared.turns.wait(self.rank, lambda: state[1] == self.world)
        return state[0]

    def exchange(
        self,
        messages: Mapping[int, Sequence[Piece]],
        expected: Collection[int],
        number: int = 0,
        still_alive: Callable[[], None] | None = None,
    ) -> dict[int, memoryview]:
        self._rounds[number] += 1
        here, mail = (number, self._rounds[number]), self._shared.mail
        for rank, pieces in messages.items():
            mail[*here, self.rank, rank] = pieces
        places = {rank: (*here, rank, self.rank) for rank in expected}
        self._shared.turns.wait(self.rank, lambda: all(place in mail for place in places.values()))
        arrived: dict[int, Any] = {rank: mail.pop(place) for rank, place in places.items()}
        found: dict[int, Any] = {
            rank: pieces if isinstance(pieces, Parcel) else joined(pieces) for rank, pieces in arrived.items()
        }
        return found

    def close(self) -> None:
        """Nothing is held."""


def run_ranks(world: int, function: Callable[[Group], T]) -> list[T]:
    """Call a function on each rank: what each returned."""
    shared, found, before = _Shared(world), dict[int, T](), threading.stack_size(_STACK_BYTES)

    def run(rank: int) -> None:
        shared.turns.join(rank)
        error: BaseException | None = None
        try:
            found[rank] = function(RecordedGroup(shared, rank))
        except BaseException as failure:  # noqa: BLE001 - raised by the caller
            error = failure
        shared.turns.leave(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    shared.turns.begin()
    for thread in threads:
        thread.join()
    if shared.turns.error is not None:
        raise shared.turns.error
    return [found[rank] for rank in range(world)]
