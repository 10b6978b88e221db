"""Rows of many small tables, found and copied in a few calls for all of them.

Python code for each table takes longer than its rows do. What is not small or plain is left to code that goes through
tables one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.training.devices import support
from cnr_store.training.model.row_arrays import MOST_ROWS_KEPT, RowArray
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import array_dtype
from cnr_store.training.tracking.bitmap import Bitmap, RowIds, copy_rows_of_tables, rows_of

MOST_ROWS = 1 << 22
"""Of all small tables: their row numbers, of 8 bytes each, take 32 MiB at most."""
_MOST_ROWS_OF_ONE = MOST_ROWS_KEPT
"""Larger tables are copied faster one by one, on all cores."""
_WORD_BYTES = 4
Words32 = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True)
class SmallTables:
    """Tables whose rows are numbered through, each beginning at a multiple of 8, and their arrays."""

    # names, rows, first: of each table: its name, its rows, and the number of its first row
    names: Sequence[str]
    rows: RowIds
    first: RowIds
    # arrays, of_arrays: the arrays, those of a table next to each other, and the position of each one's table
    arrays: Sequence[RowArray]
    of_arrays: RowIds
    words: RowIds  # (arrays,): the 32-bit words of a row
    given: Sequence[RowArray] = ()  # the arrays among which they were found, without those of large tables

    @classmethod
    def among(cls, arrays: Sequence[RowArray], former: SmallTables | None = None) -> SmallTables:
        """Those whose arrays are all plain: in host memory, contiguous, and of whole words a row.

        `former`: what was found before, which is returned if all arrays that may be of small tables are the same
        objects.
        """
        arrays = [array for array in arrays if array.shape[0] <= _MOST_ROWS_OF_ONE]
        if former is not None and len(arrays) == len(former.given) and all(map(is_, arrays, former.given)):
            return former
        plain: dict[str, bool] = {}
        for array in arrays:
            plain[array.table.name] = plain.get(array.table.name, True) and _is_plain(array)
        rows = {array.table.name: array.shape[0] for array in arrays if plain[array.table.name]}
        small, total = set(), 0
        for name in sorted(rows, key=rows.__getitem__):
            total += rows[name]
            if total > MOST_ROWS:
                break
            small.add(name)
        names = [name for name in rows if name in small]
        place = {name: position for position, name in enumerate(names)}
        held = [array for array in arrays if array.table.name in small]
        counts = np.array([rows[name] for name in names], np.int64)
        return cls(
            names,
            counts,
            np.cumsum((counts + 7) // 8 * 8) - (counts + 7) // 8 * 8,
            held,
            np.array([place[array.table.name] for array in held], np.int64),
            np.array([array.row_bytes // _WORD_BYTES for array in held], np.int64),
            arrays,
        )

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Of the arrays, by path."""
        return {array.path: position for position, array in enumerate(self.arrays)}

    @cached_property
    def layout(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Path, shape and element type of each array."""
        return [(array.path, array.shape, array.element) for array in self.arrays]

    @cached_property
    def have_array_types(self) -> bool:
        """Whether rows are stored as they lie in memory: those of bfloat16 are widened."""
        return all(array_dtype(array.dtype).itemsize == array.dtype.itemsize for array in self.arrays)

    def joined(self, bitmaps: Mapping[str, Bitmap]) -> Bitmap:
        """The bitmaps of all these tables as one."""
        return np.concatenate([bitmaps[name] for name in self.names]) if self.names else np.empty(0, np.uint8)

    def listed(self, bits: Bitmap) -> tuple[RowIds, RowIds]:
        """The rows that are set in a joined bitmap, as they are numbered through, and where each table's begin and end.

        The second has one entry more than there are tables.
        """
        numbers = rows_of(bits, bits.size * 8)
        return numbers, np.append(np.searchsorted(numbers, self.first), numbers.size)

    def local(self, numbers: RowIds, edges: RowIds) -> RowIds:
        """Rows of each table by their numbers in it, from those numbered through."""
        return numbers - np.repeat(self.first, np.diff(edges))

    def copy(self, ids: RowIds, edges: RowIds, targets: RowIds) -> None:
        """Copy rows of every array.

        `ids`, `edges`: rows by their numbers in each table, and where those of each table begin and end.
        `targets`: (arrays,): addresses of contiguous memory for them.
        """
        sources = np.array([array.parts[0].tensor.data_ptr() for array in self.arrays], np.int64)
        begins, ends = edges[self.of_arrays], edges[self.of_arrays + 1]
        copy_rows_of_tables(sources, self.words, begins, ends, ids, targets)


def _is_plain(array: RowArray) -> bool:
    if type(array.table) is not Table or len(array.parts) != 1 or array.drop is not None:
        return False
    tensor = array.parts[0].tensor
    return (
        not support.is_elsewhere(tensor.device)
        and tensor.is_contiguous()
        and not tensor.is_neg()  # its memory has the other sign
        and tensor.shape == array.shape
        and array.shape[0] <= _MOST_ROWS_OF_ONE
        and array.row_bytes > 0
        and array.row_bytes % _WORD_BYTES == 0
        and array.row_bytes * array.shape[0] == tensor.nbytes
        and tensor.data_ptr() % _WORD_BYTES == 0
    )


@dataclass(frozen=True)
class SmallSamples:
    """Rows of small tables as they were at one moment."""

    names: Sequence[str]  # names, rows, first: as in `SmallTables`
    rows: RowIds
    first: RowIds
    layout: Sequence[tuple[str, tuple[int, ...], str]]  # path, shape and element type of each array
    ids: RowIds  # ids, edges: the rows, ascending, and where those of each table begin and end
    edges: RowIds
    of_arrays: RowIds
    words: RowIds
    bits: Words32  # their 32-bit words, array after array
    begins: RowIds  # (arrays + 1,): where those of each array begin, and where the last one's end

    @classmethod
    def of(cls, tables: SmallTables, numbers: RowIds) -> SmallSamples:
        """Take rows, as they are numbered through, ascending."""
        edges = np.append(np.searchsorted(numbers, tables.first), numbers.size)
        ids = tables.local(numbers, edges)
        begins = np.concatenate([[0], np.cumsum(np.diff(edges)[tables.of_arrays] * tables.words)])
        bits = _gathered(tables, ids, edges, begins)
        own = tables.names, tables.rows, tables.first, tables.layout
        return cls(*own, ids, edges, tables.of_arrays, tables.words, bits, begins)

    def numbers(self) -> RowIds:
        """The rows as they are numbered through."""
        return self.ids + np.repeat(self.first, np.diff(self.edges))

    def changed(self, tables: SmallTables, flags: Bitmap) -> set[str]:
        """The tables with a row that has other bits now, and no flag in the joined bitmap. Of the same layout."""
        now = _gathered(tables, self.ids, self.edges, self.begins)
        counts = np.diff(self.edges)[self.of_arrays]
        # Of each array's rows: the array, where its words begin, and its place among the rows of all tables.
        array = np.repeat(np.arange(counts.size), counts)
        within = np.arange(array.size) - np.repeat(np.cumsum(counts) - counts, counts)
        differs = (
            np.bitwise_or.reduceat(now ^ self.bits, self.begins[array] + within * self.words[array]) != 0
        )
        row = self.edges[self.of_arrays[array]] + within
        return {
            self.names[table]
            for table in self.of_arrays[array[differs & ~are_set(flags, self.numbers())[row]]]
        }

    def of_table(self, name: str) -> tuple[int, RowIds, dict[str, Words32]]:
        """Of one table: its rows, those taken, and by array path their words, ``(n, words)``."""
        table = self.names.index(name)
        ids = self.ids[self.edges[table] : self.edges[table + 1]]
        bits = {
            self.layout[array][0]: self.bits[self.begins[array] : self.begins[array + 1]].reshape(
                len(ids), -1
            )
            for array in np.flatnonzero(self.of_arrays == table).tolist()
        }
        return int(self.rows[table]), ids, bits


def _gathered(tables: SmallTables, ids: RowIds, edges: RowIds, begins: RowIds) -> Words32:
    bits = np.empty(begins[-1], np.uint32)
    tables.copy(ids, edges, bits.ctypes.data + begins[:-1] * _WORD_BYTES)
    return bits


def are_set(flags: Bitmap, ids: RowIds) -> npt.NDArray[np.bool_]:
    """Whether rows are set in a bitmap."""
    return np.asarray((flags[ids >> 3] >> (ids & 7)) & 1 != 0)


def draw_rows(
    tables: SmallTables,
    sizes: RowIds,
    flags: Bitmap | None,
    former: SmallSamples | None,
    random: np.random.Generator,
) -> RowIds:
    """At most `sizes` rows of each table, as they are numbered through, ascending.

    `flags`: the rows that are likely to change again, as a joined bitmap; None if that is not known.
    `former`: the last samples: of those that are set in `flags`, some are drawn again.
    """
    every, whole = np.arange(sizes.size), sizes >= tables.rows
    parts = [_ranges(tables.first, np.where(whole, tables.rows, 0))]
    left = np.where(whole, 0, sizes)
    if flags is not None:
        flagged, edges = tables.listed(flags)
        counts = np.diff(edges)
        third = np.where((counts > 0) & (counts < tables.rows), left // 3, 0)
        if former is not None and former.layout == tables.layout:
            table = np.repeat(every, np.diff(former.edges))
            again = former.numbers()
            likely = are_set(flags, again) & (third[table] > 0)
            again, table = again[likely], table[likely]
            order = np.lexsort((random.random(table.size), table))
            rank = np.arange(table.size) - np.searchsorted(table, table)
            again, table = again[order][rank < third[table]], table[rank < third[table]]
            parts.append(again)
            left = left - np.bincount(table, minlength=sizes.size)
        table = np.repeat(every, third)
        parts.append(flagged[edges[table] + (random.random(table.size) * counts[table]).astype(np.int64)])
        left = left - third
    table = np.repeat(every, left)
    parts.append(tables.first[table] + (random.random(table.size) * tables.rows[table]).astype(np.int64))
    return np.unique(np.concatenate(parts))


def _ranges(begins: RowIds, counts: RowIds) -> RowIds:
    """Consecutive numbers from each begin on, one range after the other."""
    return np.arange(int(counts.sum())) + np.repeat(begins - np.cumsum(counts) + counts, counts)
