"""A cache of what is dear to fetch, such as proven payloads, for readers on many threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from cnr_codecs import Payload

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """The values used last. Thread-safe.

    `most`: what the values kept may cost together. A value that costs more is not kept at all.
    `cost`: what a value costs, such as its bytes. By default each costs 1.
    """

    def __init__(self, most: int, cost: Callable[[V], int] = lambda _: 1) -> None:
        self._most, self._cost = most, cost
        self._total = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        # Weak, so that a lock is gone once nobody holds it or waits for it.
        self._fetching: WeakValueDictionary[K, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The value kept, which counts as used now, or None."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Keep a value, in place of those whose last use is longest ago. One that is kept already stays."""
        cost = self._cost(value)
        if cost > self._most:
            return
        with self._lock:
            if key in self._values:
                return
            self._values[key] = value
            self._total += cost
            while self._total > self._most:
                self._total -= self._cost(self._values.popitem(last=False)[1])

    def fetch(self, key: K, make: Callable[[], V]) -> V:
        """The value kept, or else what `make` returns: other threads that want it meanwhile wait for that one call.

        If `make` raises, each thread that waited calls its own.
        """
        value = self.get(key)
        if value is not None:
            return value
        with self._lock:
            fetching = self._fetching.setdefault(key, threading.Lock())
        with fetching:
            value = self.get(key)
            if value is None:
                value = make()
                self.put(key, value)
        return value


Place = tuple[str, int]
"""The key of a shard, and a payload's slot in it."""


class PayloadCache(BoundedCache[Place, Payload]):
    """The payloads used last. Thread-safe.

    `max_bytes`: what all of them may take. Larger ones are not kept at all.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, _nbytes)


def _nbytes(payload: Payload) -> int:
    # Parameters count twice: decoding keeps them widened to float32, too.
    return sum(
        each.codes.nbytes
        + each.row_set.nbytes
        + each.parameters.nbytes
        + each.parameters.size * 4
        + (0 if each.books is None else each.books.nbytes)
        + (0 if each.coded is None else each.coded.nbytes)
        for each in payload.segments
    )
