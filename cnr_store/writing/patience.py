"""How long a save goes on after faults of the network, what these cost, how fast it puts; and its backend."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from typing import TypeVar

from cnr_backends import Backend, ObjectExistsError, StorageError, WrapperBackend
from cnr_store.errors import OutageError, listed

Result = TypeVar("Result")

log = logging.getLogger("cnr_store")

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 20.0
_GLANCE_SECONDS = 0.05
"""Between two looks at whether somebody waits: a signal's handler can set a flag, but not wake a thread safely."""
_BEGUN = "storage fails: saves try again, or are skipped, for up to %g s: %s"
_ENDED = "storage answers again after %.0f s%s"
_MISSED = "; the next save has the rows of those skipped or failed, by step: "


class Outage:
    """Storage that does not answer, or is too busy: from the first such failure to the success that ends it.

    It is over when an operation that failed has succeeded. Once it has cost a save, only a commit ends it: storage that
    answers, and fails every save all the same, is not back.

    `retry_seconds`, `clock`: as in `Patience`.
    """

    def __init__(self, retry_seconds: float, clock: Callable[[], float]) -> None:
        self._retry_seconds, self._clock = retry_seconds, clock
        self._lock = threading.RLock()  # a handler of the log may come back
        self.ends = 0  # how often it has ended
        self._forget()

    def _forget(self) -> None:
        self._began: float | None = None
        self._is_silent = self._is_told = self._has_cost = False
        self._missed: list[int] = []  # steps

    def meet(self, since: float, ends: int | None = None) -> float:
        """Note that an operation fails since then. Returns until when it may be tried again.

        `ends`: as it was when the operation began: an outage that has ended meanwhile does not begin anew.
        """
        with self._lock:
            if ends in (None, self.ends):
                if self._began is None:
                    self._began, self._is_silent = since, True
                self._began = min(self._began, since)
            is_hopeless = self._is_silent and not self._is_young()
        return since if is_hopeless else since + self._retry_seconds

    def answer(self, *, again: bool) -> None:
        """Note that an operation has succeeded: at once, or when it was tried `again`."""
        self._is_silent = False
        if again and not self._has_cost:
            self.end()

    def excuses(self, error: BaseException) -> bool:
        """Whether a save that fails with this error now is not to be counted."""
        return isinstance(error, StorageError) and error.transient and self._is_young()

    def miss(self, step: int, error: BaseException | None = None) -> None:
        """Note that a save has failed, or was skipped if there is no error."""
        if isinstance(error, OutageError):  # perhaps on another rank
            self.meet(self._clock())
            self.tell(error)
        if self._began is not None:
            self._missed.append(step)
            self._has_cost |= error is not None

    def tell(self, error: BaseException) -> None:
        """Log that it has begun, once."""
        with self._lock:
            if self._began is not None and self._retry_seconds > 0 and not self._is_told:
                self._is_told = True
                log.warning(_BEGUN, self._retry_seconds, error)

    def end(self) -> None:
        """Note that it is over, and log which saves it has cost."""
        with self._lock:
            began, is_told, missed = self._began, self._is_told, self._missed
            self._forget()
            self.ends += 1
            if began is not None and is_told:
                log.warning(_ENDED, self._clock() - began, _MISSED + listed(missed) if missed else "")

    def _is_young(self) -> bool:
        return self._began is not None and self._clock() - self._began < self._retry_seconds


