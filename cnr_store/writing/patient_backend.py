"""A backend that repeats what the network failed, and knows how much passed through it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from typing import TypeVar

from cnr_backends import Backend, ObjectExistsError, StorageError, WrapperBackend
from cnr_store.writing.patience import Patience

Result = TypeVar("Result")


class PatientBackend(WrapperBackend):
    """Passes every operation on to another backend, with `patience`.

    Attributes
    ----------
    seconds_putting
        In operations that write; those of all threads add up.
    bytes_read
        That reads have returned.
    operations
        How many have succeeded.
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
