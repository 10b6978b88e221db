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

from cnr_store.training.model.row_arrays import MOST_ROWS_KEPT, RowArray
from cnr_store.training.tracking.bitmap import WORD_BYTES, Bitmap, RowIds, copy_rows_of_tables, rows_of

MOST_ROWS = 1 << 22
"""Of all small tables: their row numbers, of 8 bytes each, take 32 MiB at most."""
_MOST_ROWS_OF_ONE = MOST_ROWS_KEPT
"""Larger tables are copied faster one by one, on all cores."""
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
        """Those whose arrays are all plain: in host memory as they are stored, and of whole words a row.

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
            np.array([array.row_bytes // WORD_BYTES for array in held], np.int64),
            arrays,
        )

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Of the arrays, by path."""
        return {array.path: position for position, array in enumerate(self.arrays)}

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
    if not array.table.is_plain or array.memory is None:
        return False
    address = array.parts[0].tensor.data_ptr()
    return array.row_bytes > 0 and not (array.row_bytes % WORD_BYTES or address % WORD_BYTES)
