"""Zarr metadata documents of the arrays in a version: as zarr itself makes them, and proven when they are read back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cnr_codecs import CodecConfigError, Compressors, array_dtype
from cnr_store.errors import FormatError
from cnr_store.format import validate
from cnr_store.format.grid import MAX_CHUNK_DECODED_BYTES, MAX_CHUNKS_PER_SHARD, Grid
from cnr_store.format.layout import parent_groups
from cnr_store.format.state import dumps
from cnr_store.format.state_arrays import NUMBER_TYPES

MAX_DENSE_CHUNK_BYTES = 32 << 20
MAX_BLOCK_BYTES = 1 << 30
"""Of the rows of one inner chunk in all their columns, decoded: what a reader composes at once."""

MAX_COLUMN_CHUNKS = 4096
MAX_DIMENSIONS = 64
Doc = dict[str, Any]
_ROW_CODEC, _CHECKSUM = "cnr.rows", {"name": "crc32c"}
_CHUNK_KEYS: tuple[Doc, Doc] = (
    {"name": "default"},
    {"name": "default", "configuration": {"separator": "/"}},
)
_ZEROS: Mapping[str, Any] = {"b": False, "f": 0.0, "c": [0.0, 0.0]}
"""Of numpy's kinds of types, as JSON; of the others it is 0."""
_NUMBER_TYPES = {dtype.name: dtype for dtype in NUMBER_TYPES.values()}


@dataclass(frozen=True)
class DenseGrid:
    """How a dense array is cut: along its first axis only. Each chunk is one object."""

    shape: tuple[int, ...]  # shape, chunk: shapes of the array and of a chunk
    chunk: tuple[int, ...]
    dtype: np.dtype[Any]  # numpy type of the values as they are stored
    # torch's name of the element type where numpy lacks it, so that `dtype` holds its bits; else None
    torch_dtype: str | None = None

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of the values of a chunk. Those at the edge are stored whole, too."""
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def chunks(self) -> int:
        """Number of chunks, all along the first axis; 0 for an array without elements."""
        if math.prod(self.shape) == 0:
            return 0
        return -(-self.shape[0] // self.chunk[0]) if self.shape else 1

    def key(self, index: int) -> str:
        """Key of a chunk below the array's path."""
        return "/".join(["c", *([str(index)] + ["0"] * (len(self.shape) - 1) if self.shape else [])])


def rows_document(
    shape: tuple[int, ...], element: str, grid: Grid, followers: Sequence[Mapping[str, Any]]
) -> Doc:
    """Metadata of a sharded array of rows, in short: a record may hold thousands.

    `shape`: (rows, dim) or (rows,).
    `element`: the payload's element type.
    `followers`: what follows the row codec. That is `cnr.rows` here, which reads the payloads of every other.
    """
    _check_limits(grid, array_dtype(element).itemsize, f"an array of shape {shape}")
    chunk: Doc = {"chunk_shape": [grid.chunk_rows, grid.chunk_columns][: len(shape)]}
    codec: Doc = {"name": _ROW_CODEC, "configuration": chunk}
    if followers:
        codecs = [{"name": _ROW_CODEC, "configuration": {}}, *map(dict, followers), _CHECKSUM]
        index = {"index_codecs": [_bytes_codec(2), _CHECKSUM], "index_location": "end"}
        codec = {"name": "sharding_indexed", "configuration": {**chunk, "codecs": codecs, **index}}
    return {
        **_layout(shape, (grid.shard_rows, grid.shard_columns)[: len(shape)], array_dtype(element)),
        "chunk_key_encoding": _CHUNK_KEYS[0],
        "fill_value": _fill(array_dtype(element)),
        "codecs": [codec],
        "dimension_names": ["row", "dim"][: len(shape)],
        "zarr_format": 3,
        "node_type": "array",
    }


