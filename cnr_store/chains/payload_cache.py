"""Proved payloads that are kept for the next reader, within a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakValueDictionary

from cnr_codecs import Payload

Place = tuple[str, int]


class PayloadCache:
    """The payloads used last, by the key of their shard and their place in it. Thread-safe.

    Parameters
    ----------
    max_bytes
        What all of them may take; larger ones are not kept at all.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._payloads: OrderedDict[Place, Payload] = OrderedDict()
        self._fetching: WeakValueDictionary[Place, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()

    def fetching(self, place: Place) -> threading.Lock:
        """To be held while a payload is fetched, so that others who want it wait and then find it here."""
        with self._lock:
            return self._fetching.setdefault(place, threading.Lock())

    def get(self, place: Place) -> Payload | None:
        with self._lock:
            payload = self._payloads.get(place)
            if payload is not None:
                self._payloads.move_to_end(place)
            return payload

    def put(self, place: Place, payload: Payload) -> None:
        nbytes = _nbytes(payload)
        if nbytes > self._max_bytes:
            return
        with self._lock:
            if place in self._payloads:
                return
            self._payloads[place] = payload
            self._bytes += nbytes
            while self._bytes > self._max_bytes:
                self._bytes -= _nbytes(self._payloads.popitem(last=False)[1])


def _nbytes(payload: Payload) -> int:
    """With the parameters once more, as they are widened for decoding."""
    return sum(
        each.codes.nbytes
        + each.row_set.data.nbytes
        + each.parameters.nbytes
        + each.parameters.size * 4
        + (0 if each.books is None else each.books.nbytes)
        for each in payload.segments
    )
