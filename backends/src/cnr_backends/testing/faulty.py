"""Backends for tests: one that fails where it is told to, a slow one, and one whose keys meet when case-folded."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeAlias, TypeVar

from cnr_backends.backend import CHANGES, Backend, WrapperBackend
from cnr_backends.errors import BackendError, StorageError, StorageFullError

Result = TypeVar("Result")

Fault: TypeAlias = Literal["before", "after", "full", "hang", "unreachable", "unanswered"] | None
_ERRNO = {"full": errno.ENOSPC, "unreachable": errno.ECONNRESET, "unanswered": errno.ECONNRESET}
Decide: TypeAlias = Callable[[str, str, int], Fault]


class FaultyBackend(WrapperBackend):
    """Passes every operation on to another backend, except those that `fault` picks.

    `inner`: the backend that stores the objects.
    `fault`: called as ``fault(operation, key, index)`` for each counted operation; `index` counts them from 0. It
    returns None, or how the operation fails. "before" raises StorageError and does nothing. "after" does the operation
    and then raises StorageError, as if the answer got lost. "full" raises StorageFullError and does nothing. "hang"
    calls `hang` and, if that returns, fails as "before" does. "unreachable" and "unanswered" are "before" and "after"
    by a fault of the network: their StorageError is transient.
    `reads`: whether reads and listings are counted too. Puts, creates and deletes always are.
    `hang`: called by an operation that hangs. It may wait for an event, or end the process.

    `log`: (operation, key) of every counted operation in order, also of those that failed.
    """

    def __init__(
        self, inner: Backend, fault: Decide, *, reads: bool = False, hang: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(inner)
        self.log: list[tuple[str, str]] = []
        self._fault = fault
        self._reads = reads
        self._hang = hang
        self._lock = threading.Lock()

    def _pass(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        if operation not in CHANGES and not self._reads:
            return call()
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


class DelayedBackend(WrapperBackend):
    """Passes every operation on to another backend, after a pause like that of a remote server.

    Operations that run at the same time wait at the same time.

    `inner`: the backend that stores the objects.
    `put_seconds`: seconds that each put, create and delete waits.
    `get_seconds`: seconds that each read and each listing waits.
    """

    def __init__(self, inner: Backend, put_seconds: float = 0.0, get_seconds: float = 0.0) -> None:
        super().__init__(inner)
        self._put_seconds = put_seconds
        self._get_seconds = get_seconds

    def _pass(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        time.sleep(self._put_seconds if operation in CHANGES else self._get_seconds)
        return call()


_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


class FoldingBackend(WrapperBackend):
    """Passes every operation on to another backend, under the first of all spellings that a key was written in.

    Two keys meet if their segments are equal once case is folded and dots and spaces at their ends are dropped.
    Objects whose keys meet are one object, and folders one folder. Names that Windows keeps for devices (``CON``,
    ``nul.txt``) can't be written.

    `inner`: the backend that stores the objects.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._spelled = {"": ""}
        self._lock = threading.Lock()

    def _place(self, operation: str, key: str) -> str:
        """The key as it was spelled first; a written one is remembered, although nothing lies there yet."""
        new = operation in ("put", "create")
        for segment in key.split("/") if new else ():
            if _DEVICE.fullmatch(segment):
                raise OSError(f"{segment} is a device")
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