def plain_rows_document(shape: tuple[int, ...], dtype: np.dtype[Any], chunk_rows: int) -> Doc:
    """Metadata of the same array for any Zarr reader: unsharded, little-endian bytes."""
    codecs, names = [_bytes_codec(dtype.itemsize)], ["row", "dim"][: len(shape)]
    return _plain(_layout(shape, (chunk_rows, *shape[1:]), dtype), _fill(dtype), codecs, {}, names)


def dense_document(grid: DenseGrid, name: str, torch_dtype: str | None = None) -> Doc:
    """Metadata of a dense array: plain bytes and crc32c. Its dimensions are named after the array, so that
    arrays of different lengths stand in one group without conflict."""
    codecs, zero = [_bytes_codec(grid.dtype.itemsize), _CHECKSUM], _ZEROS.get(grid.dtype.kind, 0)
    attributes = {} if torch_dtype is None else {"torch_dtype": torch_dtype}
    names = [f"{name}.{i}" for i in range(len(grid.shape))]
    return _plain(_layout(grid.shape, grid.chunk, grid.dtype), zero, codecs, attributes, names)


def _layout(shape: Sequence[int], chunk: Sequence[int], dtype: np.dtype[Any]) -> Doc:
    chunks = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    return {"shape": list(shape), "data_type": dtype.name, "chunk_grid": chunks}


def _plain(layout: Doc, fill: object, codecs: list[Doc], attributes: Doc, names: list[str]) -> Doc:
    return {
        **layout,
        "chunk_key_encoding": _CHUNK_KEYS[1],
        "fill_value": fill,
        "codecs": codecs,
        "attributes": attributes,
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
        "dimension_names": names,
    }


def _fill(dtype: np.dtype[Any]) -> object:
    """What rows have that are not there, as JSON: NaN, 0 or False."""
    return "NaN" if dtype.kind == "f" else _ZEROS.get(dtype.kind, 0)


