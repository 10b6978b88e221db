"""Reading a whole version through the overlay, beside restoring it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import nn
from zarr.core.buffer.cpu import NDBuffer
from zarr.storage import MemoryStore

import cnr_store
from benchmarks.codec_bench.targets import Target
from benchmarks.codec_bench.timing import race

_PATH = "tables/table/weight"
_SHARE = 0.01
_WANTED = 0.6


@dataclass(frozen=True)
class Whole:
    """Seconds for one whole table, into memory that is there: restored, through the overlay, and what Zarr itself
    takes for uncompressed chunks of the same cut that lie in memory."""

    deltas: int
    table_bytes: int
    restore_seconds: float
    overlay_seconds: float
    zarr_seconds: float

    @property
    def share(self) -> float:
        return self.restore_seconds / self.overlay_seconds

    @property
    def target(self) -> Target:
        return Target("overlay: share of restore's pace", _WANTED, self.share, f"{self.deltas} deltas")

    def show(self) -> str:
        pace = self.table_bytes / 1e9
        return (
            f"{self.deltas:2d} deltas: restore {pace / self.restore_seconds:5.2f} GB/s, overlay "
            f"{pace / self.overlay_seconds:5.2f} GB/s ({self.share:.0%}; target {_WANTED:.0%}); Zarr alone, from "
            f"memory {pace / self.zarr_seconds:5.2f} GB/s"
        )


def measure(folder: Path, rows: int, dim: int, deltas: int, rounds: int) -> Whole:
    """Write a table and deltas of a hundredth of its rows, 4 bits, and read the last version."""
    model = nn.Module()
    model.table = nn.Embedding(rows, dim)
    _save(folder, model, rows, deltas)
    array: Any = cnr_store.open(folder)[_PATH]
    out = NDBuffer.from_numpy_array(np.zeros((rows, dim), np.float32))
    plain = zarr.create_array(
        MemoryStore(),
        shape=(rows, dim),
        chunks=array.chunks,
        dtype="float32",
        compressors=None,
        fill_value=np.nan,
    )
    plain[:] = 1
    best = race(
        {
            "restore": lambda: cnr_store.load(folder, model),
            "overlay": lambda: cnr_store.open(folder)[_PATH].get_basic_selection(slice(None), out=out),  # type: ignore[union-attr]  # an array
            "zarr": lambda: plain.get_basic_selection(slice(None), out=out),
        },
        rounds,
    )
    return Whole(deltas, rows * dim * 4, best["restore"], best["overlay"], best["zarr"])


def _save(folder: Path, model: nn.Module, rows: int, deltas: int) -> None:
    generator = np.random.default_rng(0)
    weight = model.get_parameter("table.weight")
    with cnr_store.Checkpointer(folder, model, policy="consecutive", bits=4) as checkpointer:
        for step in range(deltas + 1):
            ids = np.unique(generator.integers(0, rows, int(rows * _SHARE)))
            with torch.no_grad():
                weight[torch.from_numpy(ids)] += 1
            checkpointer.touch("table", ids)
            checkpointer.save(step).result()
