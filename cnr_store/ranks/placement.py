"""Which rank holds which part of a table."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Self
from zlib import crc32

from cnr_store.errors import UnsupportedModelError

WRITER_ROWS = 1 << 12
"""Replicas share their rows out in runs of so many."""
MOST_WRITERS = 8
"""Of a table's replicas, or each shard of a small delta would get rows from a thousand ranks."""


class Piece(NamedTuple):
    """A box of a (rows, columns) array on one rank. It may be empty. An array of shape (rows,) has one column.

    Pieces are ordered by their rows, then by their columns, then by rank.
    """

    first_row: int
    rows: int
    first_column: int
    columns: int
    rank: int


class Span(NamedTuple):
    """Columns of a band."""

    first_column: int  # first_column, columns: which columns
    columns: int
    ranks: tuple[int, ...]  # ascending: all of them hold these columns of the band's rows


class Band(NamedTuple):
    """Rows that are cut alike in columns."""

    first_row: int  # first_row, rows: which rows
    rows: int
    spans: tuple[Span, ...]  # ascending. They cover all columns.

    @property
    def end_row(self) -> int:
        """The first row behind the band."""
        return self.first_row + self.rows

    @property
    def is_full_width(self) -> bool:
        """Whether each of its ranks holds whole rows."""
        return len(self.spans) == 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ascending: the ranks that hold any part of it."""
        if self.is_full_width:
            return self.spans[0].ranks
        return tuple(sorted({rank for span in self.spans for rank in span.ranks}))

    @property
    def counting_rank(self) -> int:
        """The one rank that counts the dirty rows of the band."""
        return self.spans[0].ranks[0]

    @property
    def needs_or(self) -> bool:
        """Whether several ranks hold parts of the same rows, so that each of them may have changed a row."""
        return len(self.ranks) > 1


@dataclass(frozen=True)
class Placement:
    """Who holds which part of a table."""

    name: str  # of the table, for messages
    shape: tuple[int, int]  # (rows, columns)
    bands: tuple[Band, ...]  # ascending. They cover all rows.

    @classmethod
    def of(cls, name: str, shape: tuple[int, int], pieces: Iterable[Piece]) -> Self:
        """Join the pieces of all ranks. Their order does not matter; equal boxes on several ranks are replicas."""
        # By rows first, so that the pieces of a band stand together; then by columns, for those of a span.
        ordered = sorted(pieces)
        _check_inside(name, shape, ordered)
        ordered = [piece for piece in ordered if piece.rows and piece.columns]
        groups = [(rows, list(group)) for rows, group in groupby(ordered, itemgetter(0, 1))]
        end, before = 0, list[Piece]()
        for (first_row, rows), group in groups:
            if first_row < end:
                raise _clash(name, before, group)
            if first_row > end:
                raise _gap(name, (end, first_row), (0, shape[1]))
            end, before = first_row + rows, group
        if end < shape[0]:
            raise _gap(name, (end, shape[0]), (0, shape[1]))
        # Only now is it known that no other piece has rows of a band.
        bands = tuple(Band(first, rows, _spans(name, shape[1], group)) for (first, rows), group in groups)
        return cls(name, shape, bands)

    @property
    def needs_or(self) -> bool:
        """Whether any row is held by more than one rank, so that bitmaps of changed rows must be OR-ed."""
        return any(band.needs_or for band in self.bands)

    def overlapping(self, first_row: int, end_row: int) -> Sequence[Band]:
        """The bands that hold any of the rows `first_row` ... `end_row` - 1."""
        if first_row >= end_row:
            return ()
        begin = bisect_right(self.bands, first_row, key=lambda band: band.end_row)
        return self.bands[begin : bisect_left(self.bands, end_row, key=lambda band: band.first_row)]

    @cached_property
    def by_writer(self) -> Self:
        """The same with one rank alone for each row, or part of it: the replica that compares, counts and writes it.

        Replicas that a table's arrays have of the same rows share them out alike.
        """
        if not any(len(span.ranks) > 1 for band in self.bands for span in band.spans):
            return self
        start = crc32(self.name.rpartition("/")[0].encode())
        return replace(self, bands=tuple(part for band in self.bands for part in _by_writer(band, start)))

    @cached_property
    def is_cut(self) -> bool:
        """Whether rows are held in parts of their columns."""
        return not self.is_full(0, self.shape[0])

    def is_full(self, first_row: int, rows: int) -> bool:
        """Whether whoever holds any of these rows holds all their columns."""
        return all(band.is_full_width for band in self.overlapping(first_row, first_row + rows))

    def to_json(self) -> dict[str, Any]:
        """A JSON object: the rows of each band and, for each of its spans, the columns and runs of ranks."""
        bands = [
            [band.rows, *([span.columns, *_runs(span.ranks)] for span in band.spans)] for band in self.bands
        ]
        return {"name": self.name, "shape": list(self.shape), "bands": bands}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        bands, end_row = [], 0
        for rows, *spans in doc["bands"]:
            end_column, parsed = 0, list[Span]()
            for columns, *runs in spans:
                ranks = chain.from_iterable(map(range, runs[::2], runs[1::2]))
                parsed.append(Span(end_column, columns, tuple(ranks)))
                end_column += columns
            bands.append(Band(end_row, rows, tuple(parsed)))
            end_row += rows
        return cls(doc["name"], tuple(doc["shape"]), tuple(bands))


def _by_writer(band: Band, start: int) -> Iterator[Band]:
    """The band in parts of one writer each; `start` spreads tables of few rows over the ranks."""
    ranks = band.spans[0].ranks
    blocks = -(-band.rows // WRITER_ROWS)
    count = min(len(ranks), blocks, MOST_WRITERS) if band.is_full_width else 1
    edges = [min(blocks * part // count * WRITER_ROWS, band.rows) for part in range(count + 1)]
    for part, (begin, end) in enumerate(pairwise(edges)):
        at = start + part
        spans = [span._replace(ranks=(span.ranks[at % len(span.ranks)],)) for span in band.spans]
        yield Band(band.first_row + begin, end - begin, tuple(spans))


def _check_inside(name: str, shape: tuple[int, int], pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        first_row, rows, first_column, columns, rank = piece
        end_row, end_column = first_row + rows, first_column + columns
        if min(piece) < 0 or (rows and columns and (end_row > shape[0] or end_column > shape[1])):
            raise UnsupportedModelError(
                f"table {name!r} has shape {shape}, and {_box(piece)} of it on rank {rank} are outside of that: "
                "give the same shape on all ranks"
            )


def _spans(name: str, all_columns: int, band: Sequence[Piece]) -> tuple[Span, ...]:
    """The spans of a band, from its pieces in order."""
    spans, end, before = [], 0, list[Piece]()
    begin_row, end_row = band[0].first_row, band[0].first_row + band[0].rows
    for (first_column, columns), group in groupby(band, itemgetter(2, 3)):
        replicas = list(group)
        if first_column < end:
            raise _clash(name, before, replicas)
        if first_column > end:
            raise _gap(name, (begin_row, end_row), (end, first_column))
        ranks = tuple(piece.rank for piece in replicas)
        if len(set(ranks)) < len(ranks):
            rank = next(one for one, other in pairwise(ranks) if one == other)
            raise UnsupportedModelError(
                f"rank {rank} names {_box(replicas[0])} of table {name!r} twice: a rank holds a box once"
            )
        spans.append(Span(first_column, columns, ranks))
        end, before = first_column + columns, replicas
    if end < all_columns:
        raise _gap(name, (begin_row, end_row), (end, all_columns))
    return tuple(spans)


def _box(piece: Piece) -> str:
    """Where a piece is, for messages."""
    first_row, rows, first_column, columns, _ = piece
    return f"rows {first_row}:{first_row + rows}, columns {first_column}:{first_column + columns}"


def _gap(name: str, rows: tuple[int, int], columns: tuple[int, int]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"no rank holds rows {rows[0]}:{rows[1]}, columns {columns[0]}:{columns[1]} of table {name!r}: "
        "every rank of the group has to give its shards of the table"
    )


def _clash(name: str, before: Sequence[Piece], after: Sequence[Piece]) -> UnsupportedModelError:
    """Why pieces with some rows in common can't stand beside one another."""
    for one in before:
        for other in after:
            if _overlap(one, other):
                return UnsupportedModelError(
                    f"shards of table {name!r} overlap without being equal: rank {one.rank} holds {_box(one)}, "
                    f"rank {other.rank} {_box(other)}"
                )
    one, other = before[0], after[0]
    return UnsupportedModelError(
        f"table {name!r} is cut into other rows in some columns than in others: rank {one.rank} holds {_box(one)}, "
        f"rank {other.rank} {_box(other)}; cut all columns of a row alike"
    )


def _overlap(one: Piece, other: Piece) -> bool:
    rows, columns = (
        min(one[at] + one[at + 1], other[at] + other[at + 1]) - max(one[at], other[at]) for at in (0, 2)
    )
    return rows > 0 and columns > 0


def _runs(ranks: Sequence[int]) -> list[int]:
    """Ascending ranks as first and end of each run of neighbours."""
    cuts = [number for number in range(1, len(ranks)) if ranks[number] != ranks[number - 1] + 1]
    bounds = pairwise([0, *cuts, len(ranks)])
    return [edge for begin, end in bounds for edge in (ranks[begin], ranks[end - 1] + 1)]
