"""Runs many transfers at once, in bounded memory."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Self, TypeVar

from cnr_backends.errors import ArgumentError, BackendError

Item = TypeVar("Item")
Result = TypeVar("Result")


_CLOSED = "this Transfer was closed before all items were done; use it inside its `with` block"


class Transfer:
    """A pool of threads that runs a function over a stream of items.

    Several threads may call `map` at the same time. They share the workers, and each has its own bounds.

    Parameters
    ----------
    workers
        The number of threads.
    in_flight
        The most items that one `map` may have pulled and not yet yielded. This bounds memory: each item is a chunk
        or a shard.
    in_flight_bytes
        The most bytes of these items, if `map` is told their sizes. One item of any size is always allowed. None
        sets no bound.

    Raises
    ------
    ArgumentError
        Any of these is less than 1.
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

        The consumer's thread pulls items as it takes results. When any call fails, calls that have not begun are
        cancelled, running ones are waited for, and the first exception is raised. When the consumer stops early, or
        pulling an item fails, calls are cancelled and waited for likewise.

        Maps can be linked: the results of one may be the items of another Transfer's map. Close both generators then:
        otherwise the first one runs until it is collected, and a traceback keeps it from being collected.

        Parameters
        ----------
        fn
            Called in one of the threads.
        iterable
            The items.
        nbytes
            Returns an item's size in bytes, for `in_flight_bytes`.

        Raises
        ------
        BackendError
            The Transfer was closed before all items were done.
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
                del item  # the worker frees its memory as soon as it is done
                if len(pending) == self.in_flight:
                    yield oldest()
            while pending:
                yield oldest()
        finally:
            # `wait` never hears of a future that `close` cancelled: wait only for those that can't be cancelled.
            wait([future for future in pending if not future.cancel()])

    def _submit(self, call: Callable[[Item], Result], item: Item) -> Future[Result]:
        try:
            return self._pool.submit(self._run, call, item)
        except RuntimeError as error:  # what a pool that was shut down raises
            raise BackendError(_CLOSED) from error

    def _run(self, call: Callable[[Item], Result], item: Item) -> Result:
        # An interrupt in `submit` can leave a thread that the pool does not know, and a call without a future. So each
        # call holds a lock while it runs. It adds the lock before it looks at `_closed`, or `close` could miss it.
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
        """Cancel the calls that have not begun, and wait for those that run, even after an interrupt."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for running in tuple(self._running):
            with running:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _next_result(pending: deque[Future[Result]], failures: list[BaseException]) -> Result:
    """Return the oldest call's result. The call stays pending meanwhile, so that a failure waits for it too."""
    with suppress(CancelledError):
        pending[0].exception()
    if failures:
        raise failures[0]
    if pending[0].cancelled():
        raise BackendError(_CLOSED)
    return pending.popleft().result()
