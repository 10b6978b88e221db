"""Packs and unpacks row numbers as Rice-coded gaps. `payload.rowset` defines the bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import kernel
from cnr_codecs.kernels.building.instructions import bits_of

_0, _1 = np.uint64(0), np.uint64(1)


@kernel
def pack_gaps(gaps: Any, shift: int, out: Any) -> None:
    """Set the bits of gaps (int64) in `out` (uint8, all 0), which has room for them, the lowest bit first."""
    place = 0
    for i in range(gaps.size):
        gap = gaps[i]
        for _ in range(gap >> shift):
            out[place >> 3] |= np.uint8(1 << (place & 7))
            place += 1
        place += 1
        for k in range(shift):
            out[place >> 3] |= np.uint8(((gap >> k) & 1) << (place & 7))
            place += 1


@kernel
def unpack_gaps(data: Any, shift: int, place: int, row: Any, limit: int, rows: Any) -> int:
    """Write the next `rows.size` row numbers to `rows` (uint32), from bit `place` of `data` (uint8) on.

    `row` is the row before. Return the bit behind them, or -1 if the data ends before, or a row is not below `limit`.
    """
    # Bits that were read and not used yet, the next one lowest.
    bits, held, at = _0, 0, place >> 3
    used = place & 7
    for i in range(rows.size):
        gap: Any = 0
        while True:
            if held <= shift:
                while held <= 48 and at < data.size:
                    bits |= np.uint64(data[at]) << np.uint64(held)
                    held += 8
                    at += 1
                bits >>= np.uint64(used)
                held -= used
                used = 0
                if held <= shift:
                    return -1
            # The lowest bit that is none of the ones that come next; their number is its exponent.
            zero = ~bits & (bits + _1)
            ones = (bits_of(np.float64(zero)) >> 52) - 1023
            if zero > _0 and ones + shift < held:
                gap += ones
                bits >>= np.uint64(ones + 1)
                held -= ones + 1
                break
            is_last = (bits & _1) == _0
            bits >>= _1
            held -= 1
            if is_last:
                break
            gap += 1
            if gap > limit >> shift:
                return -1
        row += 1 + ((gap << shift) | np.int64(bits & ((_1 << np.uint64(shift)) - _1)))
        bits >>= np.uint64(shift)
        held -= shift
        if row >= limit:
            return -1
        rows[i] = np.uint32(row)
    return 8 * at - held + used
