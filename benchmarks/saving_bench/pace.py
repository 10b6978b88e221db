"""The pace of training while a save is written by one worker."""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import cnr_store
from benchmarks.codec_bench.targets import Target
from benchmarks.saving_bench.training import DIM, Training
from cnr_codecs import UniformRows

_ALONE_SECONDS = 0.35
_BATCH = 2048
_BATCHES = 16
_CHANGED = 0.25
_PROCESS = "another process that encodes"
_PUTTING = "one that encodes and puts"
_PROCESS_SECONDS = 0.35
_OURS = "ours"
TORCH_THREADS = (1, 2)


@dataclass(frozen=True)
class Line:
    """Pairs of training beside background work, and alone just before and after. Works take turns.

    `shares` are the paces beside it, of those alone, ascending; `seconds` are the medians of the work's.
    """

    work: str
    torch_threads: int
    seconds: float
    steps_per_second: float
    alone_steps_per_second: float
    share: float
    shares: tuple[float, ...]

    HEAD = (
        "beside                       threads pairs  for s  steps/s   alone   share (quartiles; least, most)"
    )

    def show(self) -> str:
        low, _, high = statistics.quantiles(self.shares, n=4, method="inclusive")
        return (
            f"{self.work:28} {self.torch_threads:7d} {len(self.shares):5d} {self.seconds:6.2f} "
            f"{self.steps_per_second:8.1f} {self.alone_steps_per_second:7.1f} {self.share:7.1%} "
            f"({low:.1%} to {high:.1%}; {self.shares[0]:.1%}, {self.shares[-1]:.1%})"
        )


@dataclass(frozen=True)
class _Pair:
    seconds: float
    beside: float
    alone: float


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

    def alone(self) -> float:
        """Steps a second without any work."""
        end = time.perf_counter() + _ALONE_SECONDS
        count, seconds = self.until(lambda: time.perf_counter() > end)
        return count / seconds


def measure(tables: int, rows: int, pairs: int, folder: Path) -> list[Line]:
    """Each kind of work so often, by turns with the others, with training alone between; with one thread and two."""
    training, lines = Training("sgd", tables, rows), list[Line]()
    threads = torch.get_num_threads()
    try:
        with cnr_store.Checkpointer(
            folder / "ours",
            training.model,
            training.optimizer,
            policy="consecutive",
            bits=4,
            limits=cnr_store.Limits(workers=1),
            keep_last=2,
        ) as checkpointer:
            for each in TORCH_THREADS:
                torch.set_num_threads(each)
                lines += _lines(training, checkpointer, pairs, folder)
                print(*(line.show() for line in lines if line.torch_threads == each), sep="\n", flush=True)
    finally:
        torch.set_num_threads(threads)
    return lines


def _lines(
    training: Training, checkpointer: cnr_store.Checkpointer, pairs: int, folder: Path
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

    place = folder / f"helper of {torch.get_num_threads()}"
    with _process(_encode) as begin, _process(_encode_and_put, training.nbytes, place) as begin_putting:
        works: dict[str, Callable[[], _Done]] = {
            f"{_OURS}, baseline of 4 bits": lambda: checkpointer.save(0, full=True),
            f"{_OURS}, delta of {_CHANGED:.0%}, 4 bits": delta,
            "DCP async_save, float32": dcp,
            _PROCESS: lambda: begin(_PROCESS_SECONDS),
            _PUTTING: lambda: begin_putting(_PROCESS_SECONDS),
        }
        steps = Steps(training)
        for work in works.values():
            steps.until(work().done)  # buffers are there from now on
        found: dict[str, list[_Pair]] = {name: [] for name in works}
        before = steps.alone()
        for turn in range(pairs):
            for name in itertools.islice(itertools.cycle(works), turn, turn + len(works)):
                count, seconds = steps.until(works[name]().done)
                after = steps.alone()
                found[name].append(_Pair(seconds, count / seconds, (before + after) / 2))
                before = after
    for name, of_work in found.items():
        seconds, beside, alone = (
            statistics.median(map(attrgetter(field), of_work)) for field in ("seconds", "beside", "alone")
        )
        shares = tuple(sorted(pair.beside / pair.alone for pair in of_work))
        yield Line(name, torch.get_num_threads(), seconds, beside, alone, statistics.median(shares), shares)


@contextmanager
def _process(work: Callable[..., None], *arguments: Any) -> Iterator[Callable[[float], _Done]]:
    """What sharing the machine costs by itself: a process of its own works for the seconds it is told, at least."""
    context = multiprocessing.get_context("spawn")
    orders, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=work, args=(orders, answers, *arguments))
    process.start()

    class Encoding:
        def done(self) -> bool:
            if not process.is_alive():
                raise RuntimeError("the process beside training has ended before its time")
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


def _encode_and_put(orders: Any, answers: Any, nbytes: int, folder: Path) -> None:
    """Saves as a helper process would write them: of rows that are in its memory, and are not copied."""
    rows = np.random.default_rng(0).standard_normal((nbytes // DIM // 4, DIM), np.float32)
    model = nn.Module()
    model.table = nn.Embedding.from_pretrained(torch.from_numpy(rows), freeze=False, sparse=True)
    torch.set_num_threads(1)
    with cnr_store.Checkpointer(
        folder, model, bits=4, limits=cnr_store.Limits(workers=1, snapshot_bytes=0), keep_last=2
    ) as checkpointer:
        for seconds in iter(orders.get, None):
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                checkpointer.save(0, full=True).result()
            answers.put(None)


def targets(lines: list[Line]) -> Iterator[Target]:
    for line in lines:
        if line.work.startswith(_OURS) and line.torch_threads == 1:
            yield Target("training's pace while a save is written", 0.92, line.share, line.work)
