"""Many transfers at once, in bounded memory."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from cnr_backends.errors import ArgumentError, BackendError

Item = TypeVar("Item")
Result = TypeVar("Result")


_CLOSED = "this Transfer is closed, so the rest was not done; use it inside its `with` block"


class Transfer:
    """A pool of threads that runs a function over a stream of items.

    Several threads may call `map` at the same time: they share the workers, and each has its own bound.

    Parameters
    ----------
    workers : int
        Number of threads.
    in_flight : int
        How many items one `map` may have pulled and not yet yielded. It bounds memory: each is a chunk or a
        shard being made or moved.
    in_flight_bytes : int, optional
        How many bytes these items may take, one item of any size excepted, where `map` is told their sizes.

    Raises
    ------
    ArgumentError
        If any of these is less than 1.
    """

    def __init__(self, workers: int, in_flight: int, in_flight_bytes: int | None = None) -> None:
        if workers < 1 or in_flight < 1 or (in_flight_bytes is not None and in_flight_bytes < 1):
            raise ArgumentError(
                f"workers ({workers}), in_flight ({in_flight}) and in_flight_bytes ({in_flight_bytes}) must be at "
                "least 1"
            )
        self.workers = workers
        self.in_flight = in_flight
        self.in_flight_bytes = in_flight_bytes
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="cnr-transfer")
        self._closed = False
        self._running: set[threading.Lock] = set()

    def map(
        self,
        fn: Callable[[Item], Result],
        iterable: Iterable[Item],
        nbytes: Callable[[Item], int] = lambda item: 0,
    ) -> Generator[Result, None, None]:
        """Yield ``fn(item)`` for each item, in order.

        Items are pulled by the consumer's thread, as results are taken. When a call fails, whichever it is,
        calls that have not begun are cancelled, running ones are waited for, and the exception that came
        first is raised. The same happens, without it, when the consumer stops early or pulling an item fails.

        Maps can be linked: what one yields may be the iterable of another Transfer's. Close both then, or the
        first runs on until it is collected: a traceback keeps it.

        Parameters
        ----------
        fn : callable
            Called in one of the threads.
        iterable : iterable
        nbytes : callable
            An item's size in bytes, for `in_flight_bytes`.
        """
        failures: list[BaseException] = []
        pending: deque[Future[Result]] = deque()
        sizes: deque[int] = deque()

        def call(item: Item) -> Result:
            if failures:
                raise CancelledError
            try:
                return fn(item)
            except BaseException as error:
                failures.append(error)
                raise

        def oldest() -> Result:
            result = _next_result(pending, failures)
            sizes.popleft()
            return result

        try:
            for item in iterable:
                if failures:
                    raise failures[0]
                size = nbytes(item)
                while pending and sum(sizes) + size > (self.in_flight_bytes or math.inf):
                    yield oldest()
                sizes.append(size)
                pending.append(self._submit(call, item))
                del item  # its memory is the worker's to free
                if len(pending) == self.in_flight:
                    yield oldest()
            while pending:
                yield oldest()
        finally:
            # A future cancelled by `close` is never reported to `wait`: wait only for those that can't be.
            wait([future for future in pending if not future.cancel()])

    def _submit(self, call: Callable[[Item], Result], item: Item) -> Future[Result]:
        try:
            return self._pool.submit(self._run, call, item)
        except RuntimeError as error:  # the pool's word for it
            raise BackendError(_CLOSED) from error

    def _run(self, call: Callable[[Item], Result], item: Item) -> Result:
        # An interrupt within `submit` can leave a thread that the pool does not know, and a call without a future: so
        # each says that it runs by a lock that it holds. It does so before it asks, or `close` could miss it.
        running = threading.Lock()
        with running:
            self._running.add(running)
            try:
                if self._closed:
                    raise BackendError(_CLOSED)
                return call(item)
            finally:
                self._running.discard(running)

    def close(self) -> None:
        """Cancel what has not begun and wait for what runs, also where an interrupt came between."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for running in tuple(self._running):
            with running:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _next_result(pending: deque[Future[Result]], failures: list[BaseException]) -> Result:
    """Return the oldest call's result. It stays pending until then, so that a failure waits for it too."""
    with suppress(CancelledError):
        pending[0].exception()
    if failures:
        raise failures[0]
    if pending[0].cancelled():
        raise BackendError(_CLOSED)
    return pending.popleft().result()
