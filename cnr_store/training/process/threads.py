"""Waits that interrupts leave whole, and a lock that refuses where it would deadlock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from cnr_store.errors import BusyError, ClosedError

_LOOK_SECONDS = 0.1


class Latch:
    """Is set once, by one thread, and waited for by others.

    A `threading.Event` takes a lock in Python, and keeps it for ever if an interrupt comes right after: whoever sets
    the event then hangs. Here a wait takes no lock but within a call into C, which gives it back.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Wake one waiting thread now, and others, if there are any, within a tenth of a second."""
        self._is_set = True
        self._wakes.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most `timeout` seconds. Whether it is."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._is_set and (end is None or time.monotonic() < end):
            try:
                self._wakes.get(timeout=_LOOK_SECONDS)
            except Empty:
                continue
        return self._is_set


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
