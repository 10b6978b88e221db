"""Encodes what a plan holds and puts it: every object of a version but its manifest, state and record.

Shards are encoded and put concurrently; memory is bounded by the shards in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c
import numpy as np

from cnr_backends import Backend, Transfer, build_shard
from cnr_codecs import zarr_codecs
from cnr_store.format import layout
from cnr_store.format.arrays import (
    Doc,
    dense_document,
    dense_grid,
    document_bytes,
    group_document,
    rows_document,
)
from cnr_store.format.grid import Grid
from cnr_store.format.manifest import Part
from cnr_store.format.record import ArrayEntry
from cnr_store.plan import DenseWrite, Plan, RowsWrite


@dataclass
class Staged:
    """What has been put so far."""

    arrays: dict[str, ArrayEntry] = field(default_factory=dict)
    nodes: dict[str, Doc] = field(default_factory=dict)
    parts: dict[str, dict[int, Part]] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, path: str, index: int, part: Part) -> None:
        self.parts.setdefault(path, {})[index] = part
        self.nbytes += part.nbytes

    def array_bytes(self, path: str) -> int:
        return sum(part.nbytes for part in self.parts.get(path, {}).values())


def stage(backend: Backend, version: str, plan: Plan, transfer: Transfer) -> Staged:
    """Put every object of the version but its record."""
    staged = Staged()
    for path, index, part in transfer.map(lambda task: task(), _tasks(backend, version, plan, staged)):
        staged.add(path, index, part)
    for path, entry in staged.arrays.items():
        staged.arrays[path] = replace(entry, nbytes=staged.array_bytes(path))
    documents = [
        (layout.version_key(version, path, layout.NODE), document_bytes(doc))
        for path, doc in staged.nodes.items()
    ]
    for nbytes in transfer.map(lambda item: put_object(backend, *item), documents):
        staged.nbytes += nbytes
    return staged


_Task = Callable[[], tuple[str, int, Part]]


def _tasks(backend: Backend, version: str, plan: Plan, staged: Staged) -> Iterator[_Task]:
    """One task an object, made as the pool asks for them; notes each array in `staged` on the way."""
    for rows in plan.rows:
        kind = "whole" if rows.base is None else "delta"
        staged.arrays[rows.path] = ArrayEntry(
            kind,
            rows.shape,
            rows.element,
            rows.base,
            rows.rows_written,
            0,
            rows.codec.get_config(),
            rows.aliases,
        )
        if rows.rows_written:
            grid = rows.grid()
            _add_node(
                staged, rows.path, rows_document(rows.shape, rows.element, grid, zarr_codecs(rows.codec))
            )
            yield from _shard_tasks(backend, version, rows, grid)
    for dense in plan.dense:
        grid_of = dense_grid(dense.values.shape, dense.values.dtype)
        name = layout.decode_name(dense.path.rsplit("/", 1)[-1])
        _add_node(staged, dense.path, dense_document(grid_of, name, dense.torch_dtype))
        staged.arrays[dense.path] = ArrayEntry(
            "dense", dense.values.shape, grid_of.dtype.name, aliases=dense.aliases
        )
        for index in range(grid_of.chunks):
            yield _bind(_put_dense, backend, version, dense, index)


def _bind(function: Callable[..., tuple[str, int, Part]], *arguments: Any) -> _Task:
    return lambda: function(*arguments)


def _add_node(staged: Staged, path: str, doc: Doc) -> None:
    for group in layout.parent_groups(path):
        staged.nodes.setdefault(group, group_document())
    staged.nodes[path] = doc


def _shard_tasks(backend: Backend, version: str, rows: RowsWrite, grid: Grid) -> Iterator[_Task]:
    for shard in range(grid.shard_grid[0]):
        first_row = shard * grid.shard_rows
        begin, end = _positions(rows, first_row, first_row + grid.shard_rows)
        if begin < end:
            yield _bind(_put_shard, backend, version, rows, grid, shard)


def _positions(rows: RowsWrite, first_row: int, last_row: int) -> tuple[int, int]:
    """Positions in the write's ids of the rows first_row ... last_row - 1."""
    if rows.ids is None:
        return min(first_row, rows.shape[0]), min(last_row, rows.shape[0])
    begin, end = np.searchsorted(rows.ids, (first_row, last_row))
    return int(begin), int(end)


def _put_shard(
    backend: Backend, version: str, rows: RowsWrite, grid: Grid, shard: int
) -> tuple[str, int, Part]:
    chunks: list[bytes | None] = []
    for slot in range(grid.chunks_per_shard):
        first_row = shard * grid.shard_rows + slot * grid.chunk_rows
        begin, end = _positions(rows, first_row, first_row + grid.chunk_rows)
        if begin == end:
            chunks.append(None)
            continue
        offsets = None if rows.ids is None else rows.ids[begin:end] - first_row
        chunks.append(
            rows.codec.encode_rows(
                rows.source.values(begin, end),
                offsets,
                grid.chunk_rows,
                element=rows.element,
                seal=layout.seal(version, rows.path, first_row, 0),
            )
        )
    pieces = build_shard(chunks)
    place = f"c/{shard}/0" if len(rows.shape) == 2 else f"c/{shard}"
    backend.put(layout.version_key(version, rows.path, place), pieces)
    nbytes = sum(len(piece) for piece in pieces)
    return rows.path, shard, Part(nbytes, int.from_bytes(bytes(pieces[-1])[-4:], "little"))


def _put_dense(backend: Backend, version: str, dense: DenseWrite, index: int) -> tuple[str, int, Part]:
    grid = dense_grid(dense.values.shape, dense.values.dtype)
    values = dense.values
    if grid.shape:
        first = index * grid.chunk[0]
        values = values[first : first + grid.chunk[0]]
        if len(values) < grid.chunk[0]:  # Zarr stores edge chunks whole
            values = np.concatenate(
                [values, np.zeros((grid.chunk[0] - len(values), *grid.chunk[1:]), grid.dtype)]
            )
    data = np.ascontiguousarray(values).tobytes()
    crc = google_crc32c.value(data)
    nbytes = put_object(
        backend, layout.version_key(version, dense.path, grid.key(index)), data + crc.to_bytes(4, "little")
    )
    return dense.path, index, Part(nbytes, crc)


def put_object(backend: Backend, key: str, data: bytes) -> int:
    backend.put(key, data)
    return len(data)
