"""How long a save holds training, beside a plain copy of the same rows and beside others' saves."""

from __future__ import annotations

import gc
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import cnr_store
from benchmarks.codec_bench.targets import Target
from benchmarks.saving_bench.training import Training

OURS, GATHER, ASYNC = "ours", "plain gather", "DCP async_save"
SHARES = (0.25, 0.01)
_WARM_SAVES = 2
Wait = Callable[[], object]


@dataclass(frozen=True)
class Line:
    """One contender: seconds until its save returns."""

    optimizer: str
    model_bytes: int
    share: float
    contender: str
    best_seconds: float
    median_seconds: float

    HEAD = "optimizer  model MB  changed  contender                       best ms  median ms"

    def show(self) -> str:
        return (
            f"{self.optimizer:9} {self.model_bytes / 1e6:9.0f} {self.share:8.0%}  {self.contender:28} "
            f"{self.best_seconds * 1e3:10.2f} {self.median_seconds * 1e3:10.2f}"
        )


class Trained(Protocol):
    """What contenders save: `arrays` have a line for each row, `state` is what others save."""

    @property
    def arrays(self) -> list[torch.Tensor]: ...

    def state(self) -> dict[str, Any]: ...


class Contenders:
    """Saves of one model. Each takes the rows that have changed, and returns what waits for its background."""

    def __init__(self, training: Trained, checkpointer: cnr_store.Checkpointer, folder: Path) -> None:
        self._training = training
        self._checkpointer = checkpointer
        self._places = (folder / f"peer{number}" for number in itertools.count())
        self._buffers = [torch.zeros_like(tensor) for tensor in training.arrays]
        # Off are what needs a GPU; its buffers are used again.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def runs(self) -> dict[str, Callable[[torch.Tensor], Wait]]:
        return {
            GATHER: self._gather,
            OURS: lambda _: self._checkpointer.save(0).result,
            "torch.save": self._torch_save,
            "DCP save": self._dcp_save,
            ASYNC: lambda _: self._dcp_async(None),
            f"{ASYNC}, stager kept": lambda _: self._dcp_async(self._stager),
        }

    def _gather(self, ids: torch.Tensor) -> Wait:
        for tensor, buffer in zip(self._training.arrays, self._buffers, strict=True):
            torch.index_select(tensor, 0, ids, out=buffer[: len(ids)])
        return lambda: None

    def _torch_save(self, _: torch.Tensor) -> Wait:
        place = next(self._places)
        torch.save(self._training.state(), place)
        return place.unlink

    def _dcp_save(self, _: torch.Tensor) -> Wait:
        place = next(self._places)
        save(self._training.state(), checkpoint_id=place, no_dist=True)
        return lambda: shutil.rmtree(place)

    def _dcp_async(self, stager: DefaultStager | None) -> Wait:
        place = next(self._places)
        future = async_save(self._training.state(), checkpoint_id=place, no_dist=True, async_stager=stager)

        def wait() -> None:
            future.result()  # type: ignore[union-attr]  # not staged asynchronously, so it is a future
            shutil.rmtree(place)

        return wait


def measure(optimizer: str, tables: int, rows: int, rounds: int, folder: Path) -> list[Line]:
    """Every contender's stall at each share of rows changed; they take turns, and another one begins each round."""
    training = Training(optimizer, tables, rows)
    lines = []
    with cnr_store.Checkpointer(
        folder / optimizer, training.model, training.optimizer, policy="consecutive", bits=4, keep_last=2
    ) as checkpointer:
        runs = Contenders(training, checkpointer, folder).runs()
        for share in SHARES:
            for _ in range(_WARM_SAVES):  # the first is whole, and so leaves no buffer of another size
                training.touch(training.draw(share))
                checkpointer.save(0).result()
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for turn in range(rounds):
                ids = training.draw(share)
                training.touch(ids)
                for name in itertools.islice(itertools.cycle(runs), turn, turn + len(runs)):
                    seconds[name].append(stall_of(runs[name], ids))
            lines += [
                Line(optimizer, training.nbytes, share, name, min(each), statistics.median(each))
                for name, each in seconds.items()
            ]
            print(*(line.show() for line in lines[-len(runs) :]), sep="\n", flush=True)
    return lines


def stall_of(run: Callable[[torch.Tensor], Wait], ids: torch.Tensor) -> float:
    """Seconds until a save of these rows returns; then its background is waited for."""
    gc.collect()
    began = time.perf_counter()
    wait = run(ids)
    seconds = time.perf_counter() - began
    wait()
    return seconds


def targets(lines: list[Line]) -> Iterator[Target]:
    """Medians count: a save that is short now and then helps nobody."""
    found = {(line.optimizer, line.share, line.contender): line.median_seconds for line in lines}
    for optimizer, share in dict.fromkeys((line.optimizer, line.share) for line in lines):
        where = f"{optimizer}, {share:.0%} of rows changed"
        ours, peer = found[optimizer, share, OURS], found[optimizer, share, ASYNC]
        yield Target(
            "stall: times shorter than DCP's async_save", 5 if share > 0.1 else 20, peer / ours, where
        )
        if share > 0.1:
            gather = found[optimizer, share, GATHER]
            yield Target("stall: a plain gather's share of it", 1 / 1.2, gather / ours, where)
