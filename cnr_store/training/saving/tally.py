"""Which rows changed, counted over all ranks: what every rank must know before it decides and plans alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from cnr_store.format.grid import BLOCK_ROWS, Counts, block_count
from cnr_store.policies.past import Since
from cnr_store.ranks.group import Group
from cnr_store.ranks.placement import Placement
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tables import Table
from cnr_store.training.tracking.bitmap import Bitmap, add_counts, bitmap_bytes, full_bitmap
from cnr_store.writing.lineage import ArrayLine
from cnr_store.writing.plan import Held

Bitmaps = dict[str, Bitmap]
_MIN_SHARE_TO_KEEP = 1 / 8
"""Of all tables' bytes: below it, tables whose rows all changed are no reason for retention to keep a version."""


@dataclass(frozen=True)
class Changed:
    """How many rows changed, on all ranks: by what a delta may cover, and by array, (blocks,) of `BLOCK_ROWS` rows."""

    counts: Mapping[Since, Mapping[str, Counts]]

    def rows(self, since: Since, path: str) -> int:
        """Rows of an array."""
        return self._rows[since][path]

    @cached_property
    def _rows(self) -> Mapping[Since, Mapping[str, int]]:
        found: dict[Since, dict[str, int]] = {}
        for since, counts in self.counts.items():
            sums = {
                id(each): int(each.sum()) for each in {id(each): each for each in counts.values()}.values()
            }
            found[since] = {path: sums[id(each)] for path, each in counts.items()}
        return found


class _Array(Protocol):
    """An array of a table."""

    @property
    def path(self) -> str: ...

    @property
    def table(self) -> Table: ...


class ArrayOf(NamedTuple):
    """An array of a table, without its memory."""

    path: str
    table: Table


@dataclass(frozen=True)
class Taken:
    """The rows that a snapshot takes to be changed.

    `dirty`, `compared`: as in `RowSets`.
    """

    arrays: Sequence[ArrayOf]
    dirty: Bitmaps
    compared: Bitmaps


class RowSets:
    """The rows of each array that changed since a version that its delta may depend on.

    `dirty`: by table name, packed: the rows that may have changed since the last version.
    `compared`: by path of arrays that were compared with what is stored: the rows that differ from `parents`.
    `since_whole`: the rows that changed between the array's whole version and the last one. By the path of the array,
    and where arrays of a table do not differ by `Table.path`.
    `parents`: what compared arrays were compared with.
    `by_array`: whether arrays of a table may differ. Of many ranks, all count by tables.
    """

    def __init__(
        self, dirty: Bitmaps, compared: Bitmaps, since_whole: Bitmaps, parents: Since, *, by_array: bool
    ) -> None:
        self._dirty, self._compared, self._since_whole, self._parents = dirty, compared, since_whole, parents
        self._by_array = by_array
        self._joined: dict[tuple[int, int], Bitmap] = {}  # arrays of a table share their sets
        self._filled: dict[tuple[int, bool], Bitmap] = {}

    def of(self, array: _Array, since: Since) -> Bitmap:
        """The rows that changed: all, if the whole version of the array is not known."""
        compared = self._compared.get(array.path)
        if compared is not None and since == self._parents:
            return compared
        dirty = self._dirty[array.table.name] if compared is None else compared
        if since == "previous":
            return dirty
        former = self._since_whole.get(self._key(array))
        if former is None or former.size != dirty.size:  # the table grew
            return self._of_all(array, changed=True)
        key = id(dirty), id(former)
        if key not in self._joined:
            self._joined[key] = dirty | former
        return self._joined[key]

    def since_whole(self, version: str, lines: Mapping[str, ArrayLine], arrays: Iterable[_Array]) -> Bitmaps:
        """What `since_whole` is once `version` was committed with `lines`."""
        keys = {self._key(array): array for array in arrays}
        # An array that this version holds whole starts over; any other still lacks what it lacked.
        return {
            key: self._of_all(array, changed=False)
            if lines[key].links == (version,)
            else self.of(array, "baseline")
            for key, array in keys.items()
        }

    def _key(self, array: _Array) -> str:
        return array.path if self._by_array else array.table.path

    def _of_all(self, array: _Array, *, changed: bool) -> Bitmap:
        key = array.table.local_rows, changed
        if key not in self._filled:
            self._filled[key] = full_bitmap(key[0]) if changed else np.zeros(bitmap_bytes(key[0]), np.uint8)
        return self._filled[key]


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

    def counts(self, arrays: Sequence[_Array], flags: Callable[[_Array], Bitmap]) -> dict[str, Counts]:
        """(blocks,) by path: the rows flagged of each `BLOCK_ROWS` rows of an array; each row counts once.

        `flags`: gives the rows flagged of an array. Arrays of a table that have the same are counted together.
        """
        numbers: dict[tuple[str, int], int] = {}
        counted: list[tuple[Table, Bitmap]] = []
        of: dict[str, int] = {}
        for array in arrays:
            flagged = flags(array)
            of[array.path] = numbers.setdefault((array.table.name, id(flagged)), len(counted))
            if of[array.path] == len(counted):
                counted.append((array.table, flagged))
        edges = np.cumsum([0, *(block_count(table.rows) for table, _ in counted)])
        total = np.zeros(int(edges[-1]), np.int64)
        for (table, flagged), (first, end) in zip(counted, pairwise(edges.tolist()), strict=True):
            self._count(flagged, table, total[first:end])
        total = self._group.sum(total)
        parts = [total[first:end] for first, end in pairwise(edges.tolist())]  # which arrays may share
        return {path: parts[number] for path, number in of.items()}

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


def worth_whole(
    changed: Sequence[RowArray], arrays: Sequence[RowArray], since: Since, known: Collection[str]
) -> set[str]:
    """Paths of arrays whose rows all changed, so that writing them whole costs no more than a delta.

    Later deltas depend on a whole, so retention keeps this version with everything in it. Small arrays are not
    worth that where their delta would depend on the baseline, which is kept anyway.

    `changed`: arrays whose rows all changed, and are not relative: these take less as a delta.
    `known`: by `Table.path`, the tables of which a whole version is known.
    """
    their_bytes, all_bytes = (
        sum(each.nbytes for each in some if each.is_weight) for some in (changed, arrays)
    )
    is_much = since == "previous" or their_bytes >= _MIN_SHARE_TO_KEEP * all_bytes
    return {array.path for array in changed if is_much or array.table.path not in known}


def not_continued(arrays: Iterable[RowArray], lines: Mapping[str, ArrayLine]) -> dict[str, str]:
    """By name, the tables of which no delta may depend on what is stored, and why."""
    why = "no version before it can be continued"
    return {array.table.name: why for array in arrays if not continues(array, lines.get(array.path))}


def continues(array: RowArray, line: ArrayLine | None) -> bool:
    """Whether a delta of this array's table may depend on what is stored, its `line`.

    Optimizer state that was just made is written whole beside a delta of its table. A weight never is.
    """
    if line is None:
        return not array.is_weight
    return (line.shape, line.element) == (array.shape, array.element)
