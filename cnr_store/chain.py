"""The one way to read: composes rows from the links of an array's chain, and reads dense arrays.

An array's chain is the version itself, then its `base`, that one's `base`, and so on to a whole one. The value of
a row is the newest one along the chain, so a walk goes newest first and decodes each row once.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from cnr_backends import (
    ObjectNotFoundError,
    ShardError,
    ShardIndex,
    StorageError,
    check_chunk,
    index_nbytes,
    parse_index,
)
from cnr_codecs import CodecError, Payload, array_dtype, decode_into, parse
from cnr_store.errors import CorruptionError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.arrays import DenseGrid, parse_dense_document, parse_rows_document
from cnr_store.format.grid import Grid
from cnr_store.format.manifest import Part
from cnr_store.format.record import ArrayEntry, Record
from cnr_store.versions import Catalog, read_object

Array = np.ndarray[Any, Any]
REGION_BYTES = 8 << 20
_COALESCED_BYTES = 16 << 20
_GAP_BYTES = 64 << 10
_INDEXES_KEPT = 1024


class Link:
    """The rows of one array that one version wrote."""

    def __init__(self, catalog: Catalog, record: Record, path: str) -> None:
        self._backend = catalog.backend
        self.version = record.id
        self.path = path
        self.entry: ArrayEntry = record.arrays[path]
        self._parts = catalog.manifest(record).parts(path)
        self._indexes: OrderedDict[int, ShardIndex] = OrderedDict()
        self._lock = threading.Lock()
        self.grid: Grid | None = None
        if path in record.nodes:
            shape, self.grid = parse_rows_document(record.nodes[path], f"version {record.id}, {path}")
            if shape != self.entry.shape:
                raise CorruptionError(
                    f"version {record.id}, {path}: shapes {shape} and {self.entry.shape} in one record"
                )
        elif self.entry.rows:
            raise CorruptionError(
                f"version {record.id}, {path}: {self.entry.rows} rows are recorded without metadata"
            )

    def fill(self, first_row: int, out: Array, need: Array) -> None:
        """Decode into `out` the rows that are needed and written here, and clear their `need`.

        Parameters
        ----------
        out
            (n, columns): rows first_row ... first_row + n - 1, in the array's dtype.
        need
            (n,) uint8, non-zero where the row is still to be found.
        """
        grid = self.grid
        last_row = min(first_row + len(out), self.entry.shape[0])
        if grid is None or last_row <= first_row:
            return
        wanted: dict[int, list[tuple[int, int, int]]] = {}
        for row_chunk in range(first_row // grid.chunk_rows, -(-last_row // grid.chunk_rows)):
            begin = row_chunk * grid.chunk_rows - first_row
            if not need[max(begin, 0) : begin + grid.chunk_rows].any():
                continue
            for column_chunk in range(grid.column_chunks):
                shard, slot = grid.locate(row_chunk, column_chunk)
                if shard in self._parts:
                    wanted.setdefault(shard, []).append((slot, row_chunk, column_chunk))
        # Chunks of one row block share the need: all columns of a row are written together.
        found = [need.copy() for _ in range(grid.column_chunks)]
        for shard, chunks in wanted.items():
            for (_, row_chunk, column_chunk), data in self._chunks(shard, chunks):
                self._decode(data, row_chunk, column_chunk, first_row, out, found[column_chunk])
        if any(not np.array_equal(found[0], other) for other in found[1:]):
            raise CorruptionError(
                f"{self._where(first_row, len(out))}: columns of one row were not all written"
            )
        need[:] = found[0]

    def _decode(
        self, data: memoryview, row_chunk: int, column_chunk: int, first_row: int, out: Array, need: Array
    ) -> None:
        grid = self.grid
        assert grid is not None  # chunks come from it
        row, column = row_chunk * grid.chunk_rows, column_chunk * grid.chunk_columns
        try:
            payload = parse(data)
            self._check(payload, row, column)
            width = min(grid.chunk_columns, grid.columns - column)
            if width == payload.dim:
                decode_into(payload, out[:, column : column + width], need, first_row - row)
            else:
                padded = np.empty((len(out), payload.dim), out.dtype)
                hit = need.copy()
                decode_into(payload, padded, need, first_row - row)
                rows = hit != need
                out[rows, column : column + width] = padded[rows, :width]
        except CodecError as error:
            raise CorruptionError(f"{self._where(row, grid.chunk_rows)}: {error}") from error

    def _check(self, payload: Payload, row: int, column: int) -> None:
        grid = self.grid
        assert grid is not None  # chunks come from it
        if payload.seal != layout.seal(self.version, self.path, row, column):
            raise CorruptionError(
                f"{self._where(row, grid.chunk_rows)}: the payload belongs to another place (seal differs)"
            )
        expected = (grid.chunk_rows, grid.chunk_columns, self.entry.element)
        if (payload.rows, payload.dim, payload.element) != expected:
            raise CorruptionError(
                f"{self._where(row, grid.chunk_rows)}: the payload holds {payload.rows} x {payload.dim} "
                f"{payload.element}, the record says {grid.chunk_rows} x {grid.chunk_columns} {self.entry.element}"
            )

    def _chunks(
        self, shard: int, chunks: list[tuple[int, int, int]]
    ) -> Iterator[tuple[tuple[int, int, int], memoryview]]:
        """Payloads of the chunks that a shard holds; neighbours come with one request."""
        index = self._index(shard)
        present = sorted((c for c in chunks if index.present[c[0]]), key=lambda c: int(index.offsets[c[0]]))
        run: list[tuple[int, int, int]] = []
        start = end = 0
        for chunk in present:
            offset, length = int(index.offsets[chunk[0]]), int(index.lengths[chunk[0]])
            if run and (offset - end > _GAP_BYTES or offset + length - start > _COALESCED_BYTES):
                yield from self._run(shard, index, run, start, end)
                run = []
            if not run:
                start = offset
            run.append(chunk)
            end = offset + length
        if run:
            yield from self._run(shard, index, run, start, end)

    def _run(
        self, shard: int, index: ShardIndex, run: list[tuple[int, int, int]], start: int, end: int
    ) -> Iterator[tuple[tuple[int, int, int], memoryview]]:
        key = self._key(shard)
        try:
            data = memoryview(self._backend.get_range(key, start, end - start))
            for chunk in run:
                offset = int(index.offsets[chunk[0]]) - start
                yield chunk, check_chunk(data[offset : offset + int(index.lengths[chunk[0]])])
        except ShardError as error:
            raise CorruptionError(f"{self._where_shard(shard)}: {key}: {error}") from error
        except StorageError as error:
            raise self._storage_error(shard, error) from error
        except ObjectNotFoundError as error:
            raise CorruptionError(f"{self._where_shard(shard)}: {key} is lost") from error

    def _index(self, shard: int) -> ShardIndex:
        with self._lock:
            if shard in self._indexes:
                self._indexes.move_to_end(shard)
                return self._indexes[shard]
        index = self._read_index(shard, self._parts[shard])
        with self._lock:
            self._indexes[shard] = index
            if len(self._indexes) > _INDEXES_KEPT:
                self._indexes.popitem(last=False)
        return index

    def _read_index(self, shard: int, part: Part) -> ShardIndex:
        assert self.grid is not None  # there are parts, so there is metadata
        key, chunks = self._key(shard), self.grid.chunks_per_shard
        try:
            index = parse_index(self._backend.get_suffix(key, index_nbytes(chunks)), chunks, part.nbytes)
        except ShardError as error:
            raise CorruptionError(f"{self._where_shard(shard)}: {key}: {error}") from error
        except StorageError as error:
            raise self._storage_error(shard, error) from error
        except ObjectNotFoundError as error:
            raise CorruptionError(f"{self._where_shard(shard)}: {key} is lost") from error
        if index.crc != part.tail:
            raise CorruptionError(
                f"{self._where_shard(shard)}: {key} is another shard's object (its index differs)"
            )
        return index

    def _storage_error(self, shard: int, error: StorageError) -> Exception:
        """A request that failed because the object is not the size that was committed is a cut object."""
        key = self._key(shard)
        try:
            nbytes = self._backend.size(key)
        except StorageError:
            return error
        if nbytes == self._parts[shard].nbytes:
            return error
        return CorruptionError(
            f"{self._where_shard(shard)}: {key} has {nbytes} bytes, {self._parts[shard].nbytes} were committed"
        )

    def _key(self, shard: int) -> str:
        assert self.grid is not None  # there are shards, so there is metadata
        row, column = divmod(shard, self.grid.shard_grid[1])
        place = f"c/{row}/{column}" if len(self.entry.shape) == 2 else f"c/{row}"
        return layout.version_key(self.version, self.path, place)

    def _where_shard(self, shard: int) -> str:
        assert self.grid is not None  # there are shards, so there is metadata
        return self._where(shard // self.grid.shard_grid[1] * self.grid.shard_rows, self.grid.shard_rows)

    def _where(self, row: int, rows: int) -> str:
        return (
            f"version {self.version}, {self.path}, rows {row} to {min(row + rows, self.entry.shape[0]) - 1}"
        )


class ArrayReader:
    """One array of rows at one version.

    Attributes
    ----------
    shape
        (rows, dim) or (rows,).
    dtype, element
        numpy type of the values; the payload's element type (``bfloat16`` values come as float32).
    links
        The chain, newest first; the last one is whole.
    """

    def __init__(self, catalog: Catalog, record: Record, path: str) -> None:
        self.links = list(_walk(catalog, record, path))
        newest = self.links[0].entry
        self.version, self.path = record.id, path
        self.shape, self.element = newest.shape, newest.element
        self.dtype = array_dtype(newest.element)
        self.columns = (*newest.shape, 1)[1]
        for link in self.links[1:]:
            if link.entry.shape[1:] != self.shape[1:] or link.entry.element != self.element:
                raise CorruptionError(
                    f"version {self.version}, {path}: {self.shape} {self.element} leans on version {link.version}, "
                    f"which has {link.entry.shape} {link.entry.element}"
                )

    def read(self, first_row: int, out: Array) -> Array:
        """Fill `out`, (n, columns) in `dtype`, with rows first_row ... first_row + n - 1.

        Returns
        -------
        (n,) bool: rows that some delta of the chain wrote, that is, which changed since the whole link.

        Raises
        ------
        CorruptionError
            Naming version, array, rows and object. `out` is then undefined.
        """
        need = np.ones(len(out), np.uint8)
        changed = np.zeros(len(out), bool)
        for link in self.links:
            if link.entry.kind == "whole":
                changed = need == 0
            link.fill(first_row, out, need)
            if link.entry.kind != "whole" and not need.any():
                changed[:] = True
                break
        if need.any():
            lost = first_row + int(np.flatnonzero(need)[0])
            raise CorruptionError(
                f"version {self.version}, {self.path}: {int(need.sum())} rows from row {lost} on are in no link "
                f"of its chain ({', '.join(link.version for link in self.links)})"
            )
        return changed

    def regions(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of pieces that cover the array, cut so that no payload is decoded in two of them."""
        chunk = max((link.grid.chunk_rows for link in self.links if link.grid), default=1)
        rows_each = chunk
        while rows_each * self.columns * self.dtype.itemsize < REGION_BYTES:
            rows_each *= 2
        rows = self.shape[0]
        for first_row in range(0, rows, rows_each):
            yield first_row, min(rows_each, rows - first_row)


def _walk(catalog: Catalog, record: Record, path: str) -> Iterator[Link]:
    entry = record.arrays.get(path)
    if entry is None or entry.kind == "dense":
        raise VersionNotFoundError(f"version {record.id} has no array of rows {path}")
    while True:
        yield Link(catalog, record, path)
        if entry.base is None:
            return
        if entry.base >= record.id:
            raise CorruptionError(f"version {record.id}, {path}: leans on {entry.base}, which is not older")
        base = catalog.find_record(entry.base)
        if base is None or path not in base.arrays:
            raise CorruptionError(f"version {record.id}, {path}: its base {entry.base} is lost")
        record, entry = base, base.arrays[path]


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
