"""Rows whose differences are added up until an older payload has their codes."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import ParentError
from cnr_codecs.kernels.lattice import add_rows, find_codes, settle_rows
from cnr_codecs.payload.coded import (
    MANTISSA_BITS,
    MAX_CODE,
    NO_ROW,
    Codes,
    Grid,
    begun,
    checksum,
)
from cnr_codecs.payload.payload import Segment
from cnr_codecs.payload.rowset import RowSet

Need = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
RowNumbers = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.signedinteger[Any]]
# Of `need`: the row is wanted, and what was found of it so far is a difference.
PENDING = 2
_PROVEN_ROWS = 1 << 13


class Pending:
    """The sums of rows on their way down a chain of payloads, from the newest one on.

    `decode_into` and `take_rows` add the differences of relative rows to them, and mark these rows with 2 in `need`.
    The payload that has the codes of such a row ends it: the row is then the sum of them all.

    Parameters
    ----------
    rows, columns
        Of all that is read in one walk.
    values
        float32 (rows, columns), contiguous: what float32 rows are decoded into. The sums then stand in this memory
        until the values do, and take none of their own. No grid must have moved: codes are found in values again.

    Attributes
    ----------
    sums
        int32 (rows, columns). They are defined where rows are pending; with memory of their own also where they were.
    values
        The parameter.
    grids
        uint8 (rows,): the number of the grid of each of these, counted from the first one that was added.
    row, column
        Where row 0 and column 0 of the payload that is read now lie.
    where
        What messages call that payload.
    """

    def __init__(self, rows: int, columns: int, values: npt.NDArray[np.float32] | None = None) -> None:
        # New memory for as many sums as there are values would take longer than to decode them.
        self.sums = np.empty((rows, columns), np.int32) if values is None else values.view(np.int32)
        self.values, self.grids = values, np.empty(rows, np.uint8)
        self._numbers: dict[Grid, int] = {}
        self.row, self.column, self.where = 0, 0, ""
        self._proofs: list[tuple[str, RowNumbers, int, Grid, tuple[int, int]]] = []
        self._newer: dict[str, None] = {}

    def part(self, row: int, column: int = 0, where: str = "") -> Pending:
        """The same sums for a payload whose rows and columns lie elsewhere.

        Parameters
        ----------
        row, column, where
            As the attributes.
        """
        part = copy(self)
        part.row, part.column, part.where = row, column, where
        return part

    def widened(self, rows: int, width: int, columns: int) -> Pending:
        """The sums of some rows from `row` on, and of `width` columns from `column` on, with zeros behind them.

        Parameters
        ----------
        rows, columns
            Of the sums that are returned.
        width
            Columns that are copied.
        """
        wide = Pending(rows, columns)
        wide.sums[:, :width] = self.sums[self.row : self.row + rows, self.column : self.column + width]
        wide.sums[:, width:] = 0
        wide.grids[:] = self.grids[self.row : self.row + rows]
        wide._newer, wide._numbers = self._newer, self._numbers
        return wide

    def add(self, differences: Integers, rows: RowNumbers, need: Need, first_row: int, grid: Grid) -> None:
        """Add the differences of those of `rows` that are wanted, and mark them.

        Parameters
        ----------
        differences
            Of all `rows`, one row after the other.
        rows, need, first_row, grid
            As for `settle`.

        Raises
        ------
        ParentError
            A row has another grid.
        """
        if grid not in self._numbers and len(self._numbers) > np.iinfo(np.uint8).max:
            raise ParentError(f"{self._relative()} has rows relative to it on too many grids")
        number, dim = self._numbers.setdefault(grid, len(self._numbers)), differences.size // len(rows)
        if not add_rows(differences, dim, number, rows, first_row, need, self._kept()):
            raise self._on_another(grid)

    def settle(self, codes: Codes, rows: RowNumbers, need: Need, first_row: int, grid: Grid) -> None:
        """Add what is pending of `rows` to their codes, in place: these are then what the rows have.

        Parameters
        ----------
        codes
            Of all `rows`, one row after the other.
        rows
            uint32 (n,): rows of the chunk.
        need, first_row
            As for `decode_into`.
        grid
            The `Segment.grid` of the codes.

        Raises
        ------
        ParentError
            A row has another grid, or a code is none that this one has.
        """
        number, dim = self._numbers.get(grid, -1), codes.size // max(len(rows), 1)  # no row has the number -1
        place = rows, first_row, need, self._kept(), grid.code_range
        found = settle_rows(codes.reshape(-1), dim, number, *place)
        if found < 0:
            raise self._on_another(grid)
        if found > 0:
            wrong = f"none of {grid}" if grid.mantissa else f"beyond {MAX_CODE}"
            raise ParentError(f"with what {self._relative()} has relative to it, a code is {wrong}")

    def _kept(self) -> tuple[npt.NDArray[np.int32], int, int, npt.NDArray[np.uint8], int]:
        """Return what kernels take: the sums, flat, where they begin and how far rows are apart; grids, and where."""
        columns = self.sums.shape[1]
        first = self.row * columns + self.column
        return self.sums.reshape(-1), first, columns, self.grids, self.row

    def _on_another(self, grid: Grid) -> ParentError:
        return ParentError(f"{self._relative()} has rows relative to it on another grid than {grid}")

    def expect(self, segment: Segment, need: Need, first_row: int) -> None:
        """Remember the checksum of a relative segment if all its rows are read as it has them, to `prove` it.

        Parameters
        ----------
        segment
            It is not added yet.
        need, first_row
            As for `decode_into`.
        """
        assert segment.coded is not None
        self._newer[self.where] = None
        found = [need[places] == 1 for _, places in segment.row_set.placed(first_row, len(need))]
        if sum(map(np.count_nonzero, found)) < segment.row_set.count:
            return
        offsets = segment.row_set.offsets().astype(np.uint32)
        blocks = [
            segment.coded.rows_of_block(each, offsets) for each in range(len(segment.coded.lines.blocks))
        ]
        checks = begun(segment.coded.grid, segment.coded.lines), segment.coded.check
        self._proofs.append((self.where, np.concatenate(blocks), self.row - first_row, segment.grid, checks))

    def prove(self) -> None:
        """Compare the checksums of all relative segments that were read whole, once no row is pending any more.

        Raises
        ------
        ParentError
            One differs.
        """
        for where, _, is_right in self.checked():
            if not is_right:
                raise ParentError(
                    f"{where}: the rows that it has relative to older ones do not come out as they were written "
                    "(crc32c differs)"
                )

    def checked(self, left_out: Mask | None = None) -> Iterator[tuple[str, npt.NDArray[np.int64], bool]]:
        """Yield what messages call a payload, rows, and whether their checksum fits, of segments that were read whole.

        Parameters
        ----------
        left_out
            bool (rows,): rows that were not found. Segments that have one are passed over.
        """
        for where, stored, shift, grid, (check, expected) in self._proofs:
            rows = np.where(stored != NO_ROW, stored.astype(np.int64) + shift, -1)
            held = rows[rows >= 0]
            if left_out is not None and left_out[held].any():
                continue
            for first in range(0, len(rows), _PROVEN_ROWS):
                check = checksum(check, self._codes(rows[first : first + _PROVEN_ROWS], grid))
            yield where, held, check == expected

    def _codes(self, rows: npt.NDArray[np.int64], grid: Grid) -> Codes:
        """The codes (n, columns) that rows were settled with; 0 of those that are none, below 0."""
        if self.values is None:
            return np.where(rows[:, None] < 0, 0, self.sums[rows]).astype(grid.dtype)
        codes: Codes = np.empty((len(rows), self.sums.shape[1]), grid.dtype)
        kinds = np.float32(grid.step), MANTISSA_BITS - grid.mantissa, codes.shape[1]
        find_codes(self.values.reshape(-1), rows, *kinds, codes.reshape(-1))
        return codes

    def check_none(self, row_set: RowSet, need: Need, first_row: int) -> None:
        """Check that no row of a segment without integers is pending.

        Parameters
        ----------
        row_set
            The segment's rows.
        need, first_row
            As for `decode_into`.

        Raises
        ------
        ParentError
            One is.
        """
        for _, places in row_set.placed(first_row, len(need)):
            found = places[need[places] == PENDING]
            if len(found):
                row = int(found[0]) + first_row
                raise ParentError(
                    f"row {row} of it is not on a lattice, and {self._relative()} has it relative"
                )

    def _relative(self) -> str:
        """What messages call the newer payloads."""
        return " or ".join([*self._newer][-2:]) or "a newer payload"


@dataclass(eq=False, slots=True)
class Target:
    """Where rows are written. `flat` spans `out` from its first value to its last; rows are `stride` values apart.

    Sums of relative rows are `pending`; None where rows must not be relative.
    """

    out: npt.NDArray[Any]
    need: Need
    first_row: int
    flat: npt.NDArray[Any]
    stride: int
    pending: Pending | None = None

    def place(self, dtype: npt.DTypeLike) -> tuple[int, Need, npt.NDArray[Any], int]:
        """What kernels take: where rows go, in an output of this dtype."""
        flat = self.flat.view(dtype)
        return self.first_row, self.need, flat, self.stride * self.flat.itemsize // flat.itemsize

    def held(self, row_set: RowSet) -> Iterator[tuple[int, RowNumbers]]:
        """Yield the rows of a set that `out` has, and few others; see `RowSet.within`."""
        return row_set.within(self.first_row, self.first_row + len(self.need))
