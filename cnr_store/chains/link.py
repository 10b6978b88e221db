"""One link of a chain: the rows of one array that one version wrote, or that its fold holds.

`open_link` finds it. It finds rows in its shards, proves that a payload is the one of its place, and decodes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial

import numpy as np

from cnr_codecs import (
    CodecError,
    Compressors,
    ParentError,
    Payload,
    Pending,
    Scheme,
    Segment,
    UnsupportedPayloadError,
    array_dtype,
    decode_into,
    most_packed_bytes,
    parse,
    rows_written,
    take_rows,
)
from cnr_codecs.payload.coded import Grid as ValueGrid
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.allocation import Array, allocate
from cnr_store.chains.bounded_cache import PayloadCache
from cnr_store.chains.shard_reader import Chunk, ShardReader
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.arrays import parse_compressors, parse_rows_document
from cnr_store.format.grid import Grid
from cnr_store.format.layout import RELATIVE
from cnr_store.format.record import ArrayEntry, Move, Record

PENDING = 2
"""Of `need`: the row is relative in a newer link, and waits for its codes."""
_Visit = Callable[[Chunk, Payload, Array], None]
"""Takes the rows needed from a proven payload, and clears their `need`."""


class CompositionError(CorruptionError):
    """Rows that are relative do not fit what lies beneath them."""


class Strays:
    """Finds which rows are not stored as codes of one grid. Values don't tell: those of others may lie on it.

    `grid`: that one, where it is in the version that is read.
    `rows`: (n,) uint8: gets `RAW` for raw rows, which no grid moves, and `OTHER` for codes of others.
    """

    RAW, OTHER = 1, 2

    def __init__(self, grid: ValueGrid, rows: Array) -> None:
        self.grid, self.rows = grid, rows

    def note(
        self, first_row: int, link: Link, decode: _Visit, chunk: Chunk, payload: Payload, need: Array
    ) -> None:
        """Have the rows needed of a payload decoded, and note which of them are strays."""
        before = need.copy()
        decode(chunk, payload, need)
        for segment in payload.at(*link.move).segments:
            if segment.scheme not in (Scheme.LATTICE, Scheme.RELATIVE) or segment.grid != self.grid:
                kind = self.RAW if segment.scheme is Scheme.RAW else self.OTHER
                for _, places in segment.row_set.placed(first_row - chunk.row, len(need)):
                    self.rows[places[before[places] != 0]] = kind


class Link:
    """A version, or its fold, in the chain of an array.

    `shards`: what reads its objects.
    `compressors`: what follows the row codec.
    `payloads`: keeps what `fill` has proven for whoever reads the same chunk next; None to keep nothing.
    `decoding`: bounds the threads that decode at once.

    `version`, `record`, `path`, `entry`: whose rows they are.
    `is_written`: whether it has rows at all.
    `parts`: the objects that hold them, `manifest.Part` by linear index of the shard.
    `most_rows`: rows that these have room for.
    `grid`, `chunk_rows`: how the array is cut here; rows of a chunk.
    `move`: where floating grids have moved to in the version that is read; at first in the link's own.
    """

    def __init__(
        self,
        record: Record,
        path: str,
        shards: ShardReader,
        compressors: Compressors | None,
        payloads: PayloadCache | None = None,
        decoding: AbstractContextManager[object] | None = None,
    ) -> None:
        self.version, self.record, self.path = record.id, record, path
        self.entry: ArrayEntry = record.arrays[path]
        self.move, self.is_written = self.entry.move, compressors is not None
        self.shards, self.grid, self.parts = shards, shards.grid, shards.parts
        self.most_rows, self.chunk_rows = shards.most_rows, shards.grid.chunk_rows
        self._compressors, self._payloads = compressors or Compressors.of([]), payloads
        self._decoding = decoding or nullcontext()
        is_wide = shards.grid.chunk_columns == shards.grid.columns
        self._may_be_relative = is_wide and self.entry.kind == "delta" and RELATIVE in record.requires

    def at(self, move: Move) -> Link:
        """The same link, to be read for a version in which floating grids have moved there."""
        link = copy(self)
        link.move = move
        return link

    def fill(
        self,
        first_row: int,
        out: Array,
        need: Array,
        pending: Pending | None = None,
        *,
        strays: Strays | None = None,
        lost: Array | None = None,
    ) -> None:
        """Decode into `out` the rows that are needed and written here, and clear their `need`.

        `out`: (n, columns): rows first_row ... first_row + n - 1, in the array's dtype.
        `need`: (n,) uint8, 1 where the row is still to be found; relative rows become `PENDING`, and stay until their
        codes are found.
        `pending`: adds up the n rows that are relative. None where no row may be.
        `strays`: gets those of the rows that are not codes of its grid.
        `lost`: (n,) bool. Without it, damage is raised. With it, what is damaged or lost is passed over: the rows
        needed that may be written here and can't be read are marked, and stay needed. Just those that are written here
        where their payloads still prove which these are, else all rows of a chunk. What is pending of them is
        undefined.
        """
        decode: _Visit = partial(self._decode, first_row, out, pending)
        if strays is not None:
            decode = partial(strays.note, first_row, self, decode)
        self._visit(first_row, need, decode, lost)

    def take(
        self, first_row: int, need: Array, pending: Pending | None = None, *, lost: Array | None = None
    ) -> list[Segment]:
        """The rows that are needed and written here, as they are stored; clears their `need`.

        `need`, `pending`, `lost`: as for `fill`.

        Returns: Segments of a chunk of those n rows.
        """
        segments: list[Segment] = []
        if self.grid.chunk_columns != self.grid.columns:
            raise FormatError(
                f"{self.shards.where(first_row, first_row + len(need) - 1)}: chunks of {self.grid.chunk_columns} "
                f"columns for {self.grid.columns}; only rows in one piece can be moved as they are stored"
            )
        self._visit(first_row, need, partial(self._take, first_row, segments, pending), lost)
        return segments

    def _visit(self, first_row: int, need: Array, visit: _Visit, lost: Array | None) -> None:
        """Give each payload that may hold rows needed to `visit`."""
        wanted = self._wanted(first_row, need)
        if lost is not None:
            self._visit_sound(wanted, first_row, need, visit, lost)
            return
        if not wanted:
            return
        # One `need` for each column of chunks: every column of a row that is written is written, so they end alike.
        needs = [need.copy() for _ in range(self.grid.column_chunks)]
        for shard, chunks in wanted.items():
            # Bytes; or, where payloads are kept, these, proven to be that chunk's.
            read: Iterator[tuple[Chunk, memoryview | Payload]]
            if self._payloads is None:
                read = self.shards.read(shard, chunks)
            else:
                read = self._kept(shard, chunks, self._payloads)
            for chunk, found in read:
                with self._decoding:
                    payload = found if isinstance(found, Payload) else self._prove(chunk, found)
                    visit(chunk, payload, needs[chunk.column // self.grid.chunk_columns])
        if any(not np.array_equal(needs[0], other) for other in needs[1:]):
            raise CorruptionError(
                f"{self.shards.where(first_row, first_row + len(need) - 1)}: columns of one row were not all written"
            )
        need[:] = needs[0]

    def _wanted(self, first_row: int, need: Array) -> dict[int, list[Chunk]]:
        """By shard, all chunks that may hold rows needed."""
        grid = self.grid
        last_row = min(first_row + len(need), grid.rows)
        wanted: dict[int, list[Chunk]] = {}
        if last_row <= first_row:
            return wanted
        for row_chunk in range(first_row // grid.chunk_rows, -(-last_row // grid.chunk_rows)):
            row = row_chunk * grid.chunk_rows
            begin = row - first_row
            if not need[max(begin, 0) : begin + grid.chunk_rows].any():
                continue
            for column_chunk in range(grid.column_chunks):
                shard, slot = grid.locate(row_chunk, column_chunk)
                if shard in self.parts:
                    chunk = Chunk(slot, row, column_chunk * grid.chunk_columns)
                    wanted.setdefault(shard, []).append(chunk)
        return wanted

    def _kept(
        self, shard: int, chunks: Iterable[Chunk], cache: PayloadCache
    ) -> Iterator[tuple[Chunk, Payload]]:
        key = self.shards.key(shard)
        missing = []
        for chunk in chunks:
            payload = cache.get((key, chunk.slot))
            if payload is None:
                missing.append(chunk)
            else:
                yield chunk, payload
        missing = self.shards.present(shard, missing) if missing else []
        if len(missing) == 1:  # many readers want the same one at once: that chunk spans many of theirs
            read = self.shards.read(shard, missing)
            yield missing[0], cache.fetch((key, missing[0].slot), lambda: self._prove(*next(read)))
        elif missing:
            for chunk, data in self.shards.read(shard, missing):
                # Copied: what is kept must not hold on to all that came with one request.
                payload = self._prove(chunk, memoryview(bytes(data)))
                cache.put((key, chunk.slot), payload)
                yield chunk, payload

    def _visit_sound(
        self, wanted: dict[int, list[Chunk]], first_row: int, need: Array, visit: _Visit, lost: Array
    ) -> None:
        """Give each payload that is sound to `visit`, which changes a `need`. Marks the rows of the others."""
        by_row: dict[int, list[tuple[int, Chunk]]] = {}
        for shard, chunks in wanted.items():
            for chunk in chunks:
                by_row.setdefault(chunk.row, []).append((shard, chunk))
        for places in by_row.values():
            sound: list[Array] = []
            damaged: list[Array] = []
            left = need
            for shard, chunk in places:
                found, is_sound = self._visit_chunk(shard, chunk, first_row, need, visit)
                if is_sound:
                    left = found
                    sound.append(found != need)
                else:
                    damaged.append(found)
            # Every column of a row that is written is written, so one sound chunk tells the rows of those beside it.
            any_written = np.logical_or.reduce(sound) if sound else np.logical_and.reduce(damaged)
            if damaged or not np.logical_and.reduce(sound)[any_written].all():
                lost |= any_written
            else:
                need[any_written] = left[any_written]

    def _visit_chunk(
        self, shard: int, chunk: Chunk, first_row: int, need: Array, visit: _Visit
    ) -> tuple[Array, bool]:
        """What is needed once `visit` has had the payload of a sound chunk; else the rows it may hold, and False."""
        still = need.copy()
        try:
            for _, data in self.shards.read(shard, [chunk]):
                visit(chunk, self._prove(chunk, data), still)
            return still, True
        except CorruptionError:
            return self._may_hold(shard, chunk, range(first_row, first_row + len(need))) & (need != 0), False

    def _may_hold(self, shard: int, chunk: Chunk, rows: range) -> Array:
        """(len(rows),) bool: which of these rows a damaged chunk may hold.

        Just those that were written, where its payload still proves which these are; else all of the chunk.
        """
        offsets = self._proven_offsets(shard, chunk)
        held = np.full(self.chunk_rows, offsets is None)
        if offsets is not None:
            held[offsets] = True
        may_hold = np.zeros(len(rows), bool)
        begin, end = max(chunk.row, rows.start), min(chunk.row + len(held), rows.stop)
        may_hold[begin - rows.start : end - rows.start] = held[begin - chunk.row : end - chunk.row]
        return may_hold

    def _proven_offsets(self, shard: int, chunk: Chunk) -> Array | None:
        data = self.shards.read_damaged(shard, chunk)
        if data is None:
            return None
        most = most_packed_bytes(self.chunk_rows, self.grid.chunk_columns, self.entry.element)
        try:
            payload = self._compressors.unpack(data, most)
            offsets = rows_written(payload, seal=self.record.seal(self.path, chunk.row, chunk.column))
        except CodecError:
            return None
        return offsets if len(offsets) and offsets[-1] < self.chunk_rows else None

    def _prove(self, chunk: Chunk, data: memoryview) -> Payload:
        """The payload in the bytes of a chunk, which must say that it is that chunk's."""
        grid, element = self.grid, self.entry.element
        with self._naming(chunk):
            max_bytes = most_packed_bytes(grid.chunk_rows, grid.chunk_columns, element)
            payload = parse(self._compressors.unpack(data, max_bytes))
        if payload.seal != self.record.seal(self.path, chunk.row, chunk.column):
            raise CorruptionError(
                f"{self._where(chunk)}: the payload belongs to another place (seal differs)"
            )
        if (payload.rows, payload.dim, payload.element) != (grid.chunk_rows, grid.chunk_columns, element):
            raise CorruptionError(
                f"{self._where(chunk)}: the payload holds {payload.rows} x {payload.dim} {payload.element}, the "
                f"record says {grid.chunk_rows} x {grid.chunk_columns} {element}"
            )
        _check_grids(payload, self.entry.move, self._where(chunk))
        if any(each.scheme is Scheme.RELATIVE for each in payload.segments) and not self._may_be_relative:
            raise CorruptionError(
                f"{self._where(chunk)}: the payload has rows relative to older ones, which whole arrays, chunks of "
                f"some columns, and versions that do not require {RELATIVE!r} must not have"
            )
        return payload

    def _take(
        self,
        first_row: int,
        segments: list[Segment],
        pending: Pending | None,
        chunk: Chunk,
        payload: Payload,
        need: Array,
    ) -> None:
        part = None if pending is None else pending.part(0, 0, self._where(chunk))
        with self._naming(chunk):
            segments += take_rows(payload.at(*self.move), need, first_row - chunk.row, part)

    def _decode(
        self,
        first_row: int,
        out: Array,
        pending: Pending | None,
        chunk: Chunk,
        payload: Payload,
        need: Array,
    ) -> None:
        begin, end = max(chunk.row - first_row, 0), min(chunk.row + payload.rows - first_row, len(out))
        width, skipped = min(payload.dim, self.grid.columns - chunk.column), first_row + begin - chunk.row
        target, wanted = out[begin:end, chunk.column : chunk.column + width], need[begin:end]
        part = None if pending is None else pending.part(begin, chunk.column, self._where(chunk))
        with self._naming(chunk):
            payload = payload.at(*self.move)
            if width == payload.dim:
                decode_into(payload, target, wanted, skipped, part)
                return
            # A chunk at the right edge is stored in its full width.
            padded = allocate((end - begin, payload.dim), out.dtype, self._where(chunk))
            before = wanted.copy()
            if part is not None:
                part = part.widened(end - begin, width, payload.dim)
            decode_into(payload, padded, wanted, skipped, part)
        rows = before != wanted
        target[rows] = padded[rows, :width]
        if pending is not None and part is not None and pending.values is None:
            pending.sums[begin:end, chunk.column : chunk.column + width] = part.sums[:, :width]

    @contextmanager
    def _naming(self, chunk: Chunk) -> Iterator[None]:
        """Turn what is wrong with a payload into errors that name its rows."""
        try:
            yield
        except ParentError as error:
            raise CompositionError(f"{self._where(chunk)}: {error}") from error
        except UnsupportedPayloadError as error:
            raise FormatError(f"{self._where(chunk)}: {error}") from error
        except CodecError as error:
            raise CorruptionError(f"{self._where(chunk)}: {error}") from error

    def _where(self, chunk: Chunk) -> str:
        return self.shards.where(chunk.row, chunk.row + self.grid.chunk_rows - 1)


