"""A backend that passes every operation on to another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from cnr_backends.backend import Backend
from cnr_backends.pieces import Pieces

Result = TypeVar("Result")

CHANGES = frozenset({"put", "create", "delete"})
"""The operations that change what is stored; the others read."""


class WrapperBackend(Backend):
    """Passes every operation on to another backend; a subclass says in `_pass` and `_place` what is done otherwise.

    Parameters
    ----------
    inner
        The backend that stores the objects.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.url = inner.url
        self.atomic_create = inner.atomic_create

    def close(self) -> None:
        self.inner.close()

    def hold_reserve(self) -> None:
        self.inner.hold_reserve()

    def shrink_reserve(self) -> bool:
        return self.inner.shrink_reserve()

    def prepare(self, key: str) -> None:
        self.inner.prepare(self._place("prepare", key))

    def sweep(self, prefix: str) -> None:
        self.inner.sweep(self._place("sweep", prefix))

    def confirm(self, key: str) -> None:
        self.inner.confirm(self._place("confirm", key))

    def _pass(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        """Do an operation: `call` passes it on. `operation` is the name of the public method."""
        return call()

    def _place(self, operation: str, key: str) -> str:
        """Return the key, or the prefix, that the other backend is given."""
        return key

    def _put(self, key: str, pieces: Pieces) -> None:
        self._pass("put", key, lambda: self.inner.put(self._place("put", key), pieces))

    def _create(self, key: str, data: bytes) -> bool:
        self._pass("create", key, lambda: self.inner.create(self._place("create", key), data))
        return True

    def _delete(self, key: str) -> None:
        self._pass("delete", key, lambda: self.inner.delete(self._place("delete", key)))

    def _get(self, key: str) -> bytes:
        return self._pass("get", key, lambda: self.inner.get(self._place("get", key)))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        at = self._place("get_range", key)
        return self._pass("get_range", key, lambda: self.inner.get_range(at, start, length))

    def _get_suffix(self, key: str, length: int) -> bytes:
        at = self._place("get_suffix", key)
        return self._pass("get_suffix", key, lambda: self.inner.get_suffix(at, length))

    def _size(self, key: str) -> int:
        return self._pass("size", key, lambda: self.inner.size(self._place("size", key)))

    def _list_names(self, prefix: str) -> list[str]:
        at = self._place("list_names", prefix)
        return self._pass("list_names", prefix, lambda: self.inner.list_names(at))

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        at = self._place("list_keys", prefix)
        found = self._pass("list_keys", prefix, lambda: self.inner.list_keys(at))
        return ((prefix + key[len(at) :], size) for key, size in found)
