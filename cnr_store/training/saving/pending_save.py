"""A save under way, who may work on a checkpointer, and what happens when the process ends meanwhile."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from cnr_store.catalog.catalog import VersionInfo
from cnr_store.errors import BusyError, ClosedError, SaveError, SkippedError
from cnr_store.format.record import Record
from cnr_store.training.saving.snapshot import LiveRows


class PendingSave:
    """A save under way.

    Attributes
    ----------
    step
        The step it saves.
    stall_seconds
        How long `save` held the training thread.
    skipped
        Whether nothing is written, because another save was under way; then `result` raises `SkippedError`.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_seconds = 0.0
        self.skipped = False
        self.asked = False
        self.future: Future[Record] = Future()
        self.abandoned = threading.Event()
        self.told = threading.Event()
        self._process = os.getpid()

    @classmethod
    def skip(cls, step: int, under_way: int) -> PendingSave:
        """A skipped save.

        Parameters
        ----------
        step
            Of the save that is left out.
        under_way
            Step of the save that is still being written.
        """
        pending = cls(step)
        pending.skipped = pending.asked = True
        pending.future.set_exception(
            SkippedError(
                f"the save of step {step} was skipped, as that of step {under_way} was still being written; the "
                "rows are part of the next one (save(..., overlap='wait') waits instead)"
            )
        )
        return pending

    def done(self) -> bool:
        """Whether it has been committed, has failed or was skipped."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> VersionInfo:
        """Wait for the commit, at most `timeout` seconds.

        Raises
        ------
        SaveError, SupersededError
            Why there is no such version. Its rows are part of the next save.
        ClosedError
            This is a fork of the process that writes it, which is not told what comes of it.
        TimeoutError
            It is still being written.
        """
        self.exception(timeout)
        return VersionInfo.from_record(self.future.result())

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, or None if the version was committed. Waits at most `timeout` seconds.

        Raises
        ------
        ClosedError
            This is a fork of the process that writes it, which is not told what comes of it.
        TimeoutError
            It is still being written.
        """
        if os.getpid() != self._process and not self.future.done():
            raise ClosedError(
                f"the save of step {self.step} is written by process {self._process}: ask for its result there"
            )
        error = self.future.exception(timeout)
        self.asked = True
        return error


class LeasedRows:
    """Rows still in the model, readable until the save is abandoned because training can't wait for it."""

    def __init__(self, rows: LiveRows, pending: PendingSave) -> None:
        self._rows = rows
        self._pending = pending

    def values(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        taken = self._rows.values(begin, end)
        if self._pending.abandoned.is_set():
            raise SaveError(f"the save of step {self._pending.step} was interrupted while it read the model")
        return taken


class ReentrantGuard:
    """Lets one thread of one process work at a time, and refuses to be entered twice by one thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._calling_back: int | None = None

    @contextmanager
    def call_back(self) -> Iterator[None]:
        """Refuse this thread a turn meanwhile: whoever has it may be waiting for this thread."""
        self._calling_back = threading.get_ident()
        try:
            yield
        finally:
            self._calling_back = None

    @contextmanager
    def take(self, what: str) -> Iterator[None]:
        """Wait for one's turn.

        Raises
        ------
        BusyError
            This thread has it already: a signal handler or hook calls back. Or it is inside `call_back`.
        ClosedError
            This is a fork of the process that made the checkpointer.
        """
        me = threading.get_ident()
        if os.getpid() != self._process:
            raise ClosedError(
                f"{what}: this checkpointer belongs to process {self._process}; make one after the fork"
            )
        if self._calling_back == me:
            raise BusyError(
                f"{what}: called by on_done, which others wait for; call it on the training thread"
            )
        if self._owner == me:
            raise BusyError(
                f"{what}: called while this thread is inside the same checkpointer; call it afterwards"
            )
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None


_under_way: weakref.WeakSet[Future[Any]] = weakref.WeakSet()


def finish_before_exit(future: Future[Any]) -> None:
    """Let the interpreter wait for a save, or what follows it, before it takes the thread pools down."""
    _under_way.add(future)


def _finish() -> None:
    while _under_way:
        with suppress(Exception):  # its failure was logged when it happened
            _under_way.pop().exception()


# The pools' own hook refuses new work, which a save that is still writing needs; hooks run last in, first out, and
# only those registered here run before the threads are joined.
getattr(threading, "_register_atexit", atexit.register)(_finish)
if hasattr(os, "register_at_fork"):
    # The threads that would finish them are not there: a data loader's worker would wait for ever.
    os.register_at_fork(after_in_child=_under_way.clear)
