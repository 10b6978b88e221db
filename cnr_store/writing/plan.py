"""What one version is to hold: plain data, made on the training thread and written in the background."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cnr_codecs import RowCodec, array_dtype
from cnr_codecs.lattice.segments import RowCounts
from cnr_store.errors import SaveError
from cnr_store.format.arrays import Doc
from cnr_store.format.grid import Counts, Grid, choose_grid, count_blocks
from cnr_store.format.layout import place
from cnr_store.format.record import ArrayEntry
from cnr_store.ranks.placement import Placement
from cnr_store.writing.row_codes import Array, Block, CodedRows, RowCodes, Rows, encode_block
from cnr_store.writing.scales import ScaleSample


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
    # source, codec: where they come from and how they are encoded. Where a device codes them by this codec, no rank
    # asks for their values.
    source: Rows
    codec: RowCodec
    aliases: tuple[str, ...] = ()  # other names of the same tensor in the model
    boundaries: tuple[int, ...] = ()  # as in `ArrayEntry`
    # What this rank has of the array; None where it has all of it, and no other rank has any
    held: Held | None = None
    # Whether the rows are still in the model, so that training waits until they are encoded
    is_live: bool = False
    codes: RowCodes | None = None  # those of rows that may be relative to the base; None where none may be
    # How the rows of each chunk on a grid that was encoded here are stored
    counted: list[RowCounts] = field(default_factory=list)
    # Notes how rows compare with the base of the step; None where that is not found by them
    sample: ScaleSample | None = None

    def values(self, begin: int, end: int) -> Array:
        """The values of the rows at these positions of the write's ids, which must not be coded yet."""
        block = self.source.block(begin, end)
        if isinstance(block, CodedRows):
            raise SaveError(f"{self.path}: its rows were quantized on a device, and are needed as they are")
        return block

    def encode(
        self, begin: int, end: int, offsets: Array | None, edges: Sequence[int], seals: Sequence[int]
    ) -> list[bytes]:
        """The payloads of chunks of the rows at these positions of the write's ids; the rest as in `encode_block`."""
        block = self.source.block(begin, end)
        self.note(begin, end, block)
        return encode_block(
            *(self.codec, block, offsets, edges, self.grid.chunk_rows),
            element=self.element,
            seals=seals,
            begin=begin,
            codes=self.codes,
            counted=self.counted,
        )

    def note(self, begin: int, end: int, block: Block) -> None:
        """Note the rows at these positions of the write's ids for `sample`."""
        if self.sample is not None:
            first = 0 if self.held is None else self.held.first_row
            ids = first + np.arange(begin, end) if self.ids is None else self.ids[begin:end]
            self.sample.note(self.codec, block, ids)

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


def placeholder(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """An array of a shape and type that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


@dataclass(frozen=True)
class DensePiece:
    """A box of a dense array."""

    offsets: tuple[int, ...]  # of its first dimensions; 0 in all others
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
    spent: float = 0.0  # per cent of the loss that these cost at most
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
