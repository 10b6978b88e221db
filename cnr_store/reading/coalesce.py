"""Neighbouring chunks that are requested at the same time are composed as one block of rows.

A chunk of a delta spans many chunks that readers see. A program that reads a whole array requests several of these at
once. Composing them together finds, fetches and decodes the delta's chunk once for all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from cnr_store.reading.virtual_store import BytesLike, in_read_thread

_CORES = os.cpu_count() or 1
_SMALL_RUN_BYTES, RUN_BYTES = 4 << 20, 16 << 20
"""Of a run that is not worth sharing out, and the most of one."""


class Chunks(Protocol):
    """Chunks of one array, all of `nbytes` bytes. Any run of consecutive ones can be read as one block."""

    nbytes: int

    def read(self, index: int, start: int, stop: int) -> BytesLike:
        """Bytes start ... stop - 1 of a block that begins with the chunk `index`."""


Waiting = dict[int, list["asyncio.Future[BytesLike]"]]
"""By a chunk's index, the futures of those who wait for it."""


@dataclass
class _Batch:
    """What was requested in one turn of one event loop."""

    loop: asyncio.AbstractEventLoop
    waiting: dict[Chunks, Waiting] = field(default_factory=dict)


class Coalescer:
    """Collects the requests of one turn of an event loop. There may be several loops, each in its own thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    async def read(self, array: Chunks, index: int) -> BytesLike:
        """A whole chunk, composed together with its neighbours if these are requested, too."""
        loop = asyncio.get_running_loop()
        batch: _Batch | None = getattr(self._local, "batch", None)
        if batch is None or batch.loop is not loop:
            batch = self._local.batch = _Batch(loop)
            loop.call_soon(self._start, batch)
        future: asyncio.Future[BytesLike] = loop.create_future()
        batch.waiting.setdefault(array, defaultdict(list))[index].append(future)
        return await future

    def _start(self, batch: _Batch) -> None:
        if getattr(self._local, "batch", None) is batch:
            del self._local.batch
        for array, waiting in batch.waiting.items():
            for run in _runs(sorted(waiting), _run_length(len(waiting), max(array.nbytes, 1))):
                task = batch.loop.create_task(_read_run(array, run, waiting))
                _tasks.add(task)
                task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()
"""Keeps running tasks alive: the loop itself holds only weak references."""


async def _read_run(array: Chunks, run: range, waiting: Waiting) -> None:
    try:
        block = await in_read_thread(lambda: array.read(run.start, 0, len(run) * array.nbytes))
    except Exception as error:  # noqa: BLE001 - any error belongs to those who wait
        if len(run) > 1:  # chunk by chunk, so that only those that can't be read fail
            await asyncio.gather(*(_read_run(array, range(i, i + 1), waiting) for i in run))
        else:
            _resolve(waiting[run.start], error)
        return
    for place, index in enumerate(run):
        _resolve(waiting[index], memoryview(block)[place * array.nbytes : (place + 1) * array.nbytes])


def _resolve(futures: list[asyncio.Future[BytesLike]], outcome: BytesLike | Exception) -> None:
    for future in futures:
        if future.done():  # cancelled
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _run_length(chunks: int, nbytes: int) -> int:
    """How many of so many chunks to compose together: as many runs as there are cores, of bounded size."""
    fair = -(-chunks // _CORES)
    return max(1, _SMALL_RUN_BYTES // nbytes, min(fair, RUN_BYTES // nbytes))


def _runs(indexes: list[int], max_length: int) -> Iterator[range]:
    """Ascending numbers as ranges of consecutive ones, each of at most `max_length`."""
    for _, group in itertools.groupby(enumerate(indexes), lambda pair: pair[1] - pair[0]):
        first, *rest = (index for _, index in group)
        stop = first + 1 + len(rest)
        for start in range(first, stop, max_length):
            yield range(start, min(start + max_length, stop))
