"""Row sets: which rows of a chunk a segment has, in the fewest bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import PayloadError
from cnr_codecs.kernels.packed import add_gaps
from cnr_codecs.payload.frames import Frame, compress, decompress

# Row numbers are expanded in blocks of this many: a payload of a few bytes may name billions of rows.
BLOCK_ROWS = 1 << 16
# The byte of a gap that goes on.
_SKIP = 255


class RowSetKind(IntEnum):
    """How a row set is stored. Payloads store these numbers."""

    PREFIX = 0
    BITMAP = 1
    OFFSETS16 = 2
    OFFSETS32 = 3
    GAPS = 4


_OFFSET_DTYPES: dict[RowSetKind, np.dtype[Any]] = {
    RowSetKind.OFFSETS16: np.dtype("<u2"),
    RowSetKind.OFFSETS32: np.dtype("<u4"),
}


def encoded_bytes(kind: RowSetKind, count: int, rows: int) -> int:
    """Return the bytes that a row set of `count` of `rows` rows takes; but of gaps: these take what they take."""
    if kind is RowSetKind.PREFIX:
        return 0
    if kind is RowSetKind.BITMAP:
        return (rows + 7) // 8
    return count * _OFFSET_DTYPES[kind].itemsize


@dataclass(frozen=True, eq=False)
class RowSet:
    """Some of the rows of a chunk, in increasing order.

    Attributes
    ----------
    kind
        How the row set is stored.
    count
        The number of rows in the set.
    rows
        The number of rows of the chunk.
    data
        Nothing (prefix), the bitmap as uint8, the offsets as uint16 or uint32, or the zstd frame of the
        bytes of the gaps.
    """

    kind: RowSetKind
    count: int
    rows: int
    data: npt.NDArray[Any]

    @classmethod
    def first(cls, count: int, rows: int) -> RowSet:
        """Return the set of the first `count` of `rows` rows."""
        return cls(RowSetKind.PREFIX, count, rows, np.empty(0, np.uint8))

    @classmethod
    def of(cls, offsets: npt.NDArray[np.integer[Any]], rows: int) -> RowSet:
        """Return the smallest row set of the rows `offsets`; among equally small ones, the lowest kind.

        Parameters
        ----------
        offsets
            (n,) integers below `rows`, strictly increasing, at least one.
        rows
            The number of rows of the chunk.
        """
        count = len(offsets)
        kind = _smallest(count, int(offsets[-1]), rows)
        return cls(kind, count, rows, _pack(kind, offsets, rows))._smaller()

    @classmethod
    def marked(cls, flags: npt.NDArray[np.bool_]) -> RowSet:
        """Return the smallest row set of the rows that `flags`, (rows,), marks. At least one must be marked.

        It takes little more memory than `flags` does.
        """
        rows, count = len(flags), int(np.count_nonzero(flags))
        kind = _smallest(count, rows - 1 - int(flags[::-1].argmax()), rows)
        if kind is RowSetKind.PREFIX:
            return cls.first(count, rows)
        if kind is RowSetKind.BITMAP:
            return cls(kind, count, rows, np.packbits(flags, bitorder="little"))._smaller()
        return cls(kind, count, rows, _pack(kind, np.flatnonzero(flags), rows))._smaller()

    def _smaller(self) -> RowSet:
        """The same rows as gaps, if these are smaller."""
        if self.kind is RowSetKind.PREFIX:
            return self
        frame = np.frombuffer(compress(_gaps(rows for _, rows in self.blocks())), np.uint8)
        return self if frame.nbytes >= self.data.nbytes else replace(self, kind=RowSetKind.GAPS, data=frame)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in memory."""
        return self.data.nbytes + (4 * self.count if self.kind is RowSetKind.GAPS else 0)

    @cached_property
    def _listed(self) -> npt.NDArray[Any]:
        """The rows of offsets and of gaps."""
        return (
            _rows_of_gaps(self.data.tobytes(), self.count, self.rows)
            if self.kind is RowSetKind.GAPS
            else self.data
        )

    def offsets(self) -> npt.NDArray[np.int64]:
        """Return all rows of the set, increasing, int64 (count,)."""
        found = np.empty(self.count, np.int64)
        for start, block in self.blocks():
            found[start : start + len(block)] = block
        return found

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Yield (rows before this block, the block's rows as uint32). Blocks have a bounded number of rows."""
        return self.within(0, self.rows)

    def within(self, first: int, stop: int) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """As `blocks`, but at least the rows `first` to `stop`, and few others where the kind allows."""
        first, stop = max(first, 0), min(stop, self.rows)
        if first >= stop:
            return
        if self.kind is RowSetKind.BITMAP:
            first, stop = first // 8, -(-stop // 8)
            done = int.from_bytes(self.data[:first].tobytes(), "little").bit_count()
            for rows in _bitmap_rows(self.data[first:stop]):
                yield done, rows + np.uint32(first * 8)
                done += len(rows)
        elif self.kind is RowSetKind.PREFIX:
            stop = min(stop, self.count)
            for start in range(first, stop, BLOCK_ROWS):
                yield start, np.arange(start, min(start + BLOCK_ROWS, stop), dtype=np.uint32)
        else:
            listed = self._listed
            # Of the same type: another one would make a copy of all offsets first. The chunk may have rows beyond it.
            ends = np.minimum((first, stop - 1), np.iinfo(listed.dtype).max).astype(listed.dtype)
            place, last = listed.searchsorted(ends).tolist()
            for start in range(place, min(last + 1, self.count), BLOCK_ROWS):
                yield start, listed[start : min(start + BLOCK_ROWS, last + 1)].astype(np.uint32)

    def placed(self, first_row: int, count: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield (rows before these, places) of a block's rows from `first_row` on, of which there are `count`."""
        for start, rows in self.within(first_row, first_row + count):
            places = rows.astype(np.int64) - first_row
            begin, end = np.searchsorted(places, (0, count)).tolist()
            yield start + begin, places[begin:end]


def _bitmap_rows(data: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint32]]:
    step = BLOCK_ROWS // 8
    for start in range(0, len(data), step):
        bits = np.unpackbits(data[start : start + step], bitorder="little")
        # flatnonzero is many times faster on bools than on integers.
        yield (np.flatnonzero(bits.view(np.bool_)) + start * 8).astype(np.uint32)


def rows_of(row_sets: Sequence[RowSet]) -> npt.NDArray[np.int64]:
    """Return the rows of all sets, which have different ones, increasing."""
    if len(row_sets) == 1:
        return row_sets[0].offsets()
    rows = np.concatenate([np.empty(0, np.int64), *(each.offsets() for each in row_sets)])
    rows.sort()
    return rows


def _smallest(count: int, last: int, rows: int) -> RowSetKind:
    """Return the kind that takes the fewest bytes for `count` rows, the greatest being `last`."""
    kinds = [RowSetKind.BITMAP, RowSetKind.OFFSETS32]
    if last == count - 1:
        kinds.append(RowSetKind.PREFIX)
    if rows <= 1 << 16:
        kinds.append(RowSetKind.OFFSETS16)
    return min(kinds, key=lambda each: (encoded_bytes(each, count, rows), each))


def _pack(kind: RowSetKind, offsets: npt.NDArray[np.integer[Any]], rows: int) -> npt.NDArray[Any]:
    if kind is RowSetKind.PREFIX:
        return np.empty(0, np.uint8)
    if kind is RowSetKind.BITMAP:
        flags = np.zeros(rows, np.uint8)
        flags[offsets] = 1
        return np.packbits(flags, bitorder="little")
    return offsets.astype(_OFFSET_DTYPES[kind])


def _gaps(blocks: Iterable[npt.NDArray[np.uint32]]) -> npt.NDArray[np.uint8]:
    """The bytes of gaps, each the number of rows left out before a row: 255 as often as it has that, then the rest."""
    parts, last = [], -1
    for rows in filter(len, blocks):
        gaps: npt.NDArray[Any] = np.diff(rows.astype(np.int64), prepend=last) - 1
        ends = np.cumsum(gaps // _SKIP + 1)
        packed = np.full(int(ends[-1]), _SKIP, np.uint8)
        packed[ends - 1] = gaps % _SKIP
        parts.append(packed)
        last = int(rows[-1])
    return np.concatenate(parts)


def _rows_of_gaps(frame: Frame, count: int, rows: int) -> npt.NDArray[np.uint32]:
    """Return the rows of gaps. `PayloadError` if they are not those of `count` rows below `rows`."""
    packed = decompress(frame, most=count + rows // _SKIP)
    found = np.empty(count, np.uint32)
    last = add_gaps(packed, _SKIP, found)
    if last < 0 or packed[-1] == _SKIP:
        raise PayloadError(f"the gaps are not those of {count} rows")
    if last >= rows:
        raise PayloadError(f"the gaps are not those of rows below {rows}")
    return found


def validate_row_set(kind: RowSetKind, count: int, rows: int, data: bytes, where: str) -> RowSet:
    """Return the row set that `data` stores: of `encoded_bytes(kind, count, rows)` bytes, or any number of gaps."""
    offsets = np.frombuffer(data, _OFFSET_DTYPES.get(kind, np.uint8))
    if kind is RowSetKind.PREFIX:
        return RowSet(kind, count, rows, offsets)
    row_set = RowSet(kind, count, rows, offsets)
    if kind is RowSetKind.GAPS:
        try:
            _ = row_set._listed
        except PayloadError as error:
            raise PayloadError(f"{where}: {error}") from error
        return row_set
    if kind is RowSetKind.BITMAP:
        if rows % 8 and data[-1] >> (rows % 8):
            raise PayloadError(f"{where}: the bitmap of rows has bits set beyond row {rows - 1}")
        held = int.from_bytes(data, "little").bit_count()
        if held != count:
            raise PayloadError(f"{where}: the bitmap has {held} rows, the segment declares {count}")
        return row_set
    if (offsets[1:] <= offsets[:-1]).any():
        raise PayloadError(f"{where}: the row offsets are not strictly increasing")
    if int(offsets[-1]) >= rows:
        raise PayloadError(f"{where}: row offset {int(offsets[-1])} is beyond the last row, {rows - 1}")
    return row_set


def validate_disjoint(row_sets: Sequence[RowSet], rows: int) -> None:
    """Check that no row is in two of the row sets of a payload's segments. `PayloadError` if one is."""
    if len(row_sets) < 2:
        return
    seen = np.zeros(rows, np.bool_)
    for index, row_set in enumerate(row_sets):
        for _, offsets in row_set.blocks():
            again = seen[offsets]
            if again.any():
                row = int(offsets[np.argmax(again)])
                raise PayloadError(f"payload: segment {index}: row {row} is in an earlier segment too")
            seen[offsets] = True