def _bytes_codec(itemsize: int) -> Doc:
    return {"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}


def dense_grid(shape: tuple[int, ...], dtype: np.dtype[Any]) -> DenseGrid:
    """Whole where it fits one object, otherwise cut along the first axis."""
    chunk = tuple(max(1, n) for n in shape)
    if shape:
        row_bytes = math.prod(chunk[1:]) * dtype.itemsize
        chunk = (min(chunk[0], max(1, MAX_DENSE_CHUNK_BYTES // row_bytes)), *chunk[1:])
    return DenseGrid(shape, chunk, dtype)


def group_document(attributes: Mapping[str, Any] | None = None) -> Doc:
    """Metadata of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def add_node(nodes: dict[str, Doc], path: str, doc: Doc) -> None:
    """Add a node's metadata by path, after that of the groups above it."""
    for group in parent_groups(path):
        nodes.setdefault(group, group_document())
    nodes[path] = doc


def document_bytes(doc: Doc) -> bytes:
    """A metadata document as it is stored."""
    return dumps(doc)


def parse_rows_document(doc: Doc, what: str) -> tuple[tuple[int, ...], Grid]:
    """(shape, grid) of a sharded array of rows."""
    try:
        shape, shard = _shape_and_chunk(doc, range(1, 3), minimum=1)
        chunk = validate.sizes(_inner(doc)[0], "chunk_shape", 1, [len(shape)])
        itemsize = _NUMBER_TYPES[doc["data_type"]].itemsize
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(
            f"{what}: array metadata is not that of sharded rows in format 2: {error!r}"
        ) from error
    (rows, columns), (shard_rows, shard_columns), (chunk_rows, chunk_columns) = (
        (*sizes, 1)[:2] for sizes in (shape, shard, chunk)
    )
    grid = Grid(rows, columns, chunk_rows, chunk_columns, shard_rows, shard_columns)
    _check_limits(grid, itemsize, what)
    return shape, grid


def _inner(doc: Doc) -> tuple[Any, list[Doc]]:
    """The shape of inner chunks of an array of rows, and the codecs that follow the row codec."""
    (codec,) = doc["codecs"]
    configuration = codec["configuration"]
    if codec["name"] == _ROW_CODEC and configuration.keys() == {"chunk_shape"}:
        return configuration["chunk_shape"], []
    _, *followers, checksum = configuration["codecs"]
    index = [each["name"] for each in configuration["index_codecs"]], configuration["index_location"]
    if (
        codec["name"] != "sharding_indexed"
        or index != (["bytes", "crc32c"], "end")
        or checksum["name"] != "crc32c"
    ):
        raise ValueError("it is no array of shards")
    return configuration["chunk_shape"], followers


def _check_limits(grid: Grid, itemsize: int, what: str) -> None:
    """Refuse a cut by which a reader would hold too much, or walk through too much, at once."""
    chunk = f"{grid.chunk_rows} x {grid.chunk_columns}"
    if (
        grid.shard_rows % grid.chunk_rows
        or grid.shard_columns % grid.chunk_columns
        or grid.chunks_per_shard > MAX_CHUNKS_PER_SHARD
    ):
        raise FormatError(
            f"{what}: shards of {grid.shard_rows} x {grid.shard_columns} do not hold 1 to {MAX_CHUNKS_PER_SHARD} "
            f"chunks of {chunk}"
        )
    # A single row may be larger: it can't be cut further along rows.
    if grid.chunk_rows * grid.chunk_columns * itemsize > MAX_CHUNK_DECODED_BYTES and grid.chunk_rows > 1:
        raise FormatError(f"{what}: a chunk of {chunk} takes more than {MAX_CHUNK_DECODED_BYTES >> 20} MiB")
    if grid.column_chunks > MAX_COLUMN_CHUNKS:
        raise FormatError(f"{what}: chunks of {chunk} cut a row into more than {MAX_COLUMN_CHUNKS} pieces")
    if grid.chunk_rows * max(grid.columns, grid.chunk_columns) * itemsize > MAX_BLOCK_BYTES:
        raise FormatError(
            f"{what}: {grid.chunk_rows} rows of {grid.columns} columns take more than {MAX_BLOCK_BYTES >> 20} MiB"
        )


def parse_compressors(doc: Doc, what: str) -> Compressors:
    """The codecs between the row codec and crc32c of a document that `parse_rows_document` has proven."""
    try:
        return Compressors.of_zarr(_inner(doc)[1])
    except (CodecConfigError, AttributeError) as error:
        raise FormatError(f"{what}: {error}") from error


def parse_dense_document(doc: Doc, what: str) -> DenseGrid:
    """How a dense array is cut. `FormatError` if the document, which `what` names, is not one that format 2 allows."""
    try:
        shape, chunk = _shape_and_chunk(doc, range(MAX_DIMENSIONS + 1), minimum=0)
        dtype = _NUMBER_TYPES[doc["data_type"]]
        names = [codec["name"] for codec in doc["codecs"]]
        endian = doc["codecs"][0].get("configuration", {}).get("endian", "little")
        torch_dtype = doc.get("attributes", {}).get("torch_dtype")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(f"{what}: array metadata is malformed: {error!r}") from error
    whole = tuple(max(1, n) for n in shape)
    if (
        names != ["bytes", "crc32c"]
        or endian != "little"
        or chunk[1:] != whole[1:]
        or chunk[:1] > whole[:1]
        or not (torch_dtype is None or (type(torch_dtype) is str and dtype.kind == "u"))
    ):
        raise FormatError(f"{what}: array metadata is not that of a dense array in format 2")
    return DenseGrid(shape, chunk, dtype, torch_dtype)


def _shape_and_chunk(
    doc: Doc, dimensions: Sequence[int], minimum: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and outer chunk shape of an array whose chunks lie where format 2 says."""
    grid = doc["chunk_grid"]
    if (
        doc["node_type"] != "array"
        or grid["name"] != "regular"
        or doc["chunk_key_encoding"] not in _CHUNK_KEYS
    ):
        raise ValueError("it is no array, or its chunks have other keys")
    shape = validate.sizes(doc["shape"], "shape", minimum, dimensions)
    return shape, validate.sizes(grid["configuration"]["chunk_shape"], "chunk_shape", 1, [len(shape)])
