"""Neighbouring chunks that are asked for at the same time are composed as one block of rows.

A chunk of a delta spans many chunks that readers see. Whoever reads a whole array asks for several of these at once:
composing them together finds, fetches and proves what lies beneath once for all of them, and asks for nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from cnr_store.reading.virtual_store import Made, in_reader

RUN_BYTES = 4 << 20


class Blocks(Protocol):
    """Chunks of one size, in bytes, any run of which can be read as one block."""

    nbytes: int

    def read(self, index: int, start: int, stop: int) -> Made:
        """Bytes start ... stop - 1 of what begins with a chunk."""


Waiting = dict[int, list["asyncio.Future[Made]"]]


@dataclass
class _Asked:
    """What was asked for in one turn of one event loop: by array, the chunks and who waits for them."""

    loop: asyncio.AbstractEventLoop
    chunks: dict[int, tuple[Blocks, Waiting]] = field(default_factory=dict)


class Runs:
    """Gathers the requests of one turn of the event loop; there may be several loops, each in a thread of its own."""

    def __init__(self) -> None:
        self._here = threading.local()

    async def read(self, array: Blocks, index: int) -> Made:
        """A whole chunk, composed together with its neighbours if they are asked for, too."""
        loop = asyncio.get_running_loop()
        asked: _Asked | None = getattr(self._here, "asked", None)
        if asked is None or asked.loop is not loop:
            asked = self._here.asked = _Asked(loop)
            loop.call_soon(self._begin, asked)
        future: asyncio.Future[Made] = loop.create_future()
        _, waiting = asked.chunks.setdefault(id(array), (array, {}))
        waiting.setdefault(index, []).append(future)
        return await future

    def _begin(self, asked: _Asked) -> None:
        if getattr(self._here, "asked", None) is asked:
            del self._here.asked
        for array, waiting in asked.chunks.values():
            for run in _runs(sorted(waiting), max(1, RUN_BYTES // max(array.nbytes, 1))):
                task = asked.loop.create_task(_answer(array, run, waiting))
                _tasks.add(task)
                task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()
"""The loop itself keeps only weak references."""


async def _answer(array: Blocks, run: range, waiting: Waiting) -> None:
    try:
        block = await in_reader(lambda: array.read(run.start, 0, len(run) * array.nbytes))
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to whoever waits
        if len(run) > 1:  # only the chunks that can't be read fail
            await asyncio.gather(*(_answer(array, range(i, i + 1), waiting) for i in run))
        else:
            _settle(waiting[run.start], error)
        return
    for place, index in enumerate(run):
        _settle(waiting[index], memoryview(block)[place * array.nbytes : (place + 1) * array.nbytes])


def _settle(futures: list[asyncio.Future[Made]], outcome: Made | Exception) -> None:
    for future in futures:
        if future.done():  # cancelled
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _runs(indexes: list[int], most: int) -> Iterator[range]:
    """Consecutive numbers as ranges of at most `most`."""
    for _, group in itertools.groupby(enumerate(indexes), lambda pair: pair[1] - pair[0]):
        first, *rest = (index for _, index in group)
        stop = first + 1 + len(rest)
        for start in range(first, stop, most):
            yield range(start, min(start + most, stop))
