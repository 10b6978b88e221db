"""How an array is cut: inner chunks (the unit of lazy reading) inside shards (the unit of writing).

Sizes in rows are powers of two, so the grids of different versions nest. A version picks its grids from the
bytes it expects to write: an inner chunk of a sparse delta spans more rows than one of a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_CHUNK_DECODED_BYTES = 64 << 20
MAX_CHUNKS_PER_SHARD = 4096
TARGET_CHUNK_BYTES = 512 << 10
MAX_CHUNK_BYTES = 1 << 20
TARGET_SHARD_BYTES = 32 << 20
MAX_SHARD_BYTES = 64 << 20
BLOCK_ROWS = 1 << 16
"""Rows that are counted together. Where rows are written is known block by block, because ranks that hold parts of an
array add up their counts, and terabytes of rows have no more than some 100,000 blocks."""

Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Grid:
    """How an array of rows is cut. Shapes are (rows, columns); an array of shape (rows,) has one column here."""

    rows: int
    columns: int
    chunk_rows: int
    chunk_columns: int
    shard_rows: int
    shard_columns: int

    @property
    def column_chunks(self) -> int:
        """Chunks that hold one row: along columns."""
        return -(-self.columns // self.chunk_columns)

    @property
    def shard_grid(self) -> tuple[int, int]:
        """Shards along rows and along columns."""
        return -(-self.rows // self.shard_rows), -(-self.columns // self.shard_columns)

    @property
    def chunks_per_shard(self) -> int:
        """Slots of a shard's index."""
        return (self.shard_rows // self.chunk_rows) * (self.shard_columns // self.chunk_columns)

    def locate(self, row_chunk: int, column_chunk: int) -> tuple[int, int]:
        """(linear index of the shard, linear index of the chunk inside it), both row-major."""
        rows_each = self.shard_rows // self.chunk_rows
        columns_each = self.shard_columns // self.chunk_columns
        shard_row, chunk_row = divmod(row_chunk, rows_each)
        shard_column, chunk_column = divmod(column_chunk, columns_each)
        return shard_row * self.shard_grid[1] + shard_column, chunk_row * columns_each + chunk_column


def choose_grid(rows: int, columns: int, itemsize: int, bytes_per_row: float, counts: Counts | None) -> Grid:
    """How to cut a (rows, columns) array, of which some rows are written.

    On average chunks take `TARGET_CHUNK_BYTES` encoded, and shards `TARGET_SHARD_BYTES`. Where the rows written crowd
    together, both shrink until the fullest chunk and shard keep their limits.

    `itemsize`: bytes of a decoded value.
    `bytes_per_row`: encoded bytes that a row is expected to take.
    `counts`: (blocks,): the rows written of each `BLOCK_ROWS` rows; None for all.
    """
    density = 1.0 if counts is None else max(int(counts.sum()), 1) / rows
    most_rows = _power_below(MAX_CHUNK_DECODED_BYTES // (columns * itemsize))
    whole = 1 << (rows - 1).bit_length()  # the smallest power of two from the number of rows on
    chunk_rows = min(_power_below(TARGET_CHUNK_BYTES / (bytes_per_row * density)), most_rows, whole)
    # Rows may crowd in a few chunks, which the average density does not show.
    while chunk_rows > 1 and _fullest(counts, rows, chunk_rows) * bytes_per_row > MAX_CHUNK_BYTES:
        chunk_rows //= 2
    shard_rows = max(chunk_rows, min(_power_below(TARGET_SHARD_BYTES / (bytes_per_row * density)), whole))
    # A reader holds the index of a shard, 16 bytes a chunk, before it reads any of its rows.
    shard_rows = min(shard_rows, chunk_rows * MAX_CHUNKS_PER_SHARD)
    while shard_rows > chunk_rows and _fullest(counts, rows, shard_rows) * bytes_per_row > MAX_SHARD_BYTES:
        shard_rows //= 2
    return Grid(rows, columns, chunk_rows, columns, shard_rows, columns)


def block_count(rows: int) -> int:
    """Blocks of an array of so many rows."""
    return -(-rows // BLOCK_ROWS)


def count_blocks(ids: np.ndarray[Any, Any], rows: int) -> Counts:
    """(blocks,): how many of the rows `ids`, (n,) ascending, each block of an array has."""
    edges = np.searchsorted(ids, np.arange(block_count(rows) + 1) * BLOCK_ROWS)
    return np.diff(edges).astype(np.int64)


def rows_in(counts: Counts | None, rows: int, each: int) -> Counts:
    """(n,): at most how many rows are written of each `each` rows, a power of two, of an array.

    `counts`: as `choose_grid` takes them.
    """
    starts = np.arange(-(-rows // each), dtype=np.int64) * each
    size = np.minimum(rows - starts, each)
    if counts is None:
        return size
    if each < BLOCK_ROWS:
        return np.minimum(size, counts[starts // BLOCK_ROWS])
    return np.add.reduceat(counts, starts // BLOCK_ROWS)


def _fullest(counts: Counts | None, rows: int, each: int) -> int:
    """At most how many rows are written of the `each` rows that have the most of them."""
    if counts is None:
        return min(each, rows)
    if each < BLOCK_ROWS:
        return min(each, int(counts.max()))
    return int(np.add.reduceat(counts, np.arange(0, len(counts), each // BLOCK_ROWS)).max())


def _power_below(value: float) -> int:
    """The greatest power of two up to a value, at least 1."""
    return 1 << max(0, int(value).bit_length() - 1)
