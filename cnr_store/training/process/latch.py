"""An event that interrupts leave whole."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

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