def _check_grids(payload: Payload, move: Move, where: str) -> None:
    """Check that floating grids have moved to where the record says."""
    for each in payload.segments:
        if each.coded is not None and each.grid != each.grid.at(*move):
            raise CorruptionError(f"{where}: the payload has {each.grid}, and the record says {move}")


def empty_link(catalog: Catalog, record: Record, path: str) -> Link:
    """The link of a version that wrote no row of an array."""
    rows, columns = (*record.arrays[path].shape, 1)[:2]
    grid = Grid(rows, columns, 1, columns, 1, columns)  # of chunks that are nowhere
    return Link(record, path, ShardReader(catalog.backend, record, path, grid, {}), None)


def open_link(catalog: Catalog, record: Record, path: str, payloads: PayloadCache | None = None) -> Link:
    """The link of an array of rows under a record, which may be a fold's.

    `payloads`: see `Link`.
    """
    # All that readers rely on is proven here, before an object is read or memory is taken for its rows.
    where, entry, parts = f"{record.home}, {path}", record.arrays[path], catalog.manifest(record).parts(path)
    link = empty_link(catalog, record, path)
    if path in record.nodes:
        document = record.nodes[path]
        shape, grid = parse_rows_document(document, where)
        if shape != entry.shape:
            raise CorruptionError(f"{where}: shapes {shape} and {entry.shape} in one record")
        compressors = parse_compressors(document, where)
        if document["data_type"] != array_dtype(entry.element).name:
            raise CorruptionError(f"{where}: types {document['data_type']} and {entry.element} in one record")
        if any(shard >= math.prod(grid.shard_grid) for shard in parts):
            raise CorruptionError(f"{where}: the manifest lists shards beyond {grid.shard_grid}")
        shards = ShardReader(catalog.backend, record, path, grid, parts)
        link = Link(record, path, shards, compressors, payloads, catalog.decoding)
    if entry.rows > link.most_rows:
        raise CorruptionError(
            f"{where}: {entry.rows} rows are recorded, its metadata and manifest know objects for {link.most_rows}"
        )
    return link
