"""The small store of keys that the ranks of a job share, for control messages."""

from __future__ import annotations

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
    """Keys within one process, for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}  # each of whose calls is whole, whatever other threads do

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        found = [value for value in map(self._values.get, keys) if value is not None]
        return found if len(found) == len(keys) else None

    def compare_set(self, key: str, value: bytes) -> bytes:
        return self._values.setdefault(key, value)

    def delete(self, key: str) -> None:
        self._values.pop(key, None)
