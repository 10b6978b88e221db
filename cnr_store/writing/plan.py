"""What one version is to hold: plain data, made on the training thread and written in the background."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cnr_codecs import RowCodec, array_dtype
from cnr_codecs.protocol import Offsets, encode_chunks
from cnr_store.errors import SaveError
from cnr_store.format.arrays import Doc
from cnr_store.format.grid import Counts, Grid, choose_grid, count_blocks
from cnr_store.format.record import ArrayEntry
from cnr_store.format.stored_paths import place
from cnr_store.ranks.placement import Placement
from cnr_store.writing.row_codes import RowCodes

Array = np.ndarray[Any, Any]


class RowSource(Protocol):
    """Where the values of the rows to write come from."""

    def values(self, begin: int, end: int) -> Array:
        """(end - begin, columns), C-contiguous: the rows at positions begin ... end - 1 of the write's ids."""


@runtime_checkable
class EncodedRows(Protocol):
    """Rows that were quantized where they are, in host memory or on their way there."""

    @property
    def codec(self) -> RowCodec:
        """The codec of the rows: that of the write, with the step of a lattice."""

    @property
    def nbytes(self) -> int:
        """The host memory that they take."""

    def payloads(
        self,
        begin: int,
        end: int,
        offsets: Offsets | None,
        edges: Sequence[int],
        rows: int,
        *,
        seals: Sequence[int],
        codes: RowCodes | None = None,
    ) -> list[bytes]:
        """The payloads of chunks, of the rows from `begin` to `end`; the rest as for `ChunksCodec.encode_chunks`.

        Rows on a lattice may be relative by the `codes` of the write.
        """


@dataclass(frozen=True)
class Held:
    """What this rank has of an array that several ranks share."""

    first_row: int  # first_row, rows: the rows
    rows: int
    # First column and number of columns of each part, in the order of the values that the source gives
    columns: tuple[tuple[int, int], ...]
    placement: Placement  # what every rank has
    # (blocks,): the rows written of each `BLOCK_ROWS` rows, whoever has them; None for all
    counts: Counts | None


@dataclass(frozen=True)
class RowsWrite:
    """Rows of one array to write."""

    # path, shape, element: place in the version; (rows, dim) or (rows,); the payload's element type
    path: str
    shape: tuple[int, ...]
    element: str
    base: str | None  # version that the delta applies to; None for a whole array
    # (n,) int64 ascending: the rows written, of those that this rank has; None for all of them
    ids: Array | None
    # source, codec: where their values come from and how they are encoded; or rows that this codec's kernels have
    # quantized, of an array of which this rank has all
    source: RowSource | EncodedRows
    codec: RowCodec
    aliases: tuple[str, ...] = ()  # other names of the same tensor in the model
    boundaries: tuple[int, ...] = ()  # as in `ArrayEntry`
    # What this rank has of the array; None where it has all of it, and no other rank has any
    held: Held | None = None
    # Whether the rows are still in the model, so that training waits until they are encoded
    is_live: bool = False
    codes: RowCodes | None = None  # those of rows that may be relative to the base; None where none may be

    def values(self, begin: int, end: int) -> Array:
        """Those of its source, which must not be encoded."""
        if isinstance(self.source, EncodedRows):
            raise SaveError(f"{self.path}: its rows were quantized on a device, and are needed as they are")
        return self.source.values(begin, end)

    def encode(self, values: Array, begin: int, offsets: Array | None, seal: int) -> bytes:
        """The payload of a chunk.

        `values`: the rows at positions from `begin` on of the write's ids.
        `offsets`, `seal`: as for `RowCodec.encode_rows`.
        """
        rows, element = self.grid.chunk_rows, self.element
        if self.codes is None:
            return self.codec.encode_rows(values, offsets, rows, element=element, seal=seal)
        return self.codes.encode(self.codec, values, begin, offsets, rows, element, seal)

    def encode_chunk(self, begin: int, end: int, offsets: Array | None, seal: int) -> bytes:
        """The payload of a chunk of the rows at these positions of the write's ids; the rest as in `encode`."""
        if isinstance(self.source, EncodedRows):
            edges, rows = [0, end - begin], self.grid.chunk_rows
            return self.source.payloads(begin, end, offsets, edges, rows, seals=[seal], codes=self.codes)[0]
        return self.encode(self.values(begin, end), begin, offsets, seal)

    def encode_chunks(self, begin: int, end: int, firsts: Sequence[int], seals: Sequence[int]) -> list[bytes]:
        """The payloads of chunks that follow one another.

        `begin`, `end`: positions in the write's ids of the first chunk's first row, and behind the last one's last.
        `firsts`, `seals`: position of each chunk's first row, and its seal, as for `RowCodec.encode_rows`.
        """
        rows = self.grid.chunk_rows
        # Chunks begin at multiples of their rows.
        offsets = None if self.ids is None else self.ids[begin:end] % rows
        edges = [*(first - begin for first in firsts), end - begin]
        if isinstance(self.source, EncodedRows):
            return self.source.payloads(begin, end, offsets, edges, rows, seals=seals, codes=self.codes)
        values = self.values(begin, end)
        if self.codes is None or not self.codes.has_codes:
            if self.codes is not None:
                self.codes.note(begin, values)
            return encode_chunks(self.codec, values, offsets, edges, rows, element=self.element, seals=seals)
        return [
            self.encode(
                values[first:last], begin + first, None if offsets is None else offsets[first:last], seal
            )
            for (first, last), seal in zip(pairwise(edges), seals, strict=True)
        ]

    @property
    def columns(self) -> int:
        """Columns of the array."""
        return (*self.shape, 1)[1]

    @property
    def counts(self) -> Counts | None:
        """(blocks,): the rows written of each `BLOCK_ROWS` rows on all ranks; None for all."""
        if self.held is not None:
            return self.held.counts
        return None if self.ids is None else count_blocks(self.ids, self.shape[0])

    @property
    def rows_written(self) -> int:
        """How many rows are written, on all ranks."""
        if self.held is not None:
            return self.shape[0] if self.held.counts is None else int(self.held.counts.sum())
        return self.shape[0] if self.ids is None else len(self.ids)

    @property
    def entry(self) -> ArrayEntry:
        """Its entry in the record, without the number of bytes and where it lies."""
        kind = "whole" if self.base is None else "delta"
        return ArrayEntry(
            *(kind, self.shape, self.element, self.base, self.rows_written, 0),
            *(self.codec.get_config(), self.aliases, self.boundaries),
        )

    @property
    def bytes_per_row(self) -> float:
        """The bytes that a row is expected to take."""
        return self.codec.bytes_per_row(self.columns, self.element)

    @cached_property
    def grid(self) -> Grid:
        """How the array is cut, by the bytes that these rows are expected to take."""
        itemsize = array_dtype(self.element).itemsize
        return choose_grid(self.shape[0], self.columns, itemsize, self.bytes_per_row, self.counts)


