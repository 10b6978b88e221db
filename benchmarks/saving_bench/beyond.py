"""How long a save holds training whose rows don't fit into `snapshot_bytes`, beside an encoder that does nothing else.

Such rows are encoded before `save` returns. The encoder beside it has as many threads and the same rows, in chunks of
the same size, and drops what it made.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

import cnr_store
from benchmarks.codec_bench.targets import Target
from benchmarks.saving_bench.training import DIM, Training
from cnr_codecs import UniformRows
from cnr_store.format.grid import choose_grid, count_blocks
from cnr_store.training.model.tensors import AnyArray, copy_rows

TABLES = 4
_BITS = 4
_CODEC = UniformRows("adaptive", _BITS)
_Chunk = tuple[torch.Tensor, AnyArray | None, int, int]
"""(table, the rows or None for all, first row, rows) of a chunk."""
OURS, BARE = "save", "encoder alone"
SHARES = (1.0, 0.25)
WORKERS = (1, 2)


@dataclass(frozen=True)
class Line:
    """One contender: seconds until `save` returns, or until the encoder is done."""

    share: float
    nbytes: int
    contender: str
    workers: int
    best_seconds: float
    median_seconds: float

    HEAD = "rows saved     MB  contender      workers  best ms  median ms   GB/s"

    def show(self) -> str:
        return (
            f"{self.share:10.0%} {self.nbytes / 1e6:6.0f}  {self.contender:14} {self.workers:7} "
            f"{self.best_seconds * 1e3:8.1f} {self.median_seconds * 1e3:10.1f} "
            f"{self.nbytes / 1e9 / self.median_seconds:6.2f}"
        )


def measure(rows: int, rounds: int, folder: Path) -> list[Line]:
    """Each contender with one and two threads, in turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of torch encode, too, while training waits
    try:
        return [line for share in SHARES for line in _of_share(share, rows, rounds, folder / f"{share:g}")]
    finally:
        torch.set_num_threads(threads)


def _of_share(share: float, rows: int, rounds: int, folder: Path) -> Iterator[Line]:
    training = Training("sgd", TABLES, rows)
    ids = None if share == 1 else training.draw(share)
    runs: dict[tuple[str, int], Callable[[], float]] = {}
    with ExitStack() as stack:
        for workers in WORKERS:
            checkpointer = stack.enter_context(
                cnr_store.Checkpointer(
                    folder / str(workers),
                    training.model,
                    training.optimizer,
                    policy="consecutive",
                    bits=_BITS,
                    limits=cnr_store.Limits(workers=workers, snapshot_bytes=0),
                    tracking=cnr_store.Tracking(audit=False),
                    keep_last=1,
                )
            )
            checkpointer.save(0).result()
            pool = stack.enter_context(ThreadPoolExecutor(workers))
            runs[OURS, workers] = partial(_save, checkpointer, training, ids)
            runs[BARE, workers] = partial(_encode, pool, training, ids)
        seconds: dict[tuple[str, int], list[float]] = {each: [] for each in runs}
        for _ in range(rounds):
            for each, run in runs.items():
                gc.collect()
                seconds[each].append(run())
    nbytes = sum(each.nbytes for each in training.arrays) if ids is None else TABLES * len(ids) * DIM * 4
    for (contender, workers), found in seconds.items():
        line = Line(share, nbytes, contender, workers, min(found), statistics.median(found))
        print(line.show(), flush=True)
        yield line


def _save(checkpointer: cnr_store.Checkpointer, training: Training, ids: torch.Tensor | None) -> float:
    if ids is not None:
        for name in training.names:
            checkpointer.touch(name, ids)
    pending = checkpointer.save(0, full=ids is None)
    pending.result()
    return pending.stall_seconds


def _encode(pool: ThreadPoolExecutor, training: Training, ids: torch.Tensor | None) -> float:
    began = time.perf_counter()
    for _ in pool.map(_encode_chunk, _chunks(training, ids)):
        pass
    return time.perf_counter() - began


def _encode_chunk(chunk: _Chunk) -> None:
    table, ids, first, rows = chunk
    values = table[first : first + rows].numpy()
    if ids is not None:
        values = np.empty((ids.size, table.shape[1]), np.float32)
        copy_rows(table, ids, values)
    offsets = None if ids is None else ids - first
    _CODEC.encode_rows(values, offsets, rows, element="float32")


def _chunks(training: Training, ids: torch.Tensor | None) -> Iterator[_Chunk]:
    """As a version is cut."""
    changed = None if ids is None else ids.numpy()
    for table in training.arrays:
        counts = None if changed is None else count_blocks(changed, len(table))
        grid = choose_grid(len(table), DIM, 4, _CODEC.bytes_per_row(DIM, "float32"), counts)
        for first in range(0, len(table), grid.chunk_rows):
            if changed is None:
                yield table, None, first, min(grid.chunk_rows, len(table) - first)
                continue
            begin, end = np.searchsorted(changed, (first, first + grid.chunk_rows))
            yield table, changed[begin:end], first, grid.chunk_rows


def targets(lines: list[Line]) -> Iterator[Target]:
    """Medians count."""
    found = {(line.share, line.contender, line.workers): line.median_seconds for line in lines}
    for share in SHARES:
        where = f"{share:.0%} of the rows"
        for workers in WORKERS:
            pace = found[share, BARE, workers] / found[share, OURS, workers]
            yield Target(
                "beyond snapshot_bytes: of the encoder's pace", 0.9, pace, f"{where}, {workers} threads"
            )
        ours, bare = (found[share, each, 1] / found[share, each, 2] for each in (OURS, BARE))
        yield Target(
            "beyond snapshot_bytes: one thread's time over two's, of the encoder's", 0.9, ours / bare, where
        )
