"""Lets one thread of one process at a time work on a checkpointer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cnr_store.errors import BusyError, ClosedError


class ReentrantGuard:
    """A lock that refuses, instead of deadlocking, a thread that already holds it, and every forked process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._callback_thread: int | None = None

    @contextmanager
    def refuse_this_thread(self) -> Iterator[None]:
        """Refuse the calling thread while it runs a caller's callback: the lock's owner may be waiting for it."""
        self._callback_thread = threading.get_ident()
        try:
            yield
        finally:
            self._callback_thread = None

    @contextmanager
    def enter(self, method: str) -> Iterator[None]:
        """Hold the lock while the block runs; `method` names the caller in errors."""
        thread = threading.get_ident()
        if os.getpid() != self._process:
            raise ClosedError(
                f"{method}: this checkpointer belongs to process {self._process}; make one after the fork"
            )
        if self._callback_thread == thread:
            raise BusyError(
                f"{method}: called by on_done, which others wait for; call it on the training thread"
            )
        # An interrupt may leave the owner of a lock that was released.
        if self._owner == thread and self._lock.locked():
            raise BusyError(
                f"{method}: called while this thread is inside the same checkpointer; call it afterwards"
            )
        with self._lock:
            self._owner = thread
            try:
                yield
            finally:
                self._owner = None
