"""How long a save goes on trying after faults of the network, and how fast it puts."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cnr_backends import StorageError

Result = TypeVar("Result")

log = logging.getLogger("cnr_store")

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 20.0
_GLANCE_SECONDS = 0.05
"""Between two looks at whether somebody waits: a signal's handler can set a flag, but not wake a thread safely."""


class Patience:
    """Repeats what the network failed, after growing, jittered pauses, and spaces out what is put.

    Nothing pauses while somebody waits for the save. An operation that is pausing as they come is tried once more,
    right away.

    Parameters
    ----------
    retry_seconds
        How long an operation is repeated. 0 repeats nothing.
    max_bytes_per_second
        Of puts; None for no limit.
    is_ending
        Whether the process is about to end: then nothing pauses either.
    clock, sleep
        As `time.monotonic` and `time.sleep`.

    Attributes
    ----------
    training_waits
        Training waits until the save has read the model: no pause of either kind.
    save_waits
        The next save waits for this one: no pause before a retry.
    seconds_waited
        In pauses of both kinds since `begin`; those of all threads add up.
    on_pause
        Called many times a second in pauses of both kinds, by whatever thread pauses. It must not raise.
    """

    def __init__(
        self,
        retry_seconds: float = 0.0,
        max_bytes_per_second: float | None = None,
        is_ending: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._retry_seconds = retry_seconds
        self._max_bytes_per_second = max_bytes_per_second
        self._is_ending = is_ending
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._next_put = 0.0
        self.on_pause: Callable[[], None] = lambda: None
        self.begin()

    def begin(self, training_waits: bool = False) -> None:
        """Begin a save."""
        self.training_waits = training_waits
        self.save_waits = self._gave_up = self._was_told = False
        self.seconds_waited = 0.0

    def run(self, operation: Callable[[], Result]) -> Result:
        """Call `operation`, again after each transient failure, until it succeeds or there is no time left."""
        pause, deadline = _FIRST_PAUSE_SECONDS, None
        while True:
            is_last = self._is_hurried()
            try:
                return operation()
            except StorageError as error:
                now = self._clock()
                deadline = now + self._retry_seconds if deadline is None else deadline
                if not error.transient or is_last or self._gave_up:
                    raise
                if now >= deadline:
                    self._gave_up = True  # nor is it worth waiting for what comes after
                    raise
                self._tell(error)
            self._wait(min(pause * random.uniform(0.5, 1.5), deadline - now), self._is_hurried)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def pace(self, nbytes: int) -> None:
        """Wait until so many bytes may be put."""
        if self._max_bytes_per_second is None or self._is_urgent():
            return
        with self._lock:
            begin = max(self._next_put, self._clock())
            self._next_put = begin + nbytes / self._max_bytes_per_second
        self._wait(begin - self._clock(), self._is_urgent)

    def _is_urgent(self) -> bool:
        return self.training_waits or self._is_ending()

    def _is_hurried(self) -> bool:
        return self.save_waits or self._is_urgent()

    def _wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        began = self._clock()
        while (left := began + seconds - self._clock()) > 0 and not is_over():
            self.on_pause()
            self._sleep(min(left, _GLANCE_SECONDS))
        with self._lock:
            self.seconds_waited += self._clock() - began

    def _tell(self, error: StorageError) -> None:
        if not self._was_told:
            self._was_told = True
            log.info("the save tries again, for up to %g seconds: %s", self._retry_seconds, error)
