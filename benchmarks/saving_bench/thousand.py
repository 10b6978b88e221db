"""A version of a thousand small tables: how long its save holds training, and its commit beside as many plain puts."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Adagrad

import cnr_store
from benchmarks.codec_bench.targets import Target
from cnr_backends import Backend, open_backend
from cnr_store.writing.stage import PUTS_IN_FLIGHT
from tests.s3_server import NoServerError, serving

_ROWS, _DIM, _BATCH = 1000, 16, 64
LOCAL, FAR = "folder", "SeaweedFS"
Put = Callable[[str, bytes], object]


@dataclass(frozen=True)
class Line:
    """Saves of one model. `puts` are those of as many objects of the same sizes, by as many threads, without us."""

    place: str
    tables: int
    objects: int
    object_bytes: int
    best_stall_seconds: float
    median_stall_seconds: float
    best_commit_seconds: float
    median_commit_seconds: float
    best_puts_seconds: float
    median_puts_seconds: float

    HEAD = "place        tables  objects  stall ms (median)  commit s (median)  puts s (median)  commit/puts"

    @property
    def ratio(self) -> float:
        return self.best_commit_seconds / self.best_puts_seconds

    def show(self) -> str:
        return (
            f"{self.place:12} {self.tables:6d} {self.objects:8d} {self.best_stall_seconds * 1e3:9.1f} "
            f"{f'({self.median_stall_seconds * 1e3:.0f})':>8} {self.best_commit_seconds:9.2f} "
            f"{f'({self.median_commit_seconds:.2f})':>8} {self.best_puts_seconds:8.2f} "
            f"{f'({self.median_puts_seconds:.2f})':>7} {self.ratio:12.2f}"
        )


class Bags:
    """Many small tables with Adagrad, whose gradients are dense as they are by default."""

    def __init__(self, tables: int) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList(nn.EmbeddingBag(_ROWS, _DIM) for _ in range(tables))
        self.optimizer = Adagrad(self.model.parameters(), lr=0.01)
        self._random = torch.Generator().manual_seed(0)

    def step(self) -> None:
        ids = torch.randint(_ROWS, (_BATCH, 1), generator=self._random)
        self.optimizer.zero_grad()
        torch.autograd.backward(torch.stack([table(ids) for table in self.model]).square().sum())
        self.optimizer.step()


def measure(tables: int, rounds: int) -> list[Line]:
    """A folder, and a real S3 server where there is one."""
    with tempfile.TemporaryDirectory(prefix="cnr-saving-") as folder:
        lines = [_local(tables, rounds, Path(folder))]
    try:
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
            backends = (
                open_backend(server.url(name), **server.storage_options) for name in ("thousand", "plain")
            )
            lines.append(_line(FAR, tables, rounds, *backends))
    except NoServerError as error:
        print(f"S3 is left out: {error}")
    return lines


def _local(tables: int, rounds: int, folder: Path) -> Line:
    plain = folder / "plain"
    plain.mkdir()
    return _line(LOCAL, tables, rounds, open_backend(folder / "ours"), plain)


def _line(place: str, tables: int, rounds: int, ours: Backend, plain: Backend | Path) -> Line:
    bags = Bags(tables)
    stalls, commits, puts = [], [], []
    numbers = itertools.count()

    def put(data: bytes) -> None:
        name = str(next(numbers))
        if isinstance(plain, Path):
            _put_synced(plain / name, data)
        else:
            plain.put(name, data)

    with cnr_store.Checkpointer(ours, bags.model, bags.optimizer, policy="consecutive", bits=4) as each:
        for turn in range(rounds + 1):
            bags.step()
            gc.collect()
            began = time.perf_counter()
            pending = each.save(turn)
            stall = time.perf_counter() - began
            version = pending.result()
            commit = time.perf_counter() - began
            sizes = [size for _, size in ours.list_keys(f"versions/{version.id}")]
            seconds = _plain_puts(put, sizes)
            if turn:  # the first is whole, and kernels may still be compiled
                stalls.append(stall)
                commits.append(commit)
                puts.append(seconds)
    found = (value for times in (stalls, commits, puts) for value in (min(times), statistics.median(times)))
    line = Line(place, tables, len(sizes), sum(sizes) // len(sizes), *found)
    print(line.show(), flush=True)
    return line


def _plain_puts(put: Callable[[bytes], None], sizes: Sequence[int]) -> float:
    objects = [os.urandom(size) for size in sizes]
    began = time.perf_counter()
    with ThreadPoolExecutor(PUTS_IN_FLIGHT) as pool:
        for _ in pool.map(put, objects):
            pass
    return time.perf_counter() - began


def _put_synced(path: Path, data: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def targets(lines: Sequence[Line]) -> Iterator[Target]:
    for line in lines:
        if line.place == LOCAL:
            where = f"{line.tables} tables"
            stall = line.best_stall_seconds
            yield Target("a thousand tables: seconds of stall", 0.04, stall, where, at_most=True)
            yield Target(
                "a thousand tables: commit, of plain synced puts", 2, line.ratio, where, at_most=True
            )
