"""Which rank puts which shard, and how the rows of a shard come together there from the ranks that hold them.

Grids, keys and row sets do not depend on ranks, so a shard may hold rows of several ranks, and a chunk, too. Each shard
has one owner, computed alike on all ranks. A chunk whose rows one rank holds whole travels encoded. So do some rows of
a chunk, if its codec encodes each row by itself: the owner then moves codes. All other rows and columns travel as they
are, and the owner encodes them. In either case the codes are those that one process would write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cnr_codecs import (
    FloatingRows,
    LatticeRows,
    LosslessRows,
    RowCodec,
    UniformRows,
    array_dtype,
    build_payload,
    merge_segments,
    parse,
)
from cnr_codecs.elements import element_named
from cnr_store.errors import SaveError
from cnr_store.format.grid import Grid, rows_in
from cnr_store.ranks.fragments import BytesLike, EncodedChunk, Fragment, RawRows, pack, unpack
from cnr_store.ranks.owners import Share, assign, supplier
from cnr_store.ranks.protocol import Team
from cnr_store.writing.plan import DenseWrite, Held, RowsWrite
from cnr_store.writing.row_codes import Array, encode_block

ROUND_BYTES = 16 << 20
"""Encoded bytes of a round for each rank. Whatever is exchanged in it is in memory at once."""


@dataclass(frozen=True)
class _Shard:
    """A shard whose rows several ranks supply."""

    write: int
    shard: int
    owner: int
    nbytes: float
    suppliers: frozenset[int]


@dataclass(frozen=True)
class Routes:
    """Who writes each shard of a version, the same on all ranks."""

    # By path, int32 (shards,): the rank that has a shard whole and writes it; -1 for any other shard
    local: Mapping[str, Array]
    shared: Sequence[_Shard]  # all others


def find_routes(writes: Sequence[tuple[RowsWrite, Grid]], world: int) -> Routes:
    """Tell the shards that their owners hold whole from those that ranks share.

    `writes`: as for `Exchange`, by path.
    `world`: how many ranks there are.
    """
    shares = [_share(rows, grid) for rows, grid in writes]
    local, shared = dict[str, Array](), list[_Shard]()
    for number, (share, owners) in enumerate(zip(shares, assign(shares, world), strict=True)):
        whole = local[writes[number][0].path] = owners.copy()
        for shard in np.flatnonzero(owners >= 0).tolist():
            owner, first = int(owners[shard]), shard * share.shard_rows
            suppliers = frozenset(
                supplier(span.ranks, owner, shard)
                for band in share.placement.overlapping(first, first + share.shard_rows)
                for span in band.spans
            )
            if suppliers != {owner}:
                whole[shard] = -1
                shared.append(_Shard(number, shard, owner, float(share.shard_bytes[shard]), suppliers))
    return Routes(local, shared)


Assembled = tuple[RowsWrite, int, Sequence[BytesLike | None]]
"""A shard at its owner: the write, the shard's number, and its chunks by slot."""


