"""Counts what one rank says, sends and stores, whatever its group and its storage are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cnr_backends import Backend
from cnr_backends.pieces import Pieces
from cnr_backends.testing import FaultyBackend
from cnr_store.ranks.decisions import encode
from cnr_store.ranks.group import Document, Group, Judge, Piece
from cnr_store.ranks.keyvalue import KeyValue

BY_TIME = ("beat/", "failure")
"""In keys of documents that are written or asked for by the clock. They are not counted."""


def piece_nbytes(piece: Piece) -> int:
    """The size of a part of a message."""
    return len(piece) if isinstance(piece, bytes | bytearray) else piece.nbytes


class CountedBackend(FaultyBackend):
    """Another backend, whose requests and bytes put are counted."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, lambda operation, key, index: None, reads=True)
        self.put_bytes = 0

    def begin(self) -> None:
        """Count from here on."""
        self.log.clear()
        self.put_bytes = 0

    def _put(self, key: str, pieces: Pieces) -> None:
        self.put_bytes += sum(map(len, pieces))
        super()._put(key, pieces)

    def _create(self, key: str, data: bytes) -> bool:
        self.put_bytes += len(data)
        return super()._create(key, data)


class CountedKeys:
    """Other keys. Each document counts when it is written, and when it is first read; in vain asks nobody counts."""

    def __init__(self, inner: KeyValue, counts: Counter[str]) -> None:
        self._inner, self._counts = inner, counts
        self._read = set[str]()

    def set(self, key: str, value: bytes) -> None:
        self._count("written", key, value)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes | None:
        value = self._inner.get(key)
        if value is not None and key not in self._read:
            self._read.add(key)
            self._count("read", key, value)
        return value

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        values = self._inner.get_all(keys)
        for key, value in zip(keys, values or (), strict=False):
            if key not in self._read:
                self._read.add(key)
                self._count("read", key, value)
        return values

    def compare_set(self, key: str, value: bytes) -> bytes:
        self._count("written", key, value)
        return self._inner.compare_set(key, value)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def _count(self, way: str, key: str, value: bytes) -> None:
        if not any(name in key for name in BY_TIME):
            self._counts[f"documents_{way}"] += 1
            self._counts["document_bytes"] += len(value)


class CountedGroup(Group):
    """Another group, of which everything that this rank sends and receives is counted.

    Attributes
    ----------
    counts
        By what it is.
    """

    def __init__(self, inner: Group) -> None:
        self.rank, self.world, self.timeout_seconds = inner.rank, inner.world, inner.timeout_seconds
        self.counts: Counter[str] = Counter()
        self.keyvalue = CountedKeys(inner.keyvalue, self.counts)
        self._inner = inner

    def decide(self, phase: str, said: Document, judge: Judge) -> Document:
        """Rank 0 reads what all say, and writes the verdict, which the others read."""

        def judge_all(documents: list[Document]) -> Document:
            self.counts["documents_read"] += self.world
            self.counts["document_bytes"] += sum(len(encode(each)) for each in documents)
            return judge(documents)

        verdict = self._inner.decide(phase, said, judge_all)
        self.counts["documents_written"] += 1 + (self.rank == 0)
        self.counts["documents_read"] += self.rank != 0
        self.counts["document_bytes"] += len(encode(said)) + len(encode(verdict))
        return verdict

    def sum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        self.counts["reduced_bytes"] += values.nbytes
        return self._inner.sum(values)

    def either(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        self.counts["reduced_bytes"] += bits.nbytes
        return self._inner.either(bits)

    def broadcast(self, data: bytes | None) -> bytes:
        found = self._inner.broadcast(data)
        self.counts["broadcast_bytes"] += len(found)
        return found

    def exchange(
        self,
        messages: Mapping[int, Sequence[Piece]],
        expected: Collection[int],
        number: int = 0,
        still_alive: Callable[[], None] | None = None,
    ) -> dict[int, memoryview]:
        sizes = [sum(map(piece_nbytes, pieces)) for rank, pieces in messages.items() if rank != self.rank]
        received = self._inner.exchange(messages, expected, number, still_alive)
        arrived = [data.nbytes for rank, data in received.items() if rank != self.rank]
        self.counts["rounds"] += 1
        self.counts["messages"] += len(sizes)
        self.counts["message_bytes"] += sum(sizes)
        self.counts["received_bytes"] += sum(arrived)
        # What of a round is in memory at once: what is sent, and what has come.
        self.counts["round_bytes"] = max(self.counts["round_bytes"], sum(sizes) + sum(arrived))
        return received

    def close(self) -> None:
        self._inner.close()


def of_rank(group: CountedGroup, backend: CountedBackend) -> dict[str, Any]:
    """What one rank did, as JSON."""
    requests = Counter(operation for operation, _ in backend.log)
    shards = sum(operation == "put" and "/c/" in key for operation, key in backend.log)
    return {
        **dict(sorted(group.counts.items())),
        "requests": dict(sorted(requests.items())),
        "shards": shards,
        "put_bytes": backend.put_bytes,
    }
