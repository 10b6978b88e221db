"""The pace of training on one thread while a save is written by another."""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

import cnr_store
from benchmarks.codec_bench.targets import Target
from benchmarks.saving_bench.training import DIM, Training
from cnr_codecs import UniformRows

_ALONE_SECONDS = 0.5
_BATCH = 2048
_BATCHES = 16
_CHANGED = 0.25
_PROCESS = "another process that encodes"


@dataclass(frozen=True)
class Line:
    """Steps a second beside background work, and without it just before and after."""

    work: str
    seconds: float
    steps_per_second: float
    alone_steps_per_second: float
    share: float

    HEAD = "beside                                    for s  steps/s   alone   share"

    def show(self) -> str:
        return (
            f"{self.work:40} {self.seconds:6.2f} {self.steps_per_second:8.1f} "
            f"{self.alone_steps_per_second:7.1f} {self.share:7.1%}"
        )


class _Done(Protocol):
    def done(self) -> bool: ...


class Steps:
    """Counts training steps over batches that were drawn beforehand."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._batches = itertools.cycle(torch.randint(training.rows, (_BATCHES, _BATCH)).unbind())

    def until(self, done: Callable[[], bool]) -> tuple[int, float]:
        """(steps, seconds) until it is done."""
        began, steps = time.perf_counter(), 0
        while not done():
            self._training.step(next(self._batches))
            steps += 1
        return steps, time.perf_counter() - began

    def alone(self) -> tuple[int, float]:
        end = time.perf_counter() + _ALONE_SECONDS
        return self.until(lambda: time.perf_counter() > end)


def measure(tables: int, rows: int, seconds: float, folder: Path) -> list[Line]:
    """Each kind of work, begun anew until it has run for `seconds`, with training alone between."""
    training = Training("sgd", tables, rows)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            checkpointer = stack.enter_context(
                cnr_store.Checkpointer(
                    folder / "ours",
                    training.model,
                    training.optimizer,
                    policy="consecutive",
                    bits=4,
                    workers=1,
                )
            )
            return list(_lines(training, checkpointer, seconds, folder))
    finally:
        torch.set_num_threads(threads)


def _lines(
    training: Training, checkpointer: cnr_store.Checkpointer, seconds: float, folder: Path
) -> Iterator[Line]:
    def delta() -> _Done:
        ids = training.draw(_CHANGED)
        for name in training.names:
            checkpointer.touch(name, ids)
        return checkpointer.save(0)

    def dcp() -> _Done:
        place = folder / "dcp"
        shutil.rmtree(place, ignore_errors=True)
        future = async_save(training.state(), checkpoint_id=place, no_dist=True)
        assert isinstance(future, Future)  # not staged asynchronously
        return future

    works: dict[str, Callable[[], _Done]] = {
        "ours, baseline of 4 bits": lambda: checkpointer.save(0, full=True),
        f"ours, delta of {_CHANGED:.0%}, 4 bits": delta,
        "DCP async_save, float32": dcp,
    }
    steps = Steps(training)
    for name, work in works.items():
        yield _line(name, steps, work, seconds)
    with _encoding_process() as begin:
        yield _line(_PROCESS, steps, lambda: begin(seconds / 2), seconds)


def _line(name: str, steps: Steps, work: Callable[[], _Done], seconds: float) -> Line:
    steps.until(work().done)  # buffers are there from now on
    alone, beside = [steps.alone()], [(0, 0.0)]
    while sum(each for _, each in beside) < seconds:
        beside.append(steps.until(work().done))
        alone.append(steps.alone())
    count, busy = map(sum, zip(*beside, strict=True))
    without, free = map(sum, zip(*alone, strict=True))
    line = Line(name, busy, count / busy, without / free, count / busy / (without / free))
    print(line.show(), flush=True)
    return line


@contextmanager
def _encoding_process() -> Iterator[Callable[[float], _Done]]:
    """What sharing the machine costs by itself: a process of its own encodes for the seconds it is told."""
    context = multiprocessing.get_context("spawn")
    orders, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_encode, args=(orders, answers))
    process.start()

    class Encoding:
        def done(self) -> bool:
            if not process.is_alive():
                raise RuntimeError("the process that encodes has ended before its time")
            return not answers.empty()

    def begin(seconds: float) -> _Done:
        while not answers.empty():
            answers.get()
        orders.put(seconds)
        return Encoding()

    try:
        yield begin
    finally:
        orders.put(None)
        process.join()


def _encode(orders: Any, answers: Any) -> None:
    codec, rows = (
        UniformRows("adaptive", 4),
        np.random.default_rng(0).normal(size=(1 << 16, DIM)).astype("f4"),
    )
    for seconds in iter(orders.get, None):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            codec.encode_rows(rows, None, len(rows), element="float32")
        answers.put(None)


def targets(lines: list[Line]) -> Iterator[Target]:
    for line in lines:
        if line.work.startswith("ours"):
            yield Target("training's pace while a save is written", 0.92, line.share, line.work)
