"""The small store of keys that the ranks of a job share, for control messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol


class KeyValue(Protocol):
    """Keys with values, seen by every rank.

    No call blocks for another rank. A store that fails or does not answer raises `cnr_store.RanksError`.
    """

    def set(self, key: str, value: bytes) -> None:
        """Write a value, over one that is there."""

    def get(self, key: str) -> bytes | None:
        """Read a value; None where there is none."""

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Read many values in a few requests, however many they are; None while one of them is missing."""

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Write a value where there is none, and return what is there now. Values are not empty."""

    def delete(self, key: str) -> None:
        """Remove a key, which may be missing."""


class MemoryKeyValue:
    """Keys within one process, for ranks that are threads.

    `requests`: calls so far.
    `sent_bytes`: bytes of the values written and read so far.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.sent_bytes = 0
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._count(value)
            self._values[key] = value

    def get(self, key: str) -> bytes | None:
        with self._lock:
            value = self._values.get(key)
            self._count(value or b"")
            return value

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        with self._lock:
            values = [self._values[key] for key in keys if key in self._values]
            self._count(b"".join(values))
            return values if len(values) == len(keys) else None

    def compare_set(self, key: str, value: bytes) -> bytes:
        with self._lock:
            self._count(value)
            return self._values.setdefault(key, value)

    def delete(self, key: str) -> None:
        with self._lock:
            self._count(b"")
            self._values.pop(key, None)

    def _count(self, value: bytes) -> None:
        self.requests += 1
        self.sent_bytes += len(value)
