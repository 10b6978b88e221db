"""A backend that fails where a test tells it to."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal, TypeAlias, TypeVar

from cnr_backends.backend import Backend
from cnr_backends.errors import BackendError, StorageError, StorageFullError
from cnr_backends.pieces import Pieces

Result = TypeVar("Result")

Fault: TypeAlias = Literal["before", "after", "full", "hang", "unreachable", "unanswered"] | None
_ERRNO = {"full": errno.ENOSPC, "unreachable": errno.ECONNRESET, "unanswered": errno.ECONNRESET}
Decide: TypeAlias = Callable[[str, str, int], Fault]


class FaultyBackend(Backend):
    """Passes every operation on to another backend, except those that `fault` picks.

    Parameters
    ----------
    inner
        The backend that stores the objects.
    fault
        Called as ``fault(operation, key, index)`` for each counted operation; `index` counts them from 0. It returns
        None, or how the operation fails. "before" raises StorageError and does nothing. "after" does the operation and
        then raises StorageError, as if the answer got lost. "full" raises StorageFullError and does nothing. "hang"
        calls `hang` and, if that returns, fails as "before" does. "unreachable" and "unanswered" are "before" and
        "after" by a fault of the network: their StorageError is transient.
    reads
        Whether reads and listings are counted too. Puts, creates and deletes always are.
    hang
        Called by an operation that hangs. It may wait for an event, or end the process.

    Attributes
    ----------
    log
        (operation, key) of every counted operation in order, also of those that failed.
    """

    def __init__(
        self, inner: Backend, fault: Decide, *, reads: bool = False, hang: Callable[[], object] = lambda: None
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.atomic_create = inner.atomic_create
        self.log: list[tuple[str, str]] = []
        self._fault = fault
        self._reads = reads
        self._hang = hang
        self._lock = threading.Lock()

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
        self._change("put", key, lambda: self.inner.put(key, pieces))

    def _create(self, key: str, data: bytes) -> bool:
        self._change("create", key, lambda: self.inner.create(key, data))
        return True

    def _delete(self, key: str) -> None:
        self._change("delete", key, lambda: self.inner.delete(key))

    def _get(self, key: str) -> bytes:
        return self._read("get", key, lambda: self.inner.get(key))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._read("get_range", key, lambda: self.inner.get_range(key, start, length))

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._read("get_suffix", key, lambda: self.inner.get_suffix(key, length))

    def _size(self, key: str) -> int:
        return self._read("size", key, lambda: self.inner.size(key))

    def _list_names(self, prefix: str) -> list[str]:
        return self._read("list_names", prefix, lambda: self.inner.list_names(prefix))

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._read("list_keys", prefix, lambda: self.inner.list_keys(prefix))

    def _read(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        return self._change(operation, key, call) if self._reads else call()

    def _change(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        with self._lock:
            index = len(self.log)
            self.log.append((operation, key))
        fault = self._fault(operation, key, index)
        if fault is None:
            return call()
        if fault in ("after", "unanswered"):
            # The lost answer may be an error.
            with suppress(BackendError):
                call()
        if fault == "hang":
            self._hang()
        kind = StorageFullError if fault == "full" else StorageError
        error = kind(
            f"{operation} of {key!r} failed in {self.url} (injected: {fault})",
            operation=operation,
            key=key,
            url=self.url,
        )
        error.errno = _ERRNO.get(fault, errno.EIO)
        error.transient = error.errno == errno.ECONNRESET
        raise error
