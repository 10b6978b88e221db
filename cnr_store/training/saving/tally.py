"""Which rows changed, counted over all ranks: what every rank must know before it decides and plans alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cnr_store.format.grid import BLOCK_ROWS, Counts, block_count
from cnr_store.policies.past import Since
from cnr_store.ranks.group import Group
from cnr_store.ranks.placement import Placement
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tables import Table
from cnr_store.training.tracking.bitmap import Bitmap, add_counts, bitmap_bytes, full_bitmap
from cnr_store.writing.lineage import ArrayLine, Lineage
from cnr_store.writing.plan import Held

_MIN_SHARE_TO_KEEP = 1 / 8
"""Of all tables' bytes: below it, tables whose rows all changed are no reason for retention to keep a version."""


@dataclass(frozen=True)
class Changed:
    """How many rows changed, on all ranks: by what a delta may cover, and by table, (blocks,) of `BLOCK_ROWS` rows."""

    counts: Mapping[Since, Mapping[str, Counts]]

    def rows(self, since: Since, table: str) -> int:
        """Rows of a table."""
        return int(self.counts[since][table].sum())


class Tally:
    """Joins and counts the flags of all ranks. Every rank calls the same methods in the same order.

    `placements`: by path, where the rows of each array are: the same on all ranks. Empty where one process has them
    all.
    """

    def __init__(self, group: Group, tables: Sequence[Table]) -> None:
        self._group = group
        self._tables = tables
        self.placements: Mapping[str, Placement] = {}

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self._group.world

    def join(self, flags: dict[str, Bitmap]) -> None:
        """Flag on each rank the rows that it has in common with others and that one of them flagged.

        Ranks with replicas of a row have looked up different ids; with parts of its columns, the row is written from
        all of them.
        """
        placed = ((table, self.placements.get(table.path)) for table in self._tables)
        shared = [table for table, placement in placed if placement is not None and placement.needs_or]
        if not shared:
            return
        sizes = [-(-table.rows // 8) for table in shared]
        joined = np.zeros(sum(sizes), np.uint8)
        edges = np.cumsum([0, *sizes])
        for table, first in zip(shared, edges, strict=False):
            _place(flags[table.name], table, joined[first:])
        joined = self._group.either(joined)
        for table, first, size in zip(shared, edges, sizes, strict=False):
            flags[table.name] = slice_rows(joined[first : first + size], table.first_row, table.local_rows)

    def held(self, array: RowArray, counts: Counts | None) -> Held | None:
        """What this rank has of an array; None where it has all of it. `counts`: the rows written, on all ranks."""
        placement = self.placements.get(array.path)
        if placement is None:
            return None
        columns = tuple((part.first_column, part.columns) for part in array.parts)
        return Held(array.table.first_row, array.table.local_rows, columns, placement, counts)

    def counts(self, flags: Mapping[str, Bitmap]) -> dict[str, Counts]:
        """(blocks,) by table: the rows flagged of each `BLOCK_ROWS` rows; each row counts once."""
        sizes = [block_count(table.rows) for table in self._tables]
        edges = np.cumsum([0, *sizes])
        total = np.zeros(int(edges[-1]), np.int64)
        for table, first, size in zip(self._tables, edges, sizes, strict=False):
            self._count(flags[table.name], table, total[first : first + size])
        total = self._group.sum(total)
        return {
            table.name: total[first : first + size]
            for table, first, size in zip(self._tables, edges, sizes, strict=False)
        }

    def _count(self, flags: Bitmap, table: Table, into: Counts) -> None:
        """Add up the rows flagged of those that this rank counts: no other rank that has them does."""
        placement = self.placements.get(table.path)
        if placement is None:
            add_counts(flags, table.first_row, BLOCK_ROWS, into)
            return
        end = table.first_row + table.local_rows
        for band in placement.overlapping(table.first_row, end):
            if band.counting_rank == self._group.rank:
                own = slice_rows(flags, band.first_row - table.first_row, band.rows)
                add_counts(own, band.first_row, BLOCK_ROWS, into)


def _place(flags: Bitmap, table: Table, into: Bitmap) -> None:
    """Set in a bitmap of the whole table the rows that are flagged of those held."""
    shift, first = table.first_row % 8, table.first_row // 8
    if not shift:
        into[first : first + flags.size] |= flags
        return
    into[first : first + flags.size] |= flags << shift
    carried = (flags >> (8 - shift)).astype(np.uint8)
    end = min(flags.size, -(-table.rows // 8) - first - 1)  # what would be carried past the last row is zero
    into[first + 1 : first + 1 + end] |= carried[:end]


def slice_rows(flags: Bitmap, first_row: int, rows: int) -> Bitmap:
    """The flags of some rows, as a bitmap that begins with the first of them."""
    first, last, start = first_row // 8, -(-(first_row + rows) // 8), first_row % 8
    if not start:
        return flags[first:last] & full_bitmap(rows)
    bits = np.unpackbits(flags[first:last], bitorder="little")
    return np.packbits(bits[start : start + rows], bitorder="little")


def since_whole_after(
    version: str,
    lineage: Lineage,
    tables: Sequence[Table],
    since_whole: Mapping[str, Bitmap],
    dirty: Mapping[str, Bitmap],
) -> dict[str, Bitmap]:
    """Per table, packed: the rows changed since its whole version, once `version` was committed with dirty rows."""
    # A table that this version holds whole starts over; any other still lacks what it lacked.
    return {
        table.name: np.zeros_like(dirty[table.name])
        if lineage.lines[table.path].links == (version,)
        else since_whole[table.name] | dirty[table.name]
        for table in tables
    }


def changed_since(table: Table, since: Since, dirty: Bitmap, since_whole: Bitmap | None) -> Bitmap:
    """The rows of a table that changed since the version that a delta would depend on: all, if none is known.

    `dirty`, `since_whole`: those that changed since the last version, and between its whole version and that one.
    """
    if since == "previous":
        return dirty
    if since_whole is None or not has_whole(table, since_whole):
        return full_bitmap(table.local_rows)
    return dirty | since_whole


def has_whole(table: Table, since_whole: Bitmap | None) -> bool:
    """Whether a whole version of a table is known: there is one, and the table did not grow since."""
    return since_whole is not None and since_whole.size == bitmap_bytes(table.local_rows)


def worth_whole(
    tables: Sequence[Table], all_changed: Changed, since: Since, known: Collection[str]
) -> set[str]:
    """Tables whose rows all changed, so that writing them whole costs no more than a delta.

    Later deltas depend on a whole, so retention keeps this version with everything in it. Small tables are not
    worth that where their delta would depend on the baseline, which is kept anyway.

    `known`: names of the tables of which a whole version is known.
    """
    changed = [table for table in tables if all_changed.rows(since, table.name) == table.rows]
    their_bytes, all_bytes = (sum(each.nbytes for each in some) for some in (changed, tables))
    if since == "baseline" and their_bytes < _MIN_SHARE_TO_KEEP * all_bytes:
        changed = [table for table in changed if table.name not in known]
    return {table.name for table in changed}


def not_continued(arrays: Iterable[RowArray], lines: Mapping[str, ArrayLine]) -> dict[str, str]:
    """By name, the tables of which no delta may depend on what is stored, and why."""
    why = "no version before it can be continued"
    return {array.table.name: why for array in arrays if not _continues(array, lines.get(array.path))}


def _continues(array: RowArray, line: ArrayLine | None) -> bool:
    """Whether a delta of this array's table may depend on what is stored, its `line`.

    Optimizer state that was just made is written whole beside a delta of its table. A weight never is.
    """
    if line is None:
        return not array.is_weight
    return (line.shape, line.element) == (array.shape, array.element)
