"""Where the rows of each array are and which changed, over all ranks: what each must know before it plans alike."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from cnr_store.errors import SaveError, UnsupportedModelError
from cnr_store.format.grid import BLOCK_ROWS, Counts, block_count
from cnr_store.policies.past import Since
from cnr_store.ranks.decisions import decode, encode
from cnr_store.ranks.group import Document, Group
from cnr_store.ranks.placement import Piece, Placement
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tables import Table
from cnr_store.training.tracking.bitmap import Bitmap, RowIds, add_counts, bitmap_bytes, full_bitmap, rows_of
from cnr_store.writing.lineage import ArrayLine, Lineage
from cnr_store.writing.plan import Held

Bitmaps = dict[str, Bitmap]


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


class ArrayOf(NamedTuple):
    """An array of a table, without its memory."""

    path: str
    table: Table


_Array = RowArray | ArrayOf


class RowSets:
    """The rows of each array that changed since a version that its delta may depend on.

    They hold no memory of the `arrays` but that of tables.

    `dirty`: by table name, packed: the rows that may have changed since the last version.
    `compared`: by path of arrays that were compared with what is stored: the rows that differ from `parents`.
    `since_whole`: by path: the rows that changed between the array's whole version and the last one.
    `parents`: what compared arrays were compared with.

    Of rows that other ranks write nothing need be known but in `dirty`.
    """

    def __init__(
        self,
        arrays: Iterable[_Array],
        dirty: Bitmaps,
        compared: Bitmaps,
        since_whole: Bitmaps,
        parents: Since,
    ) -> None:
        self.arrays = [ArrayOf(array.path, array.table) for array in arrays]
        self.dirty, self.compared = dirty, compared
        self._since_whole, self._parents = since_whole, parents
        self._joined: dict[tuple[int, int], Bitmap] = {}  # arrays of a table share their sets
        self._filled: dict[tuple[int, bool], Bitmap] = {}

    def of(self, array: _Array, since: Since) -> Bitmap:
        """The rows that changed: all, if the whole version of the array is not known."""
        compared = self.compared.get(array.path)
        if compared is not None and since == self._parents:
            return compared
        dirty = self.dirty[array.table.name] if compared is None else compared
        if since == "previous":
            return dirty
        former = self._since_whole.get(array.path)
        if former is None or former.size != dirty.size:  # the table grew
            return self._of_all(array, changed=True)
        key = id(dirty), id(former)
        if key not in self._joined:
            self._joined[key] = dirty | former
        return self._joined[key]

    def unflagged(self, unsafe: Container[str]) -> dict[str, RowIds]:
        """By path of arrays that were compared, of tables that are not `unsafe`: rows that changed without a flag."""
        flags, found = RowSets([], self.dirty, {}, self._since_whole, self._parents), dict[str, RowIds]()
        for array in self.arrays:
            compared = None if array.table.name in unsafe else self.compared.get(array.path)
            missed = None if compared is None else compared & ~flags.of(array, self._parents)
            if missed is not None and missed.any():
                found[array.path] = array.table.first_row + rows_of(missed, array.table.local_rows)
        return found

    def since_whole(self, version: str, lines: Mapping[str, ArrayLine]) -> Bitmaps:
        """What `since_whole` is once `version` was committed with `lines`."""
        # An array that this version holds whole starts over; any other still lacks what it lacked.
        return {
            array.path: self._of_all(array, changed=False)
            if lines[array.path].links == (version,)
            else self.of(array, "baseline")
            for array in self.arrays
        }

    def _of_all(self, array: _Array, *, changed: bool) -> Bitmap:
        key = array.table.local_rows, changed
        if key not in self._filled:
            self._filled[key] = full_bitmap(key[0]) if changed else np.zeros(bitmap_bytes(key[0]), np.uint8)
        return self._filled[key]


class Tally:
    """Where the rows of each array are, and the flags of all ranks, joined and counted.

    Every rank calls the same methods in the same order.

    `placements`: by path, where the rows of each array are: the same on all ranks. Empty where one process has them
    all.
    """

    def __init__(self, group: Group, tables: Sequence[Table]) -> None:
        self._group = group
        self._tables = tables
        self.placements: Mapping[str, Placement] = {}
        self._said: Document = {}
        self._arrays: dict[str, tuple[list[int], str, Any]] = {}

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self._group.world

    def say(self, arrays: Sequence[RowArray]) -> bool:
        """Note what this rank has of each array. Whether the others do not know of it yet."""
        if self._group.world == 1:
            for array in arrays:
                held = (array.table.local_rows, array.local_columns)
                if held != (array.shape[0], (*array.shape, 1)[1]):
                    raise UnsupportedModelError(
                        f"{array.path}: this process saves alone, and other ranks have a part of it; give Checkpointer "
                        "the group of all ranks that train the model"
                    )
            return False
        self._now = {
            array.path: [
                list(array.shape),
                array.element,
                [
                    [array.table.first_row, array.table.local_rows, part.first_column, part.columns]
                    for part in array.parts
                ],
            ]
            for array in arrays
            if array.parts  # a rank without rows need not know their type
        }
        return self._now != self._said

    def settle(self) -> None:
        """Learn what all ranks have. All call this where it changed on any.

        The first rank joins what each has, and one document of that goes to all.
        """
        joined: bytes | None = None

        def join(documents: list[Document]) -> Document:
            nonlocal joined
            joined = zlib.compress(encode(_join([doc["arrays"] for doc in documents])))
            return {}

        self._group.decide("save: where rows are", {"arrays": self._now}, join)
        found = decode(zlib.decompress(self._group.broadcast(joined)))
        placements = {path: Placement.from_json(placement) for path, (_, _, placement) in found.items()}
        self._arrays, self.placements, self._said = found, placements, self._now

    def complete(self, arrays: Sequence[RowArray]) -> list[RowArray]:
        """The arrays of all ranks, those of a table next to each other: also those that this rank has nothing of."""
        own = {array.path: array for array in arrays}
        if self._group.world == 1:
            return list(arrays)
        if own.keys() == self._arrays.keys():
            return [self._told(array) for array in arrays]
        complete: list[RowArray] = []
        for table in self._tables:
            group = table.path.rpartition("/")[0]
            for path in sorted(self._arrays, key=lambda path: (path != table.path, path)):
                if path.rpartition("/")[0] == group:
                    shape, element, _ = self._arrays[path]
                    found = own.get(path) or RowArray(table, path, tuple(shape), element, ())
                    complete.append(self._told(found))
        return complete

    def _told(self, array: RowArray) -> RowArray:
        """The array as the ranks that have a part of it say: any other can only guess its shape and type."""
        shape, element, _ = self._arrays[array.path]
        return array if array.parts else replace(array, shape=tuple(shape), element=element)

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
            place(flags[table.name], table.first_row, joined[first : first + -(-table.rows // 8)])
        joined = self._group.either(joined)
        for table, first, size in zip(shared, edges, sizes, strict=False):
            flags[table.name] = slice_rows(joined[first : first + size], table.first_row, table.local_rows)

    def own(self, array: _Array) -> slice:
        """Of the rows of an array that this rank holds, those that it compares, counts and writes."""
        first, rows = array.table.first_row, array.table.local_rows
        placement = self.placements.get(array.path)
        if placement is None:
            return slice(0, rows)
        bands = placement.by_writer.overlapping(first, first + rows)
        own = [band for band in bands if self._group.rank in band.ranks]
        return slice(own[0].first_row - first, own[-1].end_row - first) if own else slice(0, 0)

    def is_cut(self, array: _Array) -> bool:
        """Whether rows of an array are held in parts of their columns: such arrays are not compared."""
        placement = self.placements.get(array.path)
        return placement is not None and placement.is_cut

    def why_whole(
        self, arrays: Sequence[RowArray], lineage: Lineage, unsafe: Mapping[str, str]
    ) -> dict[str, str]:
        """By name, why tables are whole, if they are not compared.

        `lineage`: of the version before; if there is none, this is about the save after the next.
        `unsafe`: the tables of whose changed rows hooks don't know.
        """
        found = dict(unsafe)
        for array in arrays:
            name = array.table.name
            if name in unsafe and self.is_cut(array):
                found[name] = f"{unsafe[name]}; rows held in parts of their columns are not compared"
            elif lineage.version is not None and not continues(array, lineage.lines.get(array.path)):
                found.setdefault(name, "no version before it can be continued")
        return found

    def held(self, array: RowArray, counts: Counts | None) -> Held | None:
        """What this rank writes of an array; None where it has all of it. `counts`: the rows written, on all ranks."""
        placement = self.placements.get(array.path)
        if placement is None:
            return None
        own = self.own(array)
        columns = tuple((part.first_column, part.columns) for part in array.parts)
        first_row = array.table.first_row + own.start
        return Held(first_row, own.stop - own.start, columns, placement.by_writer, counts)

    def counts(self, arrays: Sequence[_Array], flags: Callable[[_Array], Bitmap]) -> dict[str, Counts]:
        """(blocks,) by path: the rows flagged of each `BLOCK_ROWS` rows of an array; each row counts once.

        `flags`: gives the rows flagged of an array. One process counts arrays of a table that have the same together.
        """
        numbers: dict[tuple[str, int], int] = {}
        counted: list[tuple[_Array, Bitmap]] = []
        of: dict[str, int] = {}
        for array in sorted(arrays, key=attrgetter("path")):  # alike on all ranks
            flagged = flags(array)
            key = (array.table.name, id(flagged)) if self.world == 1 else (array.path, 0)
            of[array.path] = numbers.setdefault(key, len(counted))
            if of[array.path] == len(counted):
                counted.append((array, flagged))
        edges = np.cumsum([0, *(block_count(array.table.rows) for array, _ in counted)])
        total = np.zeros(int(edges[-1]), np.int64)
        for (array, flagged), (first, end) in zip(counted, pairwise(edges.tolist()), strict=True):
            self._count(flagged, array, total[first:end])
        total = self._group.sum(total)
        parts = [total[first:end] for first, end in pairwise(edges.tolist())]  # which arrays may share
        return {path: parts[number] for path, number in of.items()}

    def _count(self, flags: Bitmap, array: _Array, into: Counts) -> None:
        """Add up the rows flagged of those that this rank counts: no other rank that has them does."""
        placement, table = self.placements.get(array.path), array.table
        if placement is None:
            add_counts(flags, table.first_row, BLOCK_ROWS, into)
            return
        end = table.first_row + table.local_rows
        for band in placement.by_writer.overlapping(table.first_row, end):
            if band.counting_rank == self._group.rank:
                own = slice_rows(flags, band.first_row - table.first_row, band.rows)
                add_counts(own, band.first_row, BLOCK_ROWS, into)


def _join(said: Sequence[Document]) -> Document:
    """By path the shape, element and placement of each array, from what each rank has of it."""
    arrays: dict[str, tuple[list[int], str]] = {}
    pieces: dict[str, list[Piece]] = {}
    for rank, own in enumerate(said):
        for path, (shape, element, boxes) in own.items():
            shape_there, element_there = arrays.setdefault(path, (shape, element))
            if (shape, element) != (shape_there, element_there):
                raise SaveError(
                    f"{path} is {(tuple(shape), element)} on rank {rank} and {(tuple(shape_there), element_there)} on "
                    "others: give all ranks one model"
                )
            pieces.setdefault(path, []).extend(
                Piece(first_row, rows, first_column, columns, rank)
                for first_row, rows, first_column, columns in boxes
            )
    return {
        path: [shape, element, Placement.of(path, (shape[0], (*shape, 1)[1]), pieces[path]).to_json()]
        for path, (shape, element) in arrays.items()
    }


def place(flags: Bitmap, first_row: int, into: Bitmap) -> None:
    """Set in a bitmap of more rows those that are flagged of some, which begin with `first_row`."""
    shift, first = first_row % 8, first_row // 8
    if not shift:
        into[first : first + flags.size] |= flags
        return
    into[first : first + flags.size] |= flags << shift
    carried = (flags >> (8 - shift)).astype(np.uint8)
    end = min(flags.size, into.size - first - 1)  # what would be carried past the last row is zero
    into[first + 1 : first + 1 + end] |= carried[:end]


def slice_rows(flags: Bitmap, first_row: int, rows: int) -> Bitmap:
    """The flags of some rows, as a bitmap that begins with the first of them."""
    first, last, start = first_row // 8, -(-(first_row + rows) // 8), first_row % 8
    if not start:
        return flags[first:last] & full_bitmap(rows)
    bits = np.unpackbits(flags[first:last], bitorder="little")
    return np.packbits(bits[start : start + rows], bitorder="little")


def continues(array: RowArray, line: ArrayLine | None) -> bool:
    """Whether a delta of this array's table may depend on what is stored, its `line`.

    Optimizer state that was just made is written whole beside a delta of its table. A weight never is.
    """
    if line is None:
        return not array.is_weight
    return (line.shape, line.element) == (array.shape, array.element)
