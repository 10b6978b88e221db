"""Reading dense arrays: whole and lossless in every version."""

from __future__ import annotations

import numpy as np

from cnr_backends import ShardError, check_chunk
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.objects import read_object
from cnr_store.chains.allocation import Array, allocate
from cnr_store.errors import CorruptionError, VersionNotFoundError
from cnr_store.format.arrays import DenseGrid, parse_dense_document
from cnr_store.format.record import Record


def dense_layout(catalog: Catalog, record: Record, path: str) -> DenseGrid:
    """Shape, cut and type of a dense array, proven against the record's entry and the manifest's objects."""
    what = f"version {record.id}, {path}"
    entry = record.arrays.get(path)
    if entry is None or entry.kind != "dense":
        raise VersionNotFoundError(f"version {record.id} has no dense array {path}")
    if path not in record.nodes:
        raise CorruptionError(f"{what} is recorded without metadata")
    grid = parse_dense_document(record.nodes[path], what)
    if (grid.shape, grid.dtype.name) != (entry.shape, entry.element):
        raise CorruptionError(
            f"{what}: {grid.shape} {grid.dtype} and {entry.shape} {entry.element[:40]} in one record"
        )
    with catalog.reading(record):
        parts = catalog.manifest(record).parts(path)
    if parts.keys() != set(range(min(grid.chunks, len(parts) + 1))):
        raise CorruptionError(
            f"{what}: {len(parts)} objects are in the manifest, {grid.chunks} hold the array"
        )
    for index, part in parts.items():
        if part.nbytes != grid.chunk_nbytes + 4:
            raise CorruptionError(
                f"{what}: chunk {index} has {part.nbytes} bytes, one of {grid.chunk} {grid.dtype} takes "
                f"{grid.chunk_nbytes + 4}"
            )
    return grid


def read_dense(
    catalog: Catalog, record: Record, path: str, first: int = 0, rows: int | None = None
) -> tuple[Array, str | None]:
    """A dense array, or `rows` of it from `first` on, and torch's name of its type (None where numpy's says it)."""
    grid = dense_layout(catalog, record, path)
    end, chunk_rows = (*grid.shape, 1)[0] if rows is None else first + rows, (*grid.chunk, 1)[0]
    numbers = range(first // chunk_rows, -(-end // chunk_rows)) if grid.chunks else range(0)
    # The first chunk is read before memory is taken, so that a small object can't claim a large array.
    data = dense_object(catalog, record, path, grid, numbers[0]) if numbers else b""
    shape = (end - first, *grid.shape[1:]) if grid.shape else ()
    out = allocate(shape, grid.dtype, f"version {record.id}, {path}")
    along = out.reshape(shape or 1)  # a scalar is its own only chunk
    for index in numbers:
        if index != numbers[0]:
            data = dense_object(catalog, record, path, grid, index)
        values = np.frombuffer(memoryview(data)[:-4], grid.dtype).reshape(grid.chunk or 1)
        start = index * chunk_rows
        begin, stop = max(first, start), min(end, start + chunk_rows)  # the last chunk is padded
        along[begin - first : stop - first] = values[begin - start : stop - start]
    return out, grid.torch_dtype


def dense_object(catalog: Catalog, record: Record, path: str, grid: DenseGrid, index: int) -> bytes:
    """The object of a chunk of a `dense_layout`, values and crc32c, proven to be the one committed."""
    key = record.key(path, grid.key(index))
    what = f"version {record.id}, {path}: {key}"
    part = catalog.manifest(record).parts(path)[index]
    with catalog.reading(record):
        data = read_object(catalog.backend, key, what)
    if len(data) != part.nbytes or int.from_bytes(data[-4:], "little") != part.tail:
        raise CorruptionError(f"{what}: its {len(data)} bytes are not those committed ({part.nbytes})")
    try:
        check_chunk(data)
    except ShardError as error:
        raise CorruptionError(f"{what}: {error}") from error
    return data
