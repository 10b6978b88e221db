"""One link of a chain: the rows of one array that one version wrote, found, fetched, proven and decoded."""

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
from cnr_codecs import (
    CodecError,
    Payload,
    Segment,
    Unpacker,
    array_dtype,
    decode_into,
    most_packed_bytes,
    parse,
    take_rows,
)
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.allocation import allocate
from cnr_store.chains.payload_cache import PayloadCache
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.arrays import parse_rows_document, parse_unpacker
from cnr_store.format.grid import Grid
from cnr_store.format.manifest import Part
from cnr_store.format.record import ArrayEntry, Record

Array = np.ndarray[Any, Any]
_COALESCED_BYTES = 16 << 20
_GAP_BYTES = 64 << 10
_INDEXES_KEPT = 1024


class Link:
    """The rows of one array that one version wrote, or that its fold holds.

    Attributes
    ----------
    version, path, record, entry
        Whose rows they are.
    parts
        Its shards, `manifest.Part` by linear index.
    grid
        How it is cut; None if no row was written.
    """

    def __init__(self, catalog: Catalog, record: Record, path: str) -> None:
        self._backend = catalog.backend
        self.version = record.id
        self.record = record
        self.path = path
        self.entry: ArrayEntry = record.arrays[path]
        self.parts = catalog.manifest(record).parts(path)
        self._indexes: OrderedDict[int, ShardIndex] = OrderedDict()
        self._reading: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self.grid: Grid | None = None
        self.kept: PayloadCache | None = None
        self._unpacker = Unpacker()
        if path in record.nodes:
            shape, self.grid = parse_rows_document(record.nodes[path], f"{record.home}, {path}")
            if shape != self.entry.shape:
                raise CorruptionError(
                    f"{record.home}, {path}: shapes {shape} and {self.entry.shape} in one record"
                )
            self._unpacker = parse_unpacker(record.nodes[path], f"{record.home}, {path}")
            self._check_document(record.nodes[path]["data_type"], self.grid)
        if self.entry.rows > self.most_rows:
            raise CorruptionError(
                f"{record.home}, {path}: {self.entry.rows} rows are recorded, its metadata and manifest know "
                f"objects for {self.most_rows}"
            )

    def _check_document(self, data_type: str, grid: Grid) -> None:
        where = f"{self.record.home}, {self.path}"
        if data_type != array_dtype(self.entry.element).name:
            raise CorruptionError(f"{where}: types {data_type} and {self.entry.element} in one record")
        if any(shard >= math.prod(grid.shard_grid) for shard in self.parts):
            raise CorruptionError(f"{where}: the manifest lists shards beyond {grid.shard_grid}")

    @property
    def most_rows(self) -> int:
        """Rows that its shards have room for."""
        if self.grid is None:
            return 0
        return -(-len(self.parts) // self.grid.shard_grid[1]) * self.grid.shard_rows

    def key(self, shard: int) -> str:
        """Key of a shard's object, for a shard of `parts`."""
        assert self.grid is not None  # there are shards, so there is metadata
        row, column = divmod(shard, self.grid.shard_grid[1])
        place = f"c/{row}/{column}" if len(self.entry.shape) == 2 else f"c/{row}"
        return self.record.key(self.path, place)

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
        wanted = self._wanted(first_row, need)
        if grid is None or not wanted:
            return
        # Chunks of one row block share the need: all columns of a row are written together.
        found = [need.copy() for _ in range(grid.column_chunks)]
        for shard, chunks in wanted.items():
            for (_, row_chunk, column_chunk), payload in self._payloads(shard, chunks):
                self._decode(payload, row_chunk, column_chunk, first_row, out, found[column_chunk])
        if any(not np.array_equal(found[0], other) for other in found[1:]):
            raise CorruptionError(
                f"{self._where(first_row, len(out))}: columns of one row were not all written"
            )
        need[:] = found[0]

    def take(self, first_row: int, need: Array) -> list[Segment]:
        """The rows that are needed and written here, as they are stored; clears their `need`.

        Parameters
        ----------
        need
            (n,) uint8, non-zero where one of rows first_row ... first_row + n - 1 is still to be found.

        Returns
        -------
        Segments of a chunk of those n rows.

        Raises
        ------
        FormatError
            Chunks of this link are not as wide as the array.
        """
        wanted, grid = self._wanted(first_row, need), self.grid
        if grid is not None and grid.chunk_columns != grid.columns:
            raise FormatError(
                f"{self._where(first_row, len(need))}: chunks of {grid.chunk_columns} columns for {grid.columns}; "
                "only rows in one piece can be moved as they are stored"
            )
        segments: list[Segment] = []
        for shard, chunks in wanted.items():
            for (_, row_chunk, _), data in self._chunks(shard, chunks):
                row = row_chunk * (grid.chunk_rows if grid else 0)
                segments += take_rows(self._payload(data, row, 0), need, first_row - row)
        return segments

    def _wanted(self, first_row: int, need: Array) -> dict[int, list[tuple[int, int, int]]]:
        """(slot in the shard, row chunk, column chunk) by shard of all chunks that may hold rows needed."""
        grid = self.grid
        last_row = min(first_row + len(need), self.entry.shape[0])
        wanted: dict[int, list[tuple[int, int, int]]] = {}
        if grid is None or last_row <= first_row:
            return wanted
        for row_chunk in range(first_row // grid.chunk_rows, -(-last_row // grid.chunk_rows)):
            begin = row_chunk * grid.chunk_rows - first_row
            if not need[max(begin, 0) : begin + grid.chunk_rows].any():
                continue
            for column_chunk in range(grid.column_chunks):
                shard, slot = grid.locate(row_chunk, column_chunk)
                if shard in self.parts:
                    wanted.setdefault(shard, []).append((slot, row_chunk, column_chunk))
        return wanted

    def _decode(
        self, payload: Payload, row_chunk: int, column_chunk: int, first_row: int, out: Array, need: Array
    ) -> None:
        grid = self.grid
        assert grid is not None  # chunks come from it
        row, column = row_chunk * grid.chunk_rows, column_chunk * grid.chunk_columns
        try:
            begin, end = max(row - first_row, 0), min(row + grid.chunk_rows - first_row, len(out))
            width, skipped = min(grid.chunk_columns, grid.columns - column), first_row + begin - row
            target, wanted = out[begin:end, column : column + width], need[begin:end]
            if width == payload.dim:
                decode_into(payload, target, wanted, skipped)
            else:
                padded = allocate((end - begin, payload.dim), out.dtype, self._where(row, grid.chunk_rows))
                before = wanted.copy()
                decode_into(payload, padded, wanted, skipped)
                rows = before != wanted
                target[rows] = padded[rows, :width]
        except CodecError as error:
            raise CorruptionError(f"{self._where(row, grid.chunk_rows)}: {error}") from error

    def _payloads(
        self, shard: int, chunks: list[tuple[int, int, int]]
    ) -> Iterator[tuple[tuple[int, int, int], Payload]]:
        """Proved payloads of the chunks that a shard holds."""
        kept, key = self.kept, self.key(shard)
        missing = chunks
        if kept is not None:
            known = [(chunk, kept.get((key, chunk[0]))) for chunk in chunks]
            yield from ((chunk, payload) for chunk, payload in known if payload is not None)
            missing = [chunk for chunk, payload in known if payload is None]
        if kept is not None and len(missing) == 1:
            with kept.fetching((key, missing[0][0])):
                payload = kept.get((key, missing[0][0]))
                found = [(missing[0], payload)] if payload is not None else [*self._fetched(shard, missing)]
            yield from found
        elif missing:
            yield from self._fetched(shard, missing)

    def _fetched(
        self, shard: int, chunks: list[tuple[int, int, int]]
    ) -> Iterator[tuple[tuple[int, int, int], Payload]]:
        grid, kept, key = self.grid, self.kept, self.key(shard)
        assert grid is not None  # chunks come from it
        for chunk, data in self._chunks(shard, chunks):
            _, row_chunk, column_chunk = chunk
            # What is kept must not hold on to all that came with one request.
            own = data if kept is None or len(chunks) == 1 else memoryview(bytes(data))
            payload = self._payload(own, row_chunk * grid.chunk_rows, column_chunk * grid.chunk_columns)
            if kept is not None:
                kept.put((key, chunk[0]), payload)
            yield chunk, payload

    def _payload(self, data: memoryview, row: int, column: int) -> Payload:
        """The payload of the chunk that begins there, proved to be that one's."""
        grid = self.grid
        assert grid is not None  # chunks come from it
        try:
            max_bytes = most_packed_bytes(grid.chunk_rows, grid.chunk_columns, self.entry.element)
            payload = parse(self._unpacker.unpack(data, max_bytes))
        except CodecError as error:
            raise CorruptionError(f"{self._where(row, grid.chunk_rows)}: {error}") from error
        if payload.seal != self.record.seal(self.path, row, column):
            raise CorruptionError(
                f"{self._where(row, grid.chunk_rows)}: the payload belongs to another place (seal differs)"
            )
        expected = (grid.chunk_rows, grid.chunk_columns, self.entry.element)
        if (payload.rows, payload.dim, payload.element) != expected:
            raise CorruptionError(
                f"{self._where(row, grid.chunk_rows)}: the payload holds {payload.rows} x {payload.dim} "
                f"{payload.element}, the record says {grid.chunk_rows} x {grid.chunk_columns} {self.entry.element}"
            )
        return payload

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
        key = self.key(shard)
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
        index = self._known_index(shard)
        if index is not None:
            return index
        with self._lock:
            reading = self._reading.setdefault(shard, threading.Lock())
        with reading:  # others who want the same index wait for it
            index = self._known_index(shard)
            if index is None:
                index = self._read_index(shard, self.parts[shard])
                with self._lock:
                    self._indexes[shard] = index
                    self._reading.pop(shard, None)
                    if len(self._indexes) > _INDEXES_KEPT:
                        self._indexes.popitem(last=False)
        return index

    def _known_index(self, shard: int) -> ShardIndex | None:
        with self._lock:
            index = self._indexes.get(shard)
            if index is not None:
                self._indexes.move_to_end(shard)
            return index

    def _read_index(self, shard: int, part: Part) -> ShardIndex:
        assert self.grid is not None  # there are parts, so there is metadata
        key, chunks = self.key(shard), self.grid.chunks_per_shard
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
        key = self.key(shard)
        try:
            nbytes = self._backend.size(key)
        except StorageError:
            return error
        if nbytes == self.parts[shard].nbytes:
            return error
        return CorruptionError(
            f"{self._where_shard(shard)}: {key} has {nbytes} bytes, {self.parts[shard].nbytes} were committed"
        )

    def _where_shard(self, shard: int) -> str:
        assert self.grid is not None  # there are shards, so there is metadata
        return self._where(shard // self.grid.shard_grid[1] * self.grid.shard_rows, self.grid.shard_rows)

    def _where(self, row: int, rows: int) -> str:
        return f"{self.record.home}, {self.path}, rows {row} to {min(row + rows, self.entry.shape[0]) - 1}"
