"""A backend whose keys meet when case-folded, as on the disks of macOS and Windows."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

from cnr_backends.backend import Backend
from cnr_backends.pieces import Pieces

_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


class FoldingBackend(Backend):
    """Passes every operation on to another backend, under the first of all spellings that a key was written in.

    Two keys meet if their segments are equal once case is folded and dots and spaces at their ends are dropped.
    Objects whose keys meet are one object, and folders one folder. Names that Windows keeps for devices (``CON``,
    ``nul.txt``) can't be written.

    Parameters
    ----------
    inner
        The backend that stores the objects.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.url = inner.url
        self.atomic_create = inner.atomic_create
        self._spelled = {"": ""}
        self._lock = threading.Lock()

    def close(self) -> None:
        self.inner.close()

    def confirm(self, key: str) -> None:
        self.inner.confirm(self._found(key))

    def _put(self, key: str, pieces: Pieces) -> None:
        self.inner.put(self._written(key), pieces)

    def _create(self, key: str, data: bytes) -> bool:
        self.inner.create(self._written(key), data)
        return True

    def _delete(self, key: str) -> None:
        self.inner.delete(self._found(key))

    def _get(self, key: str) -> bytes:
        return self.inner.get(self._found(key))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self.inner.get_range(self._found(key), start, length)

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self.inner.get_suffix(self._found(key), length)

    def _size(self, key: str) -> int:
        return self.inner.size(self._found(key))

    def _list_names(self, prefix: str) -> list[str]:
        return self.inner.list_names(self._found(prefix))

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        found = self._found(prefix)
        return ((prefix + key[len(found) :], nbytes) for key, nbytes in self.inner.list_keys(found))

    def _written(self, key: str) -> str:
        for segment in key.split("/"):
            if _DEVICE.fullmatch(segment):
                raise OSError(f"{segment} is a device")
        return self._found(key, new=True)

    def _found(self, key: str, *, new: bool = False) -> str:
        """The key as it was spelled first; a `new` one is remembered, although nothing lies there yet."""
        with self._lock:
            folded = spelled = ""
            for segment in filter(None, key.split("/")):
                folder, folded = spelled, f"{folded}/{_fold(segment)}"
                if folded not in self._spelled:
                    names = {_fold(name): name for name in self.inner.list_names(folder)}
                    name = names.get(_fold(segment), segment)
                    spelled = f"{folder}/{name}" if folder else name
                    if new or _fold(segment) in names:
                        self._spelled[folded] = spelled
                else:
                    spelled = self._spelled[folded]
            return spelled


def _fold(segment: str) -> str:
    return segment.rstrip(". ").casefold()
