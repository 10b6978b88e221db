"""Tables of any number of rows, cut as they would be, of which only a few chunks are really filled.

Every shard of the table exists and the manifest lists them all, as of a table that was written whole. Of most
shards only the first row was written; the chunks that a benchmark reads are complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cnr_backends import Backend
from cnr_codecs import UniformRows, array_dtype
from cnr_store.format.grid import Grid, choose_grid
from cnr_store.format.layout import weight_path
from cnr_store.writing.plan import Plan, RowsWrite
from cnr_store.writing.writer import Writer

Array = np.ndarray[Any, Any]
TABLE = "huge"
PATH = weight_path(TABLE)
CODEC = UniformRows("adaptive", 4)
_WRITERS = 8


@dataclass(frozen=True)
class Huge:
    """A table of (rows, dim) float32, and the rows of it that are read."""

    rows: int
    dim: int
    sample: Array

    @classmethod
    def of(cls, rows: int, dim: int = 64, sampled: int = 10, seed: int = 0) -> Huge:
        """A table with `sampled` rows in as many shards, if it has so many."""
        block = rows // sampled
        offsets = np.random.default_rng(seed).integers(0, block, sampled)
        return cls(rows, dim, np.arange(sampled) * block + offsets)

    def grid(self) -> Grid:
        return choose_grid(self.rows, self.dim, 4, CODEC.bytes_per_row(self.dim, "float32"), None)

    def values(self, ids: Array, version: int = 0) -> Array:
        """(len(ids), dim) float32: what the rows hold at a version."""
        mixed = (ids[:, None] * 2_654_435_761 + np.arange(self.dim) * 40_503 + version * 97) % 1009
        return (mixed / 504.5 - 1).astype(np.float32)

    def write(self, backend: Backend, deltas: int) -> None:
        """Write a baseline, and deltas that each change the sampled rows."""
        grid, writer, base = self.grid(), Writer(backend, _WRITERS), None
        firsts = np.arange(0, self.rows, grid.shard_rows)
        chunks = np.unique(self.sample // grid.chunk_rows)[:, None] * grid.chunk_rows
        filled = np.unique(np.append(firsts, chunks + np.arange(grid.chunk_rows)))
        ids = filled[filled < self.rows]
        for version in range(deltas + 1):
            source = _Values(self, ids, version)
            kind = RowsWrite if base else _AsIfWhole
            rows = kind(PATH, (self.rows, self.dim), "float32", base, ids, source, CODEC)
            needs = (base,) if base else ()
            base = writer.write(Plan(version, base, [rows], [], {}, {}, needs)).id
            ids = self.sample


@dataclass(frozen=True)
class _Values:
    table: Huge
    ids: Array
    version: int

    def block(self, begin: int, end: int) -> Array:
        return self.table.values(self.ids[begin:end], self.version)


class _AsIfWhole(RowsWrite):
    """Some rows, in the cut of a table of which every row is written."""

    @cached_property
    def grid(self) -> Grid:
        rows, dim = self.shape
        itemsize = array_dtype(self.element).itemsize
        return choose_grid(rows, dim, itemsize, self.codec.bytes_per_row(dim, self.element), None)