class MovedRows(Protocol):
    """A whole array that is stored elsewhere already. Its rows are moved as they are, and not encoded again."""

    @property
    def path(self) -> str:
        """Place in the version."""

    @property
    def entry(self) -> ArrayEntry:
        """Its entry in the record, without the number of bytes."""

    @property
    def grid(self) -> Grid:
        """How it is cut."""

    @property
    def document(self) -> Doc:
        """Its Zarr metadata."""

    def chunks(self, shard: int, seal: Callable[[int], int]) -> list[bytes | None]:
        """The chunks of a shard, by slot; `seal` gives a chunk's by its first row."""


@dataclass(frozen=True)
class DensePiece:
    """A box of a dense array: the others of its dimensions are whole."""

    first_row: int
    first_column: int
    values: Array


@dataclass(frozen=True)
class DenseWrite:
    """A dense array to write whole."""

    path: str  # place in the version
    values: Array  # values, torch_dtype: numpy values, and torch's name of their type where numpy has none
    torch_dtype: str | None = None
    aliases: tuple[str, ...] = ()  # other names of the same tensor in the model
    is_here: bool = True  # whether this rank puts it. Elsewhere only shape and type of the values count.
    is_own: bool = False  # whether no other rank knows of it
    # What this rank has of an array that ranks share, whose values come together at `owner`. None where the values are
    # here.
    pieces: tuple[DensePiece, ...] | None = None
    owner: int = 0  # the rank that puts it, of those that share the plan


@dataclass(frozen=True)
class Plan:
    """All that one version is to hold: plain data, made on the training thread."""

    step: int  # step, metadata: the caller's
    previous: str | None  # version that training continued from, None for the first
    rows: Sequence[RowsWrite]  # rows, moved, dense: arrays to write
    dense: Sequence[DenseWrite]
    state: Any  # as tagged JSON
    policy: Mapping[str, Any]  # the fields of the `Decision` that led to it, for the commit record
    needs: tuple[str, ...] = ()  # every other version that reading this one may touch, newest first
    restores: int = 0  # loads that training has been through
    metadata: Any = None
    moved: Sequence[MovedRows] = ()
    # Paths that the arrays of `previous` lie under, by their plain ones: what `previous` has stays there
    parent_paths: Mapping[str, str] = field(default_factory=dict)
    # By rank, what that one alone has of the state, as tagged JSON: where many ranks save, this one's
    state_parts: Mapping[int, Any] = field(default_factory=dict)
    # Where many ranks save, for the first one: in rank order, the digests of what each of them alone has
    state_sha256: Sequence[str] = ()
    live_bytes: int = 0  # bytes in memory of the rows that are still in the model
    live_threads: int = 1  # threads that training does not need while it waits for these
    # For the commit record, asked as it is made: how long training was held for this save, and all that it took
    seconds: Callable[[], Mapping[str, float]] = dict

    def place(self) -> dict[str, str]:
        """The paths that its arrays will lie under, by their plain ones."""
        writes = (self.rows, self.moved, self.dense)
        return place([write.path for each in writes for write in each], self.parent_paths)

    def digest(self) -> str:
        """What tells it from a plan of another decision: all ranks must write the same rows, cut alike."""
        rows = sorted(
            (write.path, tuple(write.shape), write.element, write.base, write.grid) for write in self.rows
        )
        decided = self.step, self.previous, self.policy.get("full"), self.policy.get("since"), rows
        return hashlib.blake2b(repr(decided).encode(), digest_size=8).hexdigest()
