"""Where the benchmark runs: on a CUDA device, or at tiny sizes on the CPU to prove that it works."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.codec_bench.machine import machine
from cnr_store.training.devices import support

_PACKAGES = ("cnr-store", "cnr-codecs", "numba", "numpy", "torch", "zarr")


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes
    ----------
    kernel_rows, kernel_dims
        Rows of the tables that single kernels read, and how wide these are.
    dim
        Of all other tables.
    tables, rows
        The state that is saved and loaded, float32.
    lookup_tables, lookup_rows, batch, pooling
        The DLRM that trains.
    steps, rounds
        Steps that are timed together; how often each contender has its turn.
    """

    kernel_rows: int
    kernel_dims: tuple[int, ...]
    dim: int
    tables: int
    rows: int
    lookup_tables: int
    lookup_rows: int
    batch: int
    pooling: int
    steps: int
    rounds: int


# 20 GB of tables, and 6.7 GB of those that train.
FULL = Sizes(1 << 23, (64, 128), 64, 8, 9_765_625, 26, 1_000_000, 8192, 20, 20, 5)
QUICK = Sizes(1 << 20, (64, 128), 64, 4, 1 << 20, 26, 100_000, 8192, 20, 10, 3)
# Smaller tables would be stored as they are.
TINY = Sizes(96, (9,), 8, 1, 520, 2, 520, 8, 2, 1, 1)


@dataclass(frozen=True)
class Place:
    """A device and what is measured there.

    Attributes
    ----------
    is_timed
        Whether times mean anything: on the CPU they do not.
    """

    device: torch.device
    sizes: Sizes
    is_timed: bool

    @property
    def options(self) -> dict[str, Any]:
        """Of checkpointers."""
        return {"policy": "consecutive", "keep_last": 2, "bits": 4}

    def wait(self) -> None:
        """Wait until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def show(self, line: str) -> None:
        """Print a line of figures, if they mean anything."""
        if self.is_timed:
            print(line, flush=True)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of a run, from the first thing it queues to the last one done."""
        return statistics.median(self.each_seconds({"": run})[""])

    def each_seconds(self, runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """The times of several runs, which take turns. Each runs once before."""
        found: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values() if self.is_timed else ():
            run()
        for _ in range(self.sizes.rounds):
            for name, run in runs.items():
                self.wait()
                began = time.perf_counter()
                run()
                self.wait()
                found[name].append(time.perf_counter() - began)
        return found

    def describe(self) -> dict[str, Any]:
        """Machine, versions and date."""
        found = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine(),
            "versions": {name: _version(name) for name in _PACKAGES},
        }
        if self.device.type == "cuda":
            known = torch.cuda.get_device_properties(self.device)
            found["gpu"] = {
                "name": known.name,
                "memory_bytes": known.total_memory,
                "processors": known.multi_processor_count,
                "capability": f"{known.major}.{known.minor}",
                "cuda": torch.version.cuda,
            }
        return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout
        return None


@contextmanager
def open_place(is_quick: bool, is_tiny: bool) -> Iterator[Place | None]:
    """The first CUDA device; the CPU, taken for a device, at tiny sizes; None without either."""
    if is_tiny:
        with patch.object(support, "is_elsewhere", lambda device: True):
            yield Place(torch.device("cpu"), TINY, is_timed=False)
    elif torch.cuda.is_available():
        yield Place(torch.device("cuda", torch.cuda.current_device()), QUICK if is_quick else FULL, True)
    else:
        yield None