class Patience:
    """Repeats what the network failed, after growing, jittered pauses, and spaces out what is put.

    An operation that is pausing as haste comes is tried once more, right away.

    `retry_seconds`: how long an operation is repeated. 0 repeats nothing.
    `max_bytes_per_second`: of puts; None for no limit.
    `is_ending`: whether the process is about to end: then puts are not spaced out.
    `in_haste`: whether it can't wait for storage: then there is no pause before a retry.
    `clock`, `sleep`: as `time.monotonic` and `time.sleep`.

    `outage`: what is known of storage that fails. It lasts from save to save.
    `training_waits`: training waits until the save has read the model: puts are not spaced out.
    `may_hold`: whether pauses before retries may make training wait so.
    `seconds_waited`: in pauses of both kinds since `begin`; those of all threads add up.
    `on_pause`: called many times a second in pauses of both kinds, by whatever thread pauses. It must not raise.
    """

    def __init__(
        self,
        retry_seconds: float = 0.0,
        max_bytes_per_second: float | None = None,
        is_ending: Callable[[], bool] = lambda: False,
        in_haste: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.outage = Outage(retry_seconds, clock)
        self._max_bytes_per_second = max_bytes_per_second
        self._is_ending, self._in_haste = is_ending, in_haste
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._next_put = 0.0
        self.on_pause: Callable[[], None] = lambda: None
        self.begin()

    def begin(self, training_waits: bool = False, may_hold: bool = False) -> None:
        """Begin a save."""
        self.training_waits, self.may_hold = training_waits, may_hold
        self._gave_up = False
        self.seconds_waited = 0.0

    def run(self, operation: Callable[[], Result]) -> Result:
        """Call `operation`, again after each transient failure, until it succeeds or there is no time left."""
        pause, since = _FIRST_PAUSE_SECONDS, None
        while True:
            gives_up, ends = self._is_hurried(), self.outage.ends
            try:
                result = operation()
            except StorageError as error:
                if not error.transient:
                    raise
                now = self._clock()
                again, since = since is not None, now if since is None else since
                deadline = self.outage.meet(since, ends)
                self._gave_up |= now >= deadline  # nor is it worth waiting for what comes after
                gives_up |= self._gave_up
                if gives_up or again:  # or the first retry may mend it
                    self.outage.tell(error)
                if gives_up:
                    raise
            else:
                self.outage.answer(again=since is not None)
                return result
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
        return (self.training_waits and not self.may_hold) or self._in_haste()

    def _wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        began = self._clock()
        while (left := began + seconds - self._clock()) > 0 and not is_over():
            self.on_pause()
            self._sleep(min(left, _GLANCE_SECONDS))
        with self._lock:
            self.seconds_waited += self._clock() - began


class PatientBackend(WrapperBackend):
    """Passes every operation on to another backend, with `patience`.

    `seconds_putting`: in operations that write; those of all threads add up.
    `bytes_read`: that reads have returned.
    `operations`: how many have succeeded.
    """

    def __init__(self, inner: Backend, patience: Patience) -> None:
        super().__init__(inner)
        self.seconds_putting = 0.0
        self.bytes_read = 0
        self.operations = 0
        self._patience = patience
        self._lock = threading.Lock()

    def _put(self, key: str, pieces: list[memoryview]) -> None:
        self._patience.pace(sum(map(len, pieces)))
        self._run(lambda: self._timed(lambda: self.inner.put(key, pieces)))

    def _begin_put(self, key: str, pieces: list[memoryview]) -> Generator[None, None, None]:
        self._patience.pace(sum(map(len, pieces)))
        with ExitStack() as stack:
            begun: list[Generator[None, None, None]] = []
            with suppress(StorageError):  # what failed is tried again below
                putting = self._timed(lambda: self.inner.begin_put(key, pieces))
                begun.append(stack.enter_context(closing(putting)))
            yield

            def put() -> None:
                if begun:
                    deque(begun.pop(), maxlen=0)
                else:
                    self.inner.put(key, pieces)

            self._run(lambda: self._timed(put))

    def _create(self, key: str, data: bytes) -> bool:
        attempts = 0

        def create() -> bool:
            nonlocal attempts
            attempts += 1
            try:
                self._timed(lambda: self.inner.create(key, data))
            except ObjectExistsError:
                # An earlier attempt may have arrived although its answer was lost.
                return attempts > 1 and self.inner.get(key) == data
            return True

        return self._run(create)

    def _pass(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        if operation == "list_keys":  # which reads as its result is taken
            return call()
        result = self._run(call)
        with self._lock:
            self.bytes_read += len(result) if isinstance(result, bytes) else 0
        return result

    def _run(self, operation: Callable[[], Result]) -> Result:
        result = self._patience.run(operation)
        with self._lock:
            self.operations += 1
        return result

    def _timed(self, write: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        try:
            return write()
        finally:
            with self._lock:
                self.seconds_putting += time.perf_counter() - began
