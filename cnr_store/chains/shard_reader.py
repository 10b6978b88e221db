"""Reads the shards of one array that one version wrote: their indexes, and the bytes of their chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from cnr_backends import (
    Backend,
    ObjectNotFoundError,
    ShardError,
    ShardIndex,
    StorageError,
    check_chunk,
    index_nbytes,
    parse_index,
)
from cnr_store.chains.bounded_cache import BoundedCache
from cnr_store.errors import CorruptionError
from cnr_store.format.grid import Grid
from cnr_store.format.manifest import Part
from cnr_store.format.record import Record

_COALESCED_BYTES = 16 << 20
"""Of one request for several chunks, which are all held until the last of them is decoded."""

_GAP_BYTES = 64 << 10
"""Between two chunks: reading so much for nothing takes less time than another request."""

_INDEXES_KEPT = 1024


class Chunk(NamedTuple):
    """The place of a chunk: its slot in its shard, and its first row and column in the array."""

    slot: int
    row: int
    column: int


class ShardReader:
    """The shards of one array under one record. Thread-safe; indexes are kept once read.

    `grid`: how the array is cut.
    `parts`: the shards that were written, `manifest.Part` by linear index.
    """

    def __init__(
        self, backend: Backend, record: Record, path: str, grid: Grid, parts: Mapping[int, Part]
    ) -> None:
        self._backend, self._record, self._path = backend, record, path
        self.grid, self.parts = grid, parts
        self._indexes: BoundedCache[int, ShardIndex] = BoundedCache(_INDEXES_KEPT)

    @property
    def most_rows(self) -> int:
        """Rows that the shards have room for."""
        return -(-len(self.parts) // self.grid.shard_grid[1]) * self.grid.shard_rows

    def key(self, shard: int) -> str:
        """Key of a shard's object."""
        row, column = divmod(shard, self.grid.shard_grid[1])
        two = len(self._record.arrays[self._path].shape) == 2
        return self._record.key(self._path, f"c/{row}/{column}" if two else f"c/{row}")

    def rows_of(self, shard: int) -> tuple[int, int]:
        """First and last row of a shard, within the array."""
        first_row = shard // self.grid.shard_grid[1] * self.grid.shard_rows
        return first_row, min(first_row + self.grid.shard_rows, self.grid.rows) - 1

    def where(self, first_row: int, last_row: int) -> str:
        """What a message names: the version or fold, the array and its rows, as far as it has them."""
        return f"{self._record.home}, {self._path}, rows {first_row} to {min(last_row, self.grid.rows - 1)}"

    def present(self, shard: int, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those of the chunks that the shard holds, in the order of their bytes."""
        return _present(self._index(shard), chunks)

    def read(self, shard: int, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, memoryview]]:
        """The bytes of the chunks that the shard holds, their checksums proven. Neighbours come with one request."""
        index = self._index(shard)
        for run in _runs(index, _present(index, chunks)):
            start, last = int(index.offsets[run[0].slot]), run[-1].slot
            end = int(index.offsets[last] + index.lengths[last])
            with self._naming(shard) as key:
                data = memoryview(self._backend.get_range(key, start, end - start))
                for chunk in run:
                    offset = int(index.offsets[chunk.slot]) - start
                    yield chunk, check_chunk(data[offset : offset + int(index.lengths[chunk.slot])])

    def read_damaged(self, shard: int, chunk: Chunk) -> bytes | None:
        """The bytes of a chunk whose checksum does not fit them, without it; None if they can't be read."""
        try:
            index = self._index(shard)
            length = int(index.lengths[chunk.slot])
            return self._backend.get_range(self.key(shard), int(index.offsets[chunk.slot]), length)[:-4]
        except (CorruptionError, ObjectNotFoundError, StorageError):
            return None

    def _index(self, shard: int) -> ShardIndex:
        return self._indexes.fetch(shard, lambda: self._read_index(shard))

    def _read_index(self, shard: int) -> ShardIndex:
        part, chunks = self.parts[shard], self.grid.chunks_per_shard
        with self._naming(shard) as key:
            index = parse_index(self._backend.get_suffix(key, index_nbytes(chunks)), chunks, part.nbytes)
        # The manifest knows the index's checksum, so a sound shard of another version is told from this one.
        if index.crc != part.tail:
            raise CorruptionError(
                f"{self._where(shard)}: {key} is another shard's object (its index differs)"
            )
        return index

    @contextmanager
    def _naming(self, shard: int) -> Iterator[str]:
        """Give the key of a shard to read, and turn what goes wrong into errors that name the shard and its rows."""
        key = self.key(shard)
        try:
            yield key
        except ShardError as error:
            raise CorruptionError(f"{self._where(shard)}: {key}: {error}") from error
        except ObjectNotFoundError as error:
            raise CorruptionError(f"{self._where(shard)}: {key} is lost") from error
        except StorageError as error:
            # A cut object ends before the bytes that were asked for. Otherwise the storage may answer later.
            nbytes = committed = self.parts[shard].nbytes
            with suppress(StorageError):
                nbytes = self._backend.size(key)
            if nbytes == committed:
                raise
            raise CorruptionError(
                f"{self._where(shard)}: {key} has {nbytes} bytes, {committed} were committed"
            ) from error

    def _where(self, shard: int) -> str:
        return self.where(*self.rows_of(shard))


def _present(index: ShardIndex, chunks: Iterable[Chunk]) -> list[Chunk]:
    held = (chunk for chunk in chunks if index.present[chunk.slot])
    return sorted(held, key=lambda chunk: int(index.offsets[chunk.slot]))


def _runs(index: ShardIndex, chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks, in the order of their bytes, in groups that one request reads."""
    run: list[Chunk] = []
    start = end = 0
    for chunk in chunks:
        offset, length = int(index.offsets[chunk.slot]), int(index.lengths[chunk.slot])
        if run and (offset - end > _GAP_BYTES or offset + length - start > _COALESCED_BYTES):
            yield run
            run = []
        if not run:
            start = offset
        run.append(chunk)
        end = offset + length
    if run:
        yield run
