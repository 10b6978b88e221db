"""Row sets: which rows of a chunk a segment holds, in the fewest bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import PayloadError

# Row numbers are expanded this many at a time, so that a payload of a few bytes can't make them take much
# memory.
BLOCK_ROWS = 1 << 16


class RowSetKind(IntEnum):
    """How a row set is written; the numbers are the payload's."""

    PREFIX = 0
    BITMAP = 1
    OFFSETS16 = 2
    OFFSETS32 = 3


_OFFSET_DTYPES: dict[RowSetKind, np.dtype[Any]] = {
    RowSetKind.OFFSETS16: np.dtype("<u2"),
    RowSetKind.OFFSETS32: np.dtype("<u4"),
}


def encoded_bytes(kind: RowSetKind, count: int, rows: int) -> int:
    """Bytes that a row set of `count` of `rows` rows takes."""
    if kind is RowSetKind.PREFIX:
        return 0
    if kind is RowSetKind.BITMAP:
        return (rows + 7) // 8
    return count * _OFFSET_DTYPES[kind].itemsize


@dataclass(frozen=True, eq=False)
class RowSet:
    """`count` of the `rows` rows of a chunk, in increasing order.

    `data` holds nothing (prefix), the bitmap as uint8, or the offsets as uint16 or uint32.
    """

    kind: RowSetKind
    count: int
    rows: int
    data: npt.NDArray[Any]

    @classmethod
    def first(cls, count: int, rows: int) -> RowSet:
        """The first `count` of `rows` rows."""
        return cls(RowSetKind.PREFIX, count, rows, np.empty(0, np.uint8))

    @classmethod
    def of(cls, offsets: npt.NDArray[np.integer[Any]], rows: int) -> RowSet:
        """The smallest row set for strictly increasing offsets below `rows`; among equals the lowest kind."""
        count = len(offsets)
        kind = _smallest(count, int(offsets[-1]), rows)
        return cls(kind, count, rows, _pack(kind, offsets, rows))

    @classmethod
    def marked(cls, flags: npt.NDArray[np.bool_]) -> RowSet:
        """The same of the true ones of `flags`, (rows,), at least one; in little more memory than these take."""
        rows, count = len(flags), int(np.count_nonzero(flags))
        kind = _smallest(count, rows - 1 - int(flags[::-1].argmax()), rows)
        if kind is RowSetKind.PREFIX:
            return cls.first(count, rows)
        if kind is RowSetKind.BITMAP:
            return cls(kind, count, rows, np.packbits(flags, bitorder="little"))
        return cls(kind, count, rows, _pack(kind, np.flatnonzero(flags), rows))

    def offsets(self) -> npt.NDArray[np.int64]:
        """All rows, increasing, int64 (count,)."""
        found = np.empty(self.count, np.int64)
        for start, block in self.blocks():
            found[start : start + len(block)] = block
        return found

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Yield (how many rows came before, the next offsets as uint32), a bounded number at a time."""
        done = 0
        for block in self._blocks():
            yield done, block
            done += len(block)

    def _blocks(self) -> Iterator[npt.NDArray[np.uint32]]:
        if self.kind is RowSetKind.BITMAP:
            step = BLOCK_ROWS // 8
            for start in range(0, len(self.data), step):
                bits = np.unpackbits(self.data[start : start + step], bitorder="little")
                # numpy finds the true ones of bools many times as fast as the non-zero ones of integers.
                yield (np.flatnonzero(bits.view(np.bool_)) + start * 8).astype(np.uint32)
            return
        for start in range(0, self.count, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self.count)
            if self.kind is RowSetKind.PREFIX:
                yield np.arange(start, stop, dtype=np.uint32)
            else:
                yield self.data[start:stop].astype(np.uint32)


def _smallest(count: int, last: int, rows: int) -> RowSetKind:
    """The kind that takes the fewest bytes for so many rows up to the row `last`; among equals the lowest."""
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
        bits = np.zeros(rows, np.uint8)
        bits[offsets] = 1
        return np.packbits(bits, bitorder="little")
    return offsets.astype(_OFFSET_DTYPES[kind])


def prove_row_set(kind: RowSetKind, count: int, rows: int, data: npt.NDArray[np.uint8], where: str) -> RowSet:
    """The row set in `data`, whose length is that of `encoded_bytes`.

    Raises:
        PayloadError: it does not name `count` different rows below `rows`, in increasing order.
    """
    if kind is RowSetKind.PREFIX:
        return RowSet(kind, count, rows, data)
    # A copy: what has been proved can't change afterwards, even if the caller's buffer does.
    if kind is RowSetKind.BITMAP:
        bitmap = data.copy()
        if rows % 8 and int(bitmap[-1]) >> (rows % 8):
            raise PayloadError(f"{where}: the bitmap of rows has bits set beyond row {rows - 1}")
        held = int.from_bytes(bitmap.tobytes(), "little").bit_count()
        if held != count:
            raise PayloadError(f"{where}: the bitmap holds {held} rows, the segment declares {count}")
        return RowSet(kind, count, rows, bitmap)
    offsets = np.frombuffer(data.tobytes(), _OFFSET_DTYPES[kind])
    if (offsets[1:] <= offsets[:-1]).any():
        raise PayloadError(f"{where}: the row offsets are not strictly increasing")
    if int(offsets[-1]) >= rows:
        raise PayloadError(f"{where}: row offset {int(offsets[-1])} is beyond the last row, {rows - 1}")
    return RowSet(kind, count, rows, offsets)
