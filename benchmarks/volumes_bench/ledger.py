"""A place that counts its objects' bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from cnr_backends import Backend

Part = Literal["weights", "slots", "dense", "documents", "folds"]
PARTS: tuple[Part, ...] = get_args(Part)

_REMEMBERED_BYTES = 1 << 20


@dataclass(frozen=True)
class _Object:
    """What is known of an object; `data` None where only its size is."""

    nbytes: int
    data: bytes | None


class Ledger(Backend):
    """Objects in memory, of which the larger ones are only sizes: enough for saving and for retention.

    Parameters
    ----------
    name
        Of its URL.
    whole
        Whether every object is kept as it is: folds read them.

    Attributes
    ----------
    written
        Bytes put so far, of objects since removed or replaced too, by what they are: rows, optimizer state beside
        them, other arrays, documents (metadata, manifests, state, records, claims, tombstones), or all of a fold.
    """

    def __init__(self, name: str, *, whole: bool = False) -> None:
        self.url, self.atomic_create = f"ledger://{name}", True
        self.written: dict[Part, int] = dict.fromkeys(PARTS, 0)
        self._whole = whole
        self._objects: dict[str, _Object] = {}
        self._lock = threading.Lock()

    @property
    def written_bytes(self) -> int:
        return sum(self.written.values())

    @property
    def present_bytes(self) -> int:
        """Bytes of all objects that are there."""
        with self._lock:
            return sum(each.nbytes for each in self._objects.values())

    def _put(self, key: str, pieces: list[memoryview]) -> None:
        nbytes = sum(piece.nbytes for piece in pieces)
        found = _Object(nbytes, b"".join(pieces) if self._whole or nbytes <= _REMEMBERED_BYTES else None)
        with self._lock:
            self._enter(key, found)

    def _create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            self._enter(key, _Object(len(data), data))
            return True

    def _enter(self, key: str, found: _Object) -> None:
        self._objects[key] = found
        self.written[part_of(key)] += found.nbytes

    def _get(self, key: str) -> bytes:
        data = self._find(key).data
        if data is None:
            raise OSError(f"only the size of {key!r} is known")
        return data

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._get(key)[start : start + length]

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._get(key)[-length:]

    def _size(self, key: str) -> int:
        return self._find(key).nbytes

    def _list_names(self, prefix: str) -> list[str]:
        return [key.partition("/")[0] for key, _ in self._below(prefix)]

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        folder = f"{prefix}/" if prefix else ""
        return ((f"{folder}{key}", nbytes) for key, nbytes in self._below(prefix))

    def _below(self, prefix: str) -> list[tuple[str, int]]:
        folder = f"{prefix}/" if prefix else ""
        with self._lock:
            return [
                (key.removeprefix(folder), each.nbytes)
                for key, each in self._objects.items()
                if key.startswith(folder)
            ]

    def _delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def _find(self, key: str) -> _Object:
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise FileNotFoundError(key)
        return found


def part_of(key: str) -> Part:
    """What the object of a key is."""
    match key.split("/"):
        case ["folds", *_]:
            return "folds"
        case [*_, "zarr.json"]:
            return "documents"
        case ["versions", _, "tables", _, "weight", *_]:
            return "weights"
        case ["versions", _, "tables", *_]:
            return "slots"
        case ["versions", _, "dense", *_]:
            return "dense"
    return "documents"
