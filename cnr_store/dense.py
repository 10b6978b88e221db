"""Reading dense arrays: whole and lossless in every version."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cnr_backends import ShardError, check_chunk
from cnr_store.catalog import Catalog, read_object
from cnr_store.errors import CorruptionError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.arrays import DenseGrid, parse_dense_document
from cnr_store.format.record import Record

Array = np.ndarray[Any, Any]


def read_dense(catalog: Catalog, record: Record, path: str) -> tuple[Array, str | None]:
    """A dense array and torch's name of its type (None where the numpy type says it).

    Raises
    ------
    VersionNotFoundError, CorruptionError
    """
    what = f"version {record.id}, {path}"
    entry, doc = record.arrays.get(path), record.nodes.get(path)
    if entry is None or doc is None or entry.kind != "dense":
        raise VersionNotFoundError(f"version {record.id} has no dense array {path}")
    grid = parse_dense_document(doc, what)
    stored = sum(part.nbytes for part in catalog.manifest(record).parts(path).values())
    if math.prod(grid.shape) * grid.dtype.itemsize > stored:
        raise CorruptionError(
            f"{what}: {grid.shape} {grid.dtype} do not fit in the {stored} bytes of its objects"
        )
    out = np.empty(grid.shape, grid.dtype)
    for index in range(grid.chunks):
        data = memoryview(dense_object(catalog, record, path, grid, index))
        if len(data) - 4 != math.prod(grid.chunk) * grid.dtype.itemsize:
            raise CorruptionError(
                f"{what}: chunk {index} has {len(data) - 4} bytes, not those of {grid.chunk} {grid.dtype}"
            )
        _place_chunk(out, grid, index, data[:-4])
    torch_dtype = doc.get("attributes", {}).get("torch_dtype")
    return out, torch_dtype


def dense_object(catalog: Catalog, record: Record, path: str, grid: DenseGrid, index: int) -> bytes:
    """The object of a dense array's chunk, values and crc32c, proven to be the one committed."""
    key = layout.version_key(record.id, path, grid.key(index))
    what = f"version {record.id}, {path}: {key}"
    part = catalog.manifest(record).parts(path).get(index)
    if part is None:
        raise CorruptionError(f"{what} is not in the manifest")
    data = read_object(catalog.backend, key, what)
    if len(data) != part.nbytes or int.from_bytes(data[-4:], "little") != part.tail:
        raise CorruptionError(f"{what}: its {len(data)} bytes are not those committed ({part.nbytes})")
    try:
        check_chunk(data)
    except ShardError as error:
        raise CorruptionError(f"{what}: {error}") from error
    return data


def _place_chunk(out: Array, grid: DenseGrid, index: int, data: memoryview) -> None:
    values = np.frombuffer(data, grid.dtype).reshape(grid.chunk)
    if not grid.shape:
        out[...] = values
        return
    first = index * grid.chunk[0]
    rows = min(grid.chunk[0], grid.shape[0] - first)
    out[first : first + rows] = values[:rows]
