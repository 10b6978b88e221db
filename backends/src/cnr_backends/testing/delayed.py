"""A backend with the latency that a test or a benchmark gives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from cnr_backends.backend import Backend
from cnr_backends.pieces import Pieces

Result = TypeVar("Result")


class DelayedBackend(Backend):
    """Passes every operation on to another backend, after a pause like that of a remote server.

    Operations that run at the same time wait at the same time.

    Parameters
    ----------
    inner
        The backend that stores the objects.
    put_seconds
        Seconds that each put, create and delete waits.
    get_seconds
        Seconds that each read and each listing waits.
    """

    def __init__(self, inner: Backend, put_seconds: float = 0.0, get_seconds: float = 0.0) -> None:
        self.inner = inner
        self.url = inner.url
        self.atomic_create = inner.atomic_create
        self._put_seconds = put_seconds
        self._get_seconds = get_seconds

    def close(self) -> None:
        self.inner.close()

    def hold_reserve(self) -> None:
        self.inner.hold_reserve()

    def shrink_reserve(self) -> bool:
        return self.inner.shrink_reserve()

    def prepare(self, key: str) -> None:
        self.inner.prepare(key)

    def sweep(self, prefix: str) -> None:
        self.inner.sweep(prefix)

    def confirm(self, key: str) -> None:
        self.inner.confirm(key)

    def _put(self, key: str, pieces: Pieces) -> None:
        self._change(lambda: self.inner.put(key, pieces))

    def _create(self, key: str, data: bytes) -> bool:
        self._change(lambda: self.inner.create(key, data))
        return True

    def _delete(self, key: str) -> None:
        self._change(lambda: self.inner.delete(key))

    def _get(self, key: str) -> bytes:
        return self._read(lambda: self.inner.get(key))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._read(lambda: self.inner.get_range(key, start, length))

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._read(lambda: self.inner.get_suffix(key, length))

    def _size(self, key: str) -> int:
        return self._read(lambda: self.inner.size(key))

    def _list_names(self, prefix: str) -> list[str]:
        return self._read(lambda: self.inner.list_names(prefix))

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._read(lambda: self.inner.list_keys(prefix))

    def _change(self, call: Callable[[], None]) -> None:
        time.sleep(self._put_seconds)
        call()

    def _read(self, call: Callable[[], Result]) -> Result:
        time.sleep(self._get_seconds)
        return call()
