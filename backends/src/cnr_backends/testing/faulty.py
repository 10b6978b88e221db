"""A backend that fails where a test tells it to."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeAlias, TypeVar

from cnr_backends.backend import Backend
from cnr_backends.errors import BackendError, StorageError, StorageFullError
from cnr_backends.wrapper import CHANGES, WrapperBackend

Result = TypeVar("Result")

Fault: TypeAlias = Literal["before", "after", "full", "hang", "unreachable", "unanswered"] | None
_ERRNO = {"full": errno.ENOSPC, "unreachable": errno.ECONNRESET, "unanswered": errno.ECONNRESET}
Decide: TypeAlias = Callable[[str, str, int], Fault]


class FaultyBackend(WrapperBackend):
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