class Exchange:
    """The shared shards of one version.

    `team`: this rank and the others.
    `writes`: those that ranks share, each with how it is cut. All ranks have the same, in any order.
    `seal`: gives a chunk's seal by its array's path and its first row.
    """

    def __init__(
        self, team: Team, writes: Sequence[tuple[RowsWrite, Grid]], seal: Callable[[str, int], int]
    ) -> None:
        self._team, self._seal = team, seal
        self._writes = sorted(writes, key=lambda each: each[0].path)
        self._routes = find_routes(self._writes, team.world)

    def local_shards(self, path: str) -> list[int]:
        """The shards of an array that this rank writes from its own rows alone."""
        shards: list[int] = np.flatnonzero(self._routes.local[path] == self._team.rank).tolist()
        return shards

    def run(self) -> Iterator[Assembled]:
        """Exchange rows with the other ranks, and yield the shards that this one puts."""
        for together in self._rounds():
            yield from self._run_round(together)

    def _rounds(self) -> Iterator[list[_Shard]]:
        together, nbytes = list[_Shard](), 0.0
        for shard in self._routes.shared:
            if together and nbytes + shard.nbytes > ROUND_BYTES * self._team.world:
                yield together
                together, nbytes = [], 0.0
            together.append(shard)
            nbytes += shard.nbytes
        if together:
            yield together

    def _run_round(self, together: Sequence[_Shard]) -> Iterator[Assembled]:
        me = self._team.rank
        sent: dict[int, list[Fragment]] = {}
        expected: set[int] = set()
        for shard in together:
            if me in shard.suppliers:
                sent.setdefault(shard.owner, []).extend(self._fragments(shard))
            if shard.owner == me:
                expected |= shard.suppliers - {me}
        own = sent.pop(me, [])
        received = self._team.exchange(
            {rank: pack(fragments) for rank, fragments in sent.items()}, sorted(expected)
        )
        by_shard: dict[tuple[int, int], list[Fragment]] = {}
        for rank, data in (*received.items(), (me, None)):
            for fragment in own if data is None else _unpacked(data, rank):
                by_shard.setdefault((fragment.write, fragment.shard), []).append(fragment)
        for shard in together:
            if shard.owner == me:
                fragments = by_shard.pop((shard.write, shard.shard), [])
                if fragments:
                    rows, grid = self._writes[shard.write]
                    yield rows, shard.shard, self._assemble(rows, grid, shard.shard, fragments)

    def _fragments(self, shard: _Shard) -> Iterator[Fragment]:
        """What this rank supplies of a shard."""
        rows, grid = self._writes[shard.write]
        held = _held(rows)
        first = shard.shard * grid.shard_rows
        # Of thousands of ranks that have rows of the shard, this one looks at its own.
        lowest, highest = max(first, held.first_row), min(first + grid.shard_rows, held.first_row + held.rows)
        for band in held.placement.overlapping(lowest, highest):
            spans = [
                span
                for span in band.spans
                if supplier(span.ranks, shard.owner, shard.shard) == self._team.rank
            ]
            if not spans:
                continue
            begin, end = max(first, band.first_row), min(first + grid.shard_rows, band.end_row, grid.rows)
            for slot in range((begin - first) // grid.chunk_rows, -(-(end - first) // grid.chunk_rows)):
                chunk = first + slot * grid.chunk_rows
                chunk_end = min(chunk + grid.chunk_rows, grid.rows)
                bounds = np.array([max(begin, chunk), min(end, chunk_end)])
                start, stop = positions_of(rows, bounds).tolist()
                if start == stop:
                    continue
                offsets = _offsets(rows, slice(start, stop), chunk)
                is_whole = begin <= chunk and chunk_end <= end
                if band.is_full_width and (is_whole or _encodes_row_by_row(rows.codec)):
                    places = None if rows.ids is None and is_whole else offsets
                    edges, seals = [0, stop - start], [self._seal(rows.path, chunk)]
                    (payload,) = rows.encode(start, stop, places, edges, seals)
                    yield EncodedChunk(shard.write, shard.shard, slot, payload)
                    continue
                values = rows.values(start, stop)
                rows.note(start, stop, values)
                if rows.codes is not None:
                    rows.codes.note(start, values)
                for span in spans:
                    part = columns_of(held, values, span.first_column, span.columns)
                    yield RawRows(
                        shard.write, shard.shard, slot, span.first_column, offsets.astype(np.uint32), part
                    )

    def _assemble(
        self, rows: RowsWrite, grid: Grid, shard: int, fragments: Sequence[Fragment]
    ) -> list[BytesLike | None]:
        """The chunks of a shard, from what all its suppliers gave."""
        encoded: dict[int, list[BytesLike]] = {}
        raw: dict[int, list[RawRows]] = {}
        for fragment in fragments:
            if isinstance(fragment, RawRows):
                raw.setdefault(fragment.slot, []).append(fragment)
            else:
                encoded.setdefault(fragment.slot, []).append(fragment.payload)
        first_row = shard * grid.shard_rows
        seals = {slot: self._seal(rows.path, first_row + slot * grid.chunk_rows) for slot in (*encoded, *raw)}
        for slot, parts in raw.items():
            offsets, values = _joined(rows, parts)
            places = None if rows.ids is None and slot not in encoded else offsets
            of_chunk = rows.codec, values, places, [0, len(values)], grid.chunk_rows
            encoded.setdefault(slot, []).extend(
                encode_block(*of_chunk, element=rows.element, seals=[seals[slot]], counted=rows.counted)
            )
        chunks: list[BytesLike | None] = [None] * grid.chunks_per_shard
        for slot, payloads in encoded.items():
            chunks[slot] = payloads[0]
            if len(payloads) > 1:  # rows that were encoded apart
                segments = merge_segments(
                    segment for payload in payloads for segment in parse(payload).segments
                )
                element = element_named(rows.element)
                chunks[slot] = build_payload(grid.chunk_rows, grid.columns, element, segments, seals[slot])
        return chunks


def is_sent_encoded(held: Held | None, codec: RowCodec) -> bool:
    """Whether no rank asks for the values of rows of which this one has `held`: they may be encoded before."""
    return held is None or (_encodes_row_by_row(codec) and held.placement.is_full(held.first_row, held.rows))


def _encodes_row_by_row(codec: RowCodec) -> bool:
    """Whether rows that were encoded apart can be put together: the codes of each depend on no other."""
    on_known_step = isinstance(codec, LatticeRows) and codec.step is not None
    return on_known_step or isinstance(codec, UniformRows | FloatingRows | LosslessRows)


def positions_of(rows: RowsWrite, first_rows: Array) -> Array:
    """Positions among the rows that this rank writes of an array where those from each of `first_rows` on begin."""
    if rows.ids is not None:
        return np.searchsorted(rows.ids, first_rows)
    lowest, count = (0, rows.shape[0]) if rows.held is None else (rows.held.first_row, rows.held.rows)
    return np.asarray(np.clip(first_rows - lowest, 0, count))


def _offsets(rows: RowsWrite, where: slice, chunk: int) -> Array:
    if rows.ids is not None:
        return rows.ids[where] - chunk
    return np.arange(where.start, where.stop) + (_held(rows).first_row - chunk)


def _held(rows: RowsWrite) -> Held:
    assert rows.held is not None  # only such writes are exchanged
    return rows.held


def _share(rows: RowsWrite, grid: Grid) -> Share:
    written = rows_in(rows.counts, grid.rows, grid.shard_rows)
    nbytes = written.astype(np.float64) * rows.bytes_per_row
    return Share(_held(rows).placement, grid.shard_rows, nbytes)


def columns_of(held: Held, values: Array, first_column: int, columns: int) -> Array:
    """The columns of one part, of the values of all parts side by side, as memory of their own."""
    at = 0
    for first, size in held.columns:
        if (first, size) == (first_column, columns):
            return np.ascontiguousarray(values[:, at : at + size])
        at += size
    raise SaveError(f"this rank holds no columns from {first_column} on, although its placement says so")


def _unpacked(data: Any, rank: int) -> list[Fragment]:
    try:
        return unpack(data)
    except ValueError as error:
        raise SaveError(f"what rank {rank} sent is no list of rows: {error}") from error


def _joined(rows: RowsWrite, parts: Sequence[RawRows]) -> tuple[Array, Array]:
    """The rows of a chunk, (n,) and (n, columns), from parts that hold some rows and columns each."""
    offsets = np.unique(np.concatenate([part.offsets for part in parts]))
    values = np.empty((len(offsets), rows.columns), array_dtype(rows.element))
    filled = sum(part.values.view(values.dtype).size for part in parts)
    for part in parts:
        cells = part.values.view(values.dtype)
        place = np.searchsorted(offsets, part.offsets)
        values[place, part.first_column : part.first_column + cells.shape[1]] = cells
    if filled != values.size:
        raise SaveError(f"{rows.path}: ranks gave {filled} values of rows that have {values.size}")
    return offsets.astype(np.int64), values


def joined(dense: Sequence[DenseWrite], team: Team) -> list[DenseWrite]:
    """The dense arrays of a plan, those that this rank puts with their values, from the pieces that ranks hold.

    `dense`: the same arrays in pieces on all ranks, in the same order. The others may differ.
    `team`: the ranks that share them.
    """
    shared = [write for write in dense if write.pieces is not None]  # which ranks know by their numbers
    by_owner: dict[int, list[Fragment]] = {write.owner: [] for write in shared}
    for number, write in enumerate(shared):
        by_owner[write.owner] += _dense_fragments(number, write)
    is_owner, own = team.rank in by_owner, by_owner.pop(team.rank, [])
    if shared and team.world > 1:
        others = [rank for rank in range(team.world) if rank != team.rank] if is_owner else []
        messages = {owner: pack(fragments) for owner, fragments in sorted(by_owner.items())}
        for rank, data in team.exchange(messages, others).items():
            own += _unpacked(data, rank)
    whole = {
        write.path: _whole(
            write, [each for each in own if isinstance(each, RawRows) and each.write == number]
        )
        for number, write in enumerate(shared)
        if write.owner == team.rank
    }
    return [whole.get(write.path, write) for write in dense]


def _dense_fragments(number: int, write: DenseWrite) -> Iterator[Fragment]:
    """What this rank has of a dense array. The slot is the number of dimensions that count as rows."""
    line = (1,) * (2 - write.values.ndim)  # what has no two dimensions is one row
    shape = line + write.values.shape
    for piece in write.pieces or ():
        if piece.values.size:
            sizes = line + piece.values.shape
            offsets = (*(0 for _ in line), *piece.offsets, *(0 for _ in shape))
            # All behind the last dimension that is cut lies side by side.
            cut = max((at for at in range(1, len(shape)) if sizes[at] < shape[at]), default=1)
            rows = np.arange(offsets[0], offsets[0] + sizes[0], dtype=np.uint32)
            for at in range(1, cut):
                inner = np.arange(offsets[at], offsets[at] + sizes[at], dtype=np.uint32)
                rows = (rows[:, None] * np.uint32(shape[at]) + inner).reshape(-1)
            first_column = offsets[cut] * math.prod(shape[cut + 1 :])
            values = piece.values.reshape(len(rows), -1)
            yield RawRows(number, 0, 0 if line else cut, first_column, rows, values)


def _whole(write: DenseWrite, pieces: Sequence[RawRows]) -> DenseWrite:
    values, boxes = np.empty(write.values.shape, write.values.dtype), dict[tuple[int, ...], int]()
    for piece in pieces:  # replicas of a box are alike
        cells = values.reshape(math.prod(values.shape[: piece.slot]), -1)
        row, column, part = int(piece.offsets[0]), piece.first_column, piece.values.view(values.dtype)
        is_run = int(piece.offsets[-1]) - row < len(part)
        rows = slice(row, row + len(part)) if is_run else piece.offsets
        cells[rows, column : column + part.shape[1]] = part
        boxes[row, column, *part.shape] = part.size
    if sum(boxes.values()) != values.size:
        raise SaveError(
            f"{write.path}: the ranks that save have {sum(boxes.values()):,} of its {values.size:,} elements; give "
            "Checkpointer the group of all ranks that train the model"
        )
    return replace(write, values=values, pieces=None)
