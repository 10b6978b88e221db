"""The rows of a fold: moved from the links of a chain into new shards, as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from cnr_backends import Backend, build_shard
from cnr_codecs import (
    CodecConfigError,
    CodecError,
    Compressors,
    Segment,
    array_dtype,
    build_payload,
    merge_segments,
    row_codec,
    split_segments,
)
from cnr_codecs.elements import element_named
from cnr_store.chains.array_reader import REGION_BYTES, ArrayReader
from cnr_store.chains.link import Link
from cnr_store.errors import CorruptionError, FormatError, SaveError
from cnr_store.format.arrays import Doc, rows_document
from cnr_store.format.grid import Grid, choose_grid
from cnr_store.format.layout import RELATIVE
from cnr_store.format.manifest import Part
from cnr_store.format.record import STILL, ArrayEntry, Record

MAX_REGION_BYTES = 2 * REGION_BYTES
"""Of decoded rows. Payloads of sparse links span many rows: the larger a region, the fewer times they are read."""

MAX_REGION_ROWS = 1 << 20
"""Where rows are narrow, row numbers take more memory than values."""


@dataclass(frozen=True)
class FoldedArray:
    """One array of rows of a version as its fold holds it: whole, and with a new grid."""

    reader: ArrayReader  # reads the array's chain
    entry: ArrayEntry  # its entry in the fold's record, without the number of bytes
    # grid, document: how it is cut into chunks; its Zarr metadata, with what follows the row codec of the whole link
    grid: Grid
    document: Doc
    compressors: Compressors  # those that follow the row codec

    @classmethod
    def from_reader(cls, reader: ArrayReader, written: ArrayEntry) -> Self:
        """Prepare the fold of what a `reader` reads, from the array's entry in its version's record."""
        # Of a damaged chain, the whole link may be lost: the oldest one that is left has codecs of the same rows.
        whole = next((link for link in reversed(reader.links) if link.is_written), reader.links[-1])
        config = dict(whole.entry.codec or {})
        if written.move != STILL:
            then = {"then": config["then"]} if "then" in config else {}
            config = {**(written.codec or {}), **then}
        entry = ArrayEntry(
            "whole",
            written.shape,
            written.element,
            rows=written.shape[0],
            codec=config,
            aliases=written.aliases,
            boundaries=written.boundaries,
            stored=written.stored,
            features=frozenset().union(*(link.entry.payload_features for link in reader.links)) - {RELATIVE},
        )
        try:
            compressors = Compressors.of(config.get("then", []))
        except CodecConfigError as error:
            raise FormatError(
                f"{whole.record.home}, {whole.path}: its codec can't be followed: {error}"
            ) from error
        if not whole.is_written:
            raise CorruptionError(f"{whole.record.home}, {whole.path}: it is whole and has no metadata")
        written_links = [link for link in reader.links if link.is_written]
        bytes_per_row = max(_bytes_per_row(link, reader.columns) for link in written_links)
        grid = choose_grid(reader.shape[0], reader.columns, reader.dtype.itemsize, bytes_per_row, None)
        document = rows_document(reader.shape, reader.element, grid, compressors.zarr_codecs())
        return cls(reader, entry, grid, document, compressors)

    @property
    def path(self) -> str:
        return self.reader.path

    @property
    def shards(self) -> int:
        return self.grid.shard_grid[0]

    def put_shard(self, backend: Backend, fold: Record, shard: int) -> Part:
        """Compose one shard and store it under the fold. Raises as `chunks` does."""
        pieces = build_shard(self.chunks(shard, lambda first_row: fold.seal(self.path, first_row, 0)))
        place = f"c/{shard}/0" if len(self.reader.shape) == 2 else f"c/{shard}"
        backend.put(fold.key(self.path, place), pieces)
        return Part(sum(map(len, pieces)), int.from_bytes(bytes(pieces[-1])[-4:], "little"))

    def chunks(self, shard: int, seal: Callable[[int], int]) -> list[bytes | None]:
        """The chunks of a shard, by slot. Memory is that of a shard and of a region of each link.

        `seal`: gives the seal of a chunk by its first row.
        """
        first, chunks = shard * self.grid.shard_rows, self.grid.chunks_per_shard
        payloads = self._payloads(range(first, first + self.grid.shard_rows), seal)
        return [*payloads, *[None] * chunks][:chunks]

    def _payloads(self, shard: range, seal: Callable[[int], int]) -> Iterator[bytes]:
        """The packed payloads of the chunks of these rows, as far as the array reaches."""
        reader, grid = self.reader, self.grid
        end = min(shard.stop, reader.shape[0])
        region_rows = self._region_rows()
        for region in range(shard.start, end, region_rows):
            need = np.zeros(region_rows, np.uint8)
            need[: end - region] = 1
            segments = merge_segments(reader.take(region, need)[0])
            first_rows = range(region, min(region + region_rows, end), grid.chunk_rows)
            chunks = split_segments(segments, grid.chunk_rows)
            for first_row, chunk in zip(first_rows, chunks, strict=False):
                yield self._packed(first_row, chunk, seal(first_row))

    def _packed(self, first_row: int, segments: Sequence[Segment], seal: int) -> bytes:
        element, grid = self.reader.element, self.grid
        data = build_payload(grid.chunk_rows, grid.columns, element_named(element), segments, seal)
        try:
            return self.compressors.pack(data, grid.chunk_rows, grid.columns, element)
        except CodecError as error:
            raise SaveError(
                f"version {self.reader.version}, {self.path}, rows from {first_row} on: {error}"
            ) from error

    def _region_rows(self) -> int:
        """Rows composed at once: several chunks of the fold, so that few payloads of the links are read twice."""
        row_bytes = self.reader.columns * self.reader.dtype.itemsize
        widest = max(link.chunk_rows for link in self.reader.links)
        most = min(self.grid.shard_rows, MAX_REGION_ROWS, MAX_REGION_BYTES // row_bytes)
        rows = self.grid.chunk_rows
        while 2 * rows <= most and (rows < widest or rows * row_bytes < REGION_BYTES):
            rows *= 2
        return rows


def _bytes_per_row(link: Link, columns: int) -> float:
    """As its codec says. Of an unknown codec, what its rows took on average, within bounds."""
    entry = link.entry
    config = {name: value for name, value in (entry.codec or {}).items() if name != "then"}
    try:
        return row_codec(config).bytes_per_row(columns, entry.element)
    except CodecError:
        raw_bytes = columns * array_dtype(entry.element).itemsize
        return min(max(1.0, entry.nbytes / max(entry.rows, 1)), 2.0 * raw_bytes)
