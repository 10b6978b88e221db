"""Packs and unpacks row numbers as Rice-coded gaps. `payload.rowset` defines the bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import kernel


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
    end = 8 * data.size
    for i in range(rows.size):
        gap = np.int64(0)
        while True:
            if place >= end:
                return -1
            bit = (data[place >> 3] >> (place & 7)) & 1
            place += 1
            if bit == 0:
                break
            gap += 1
            if gap > limit >> shift:
                return -1
        if place + shift > end:
            return -1
        low = np.int64(0)
        for k in range(shift):
            low |= np.int64((data[place >> 3] >> (place & 7)) & 1) << k
            place += 1
        row += 1 + ((gap << shift) | low)
        if row >= limit:
            return -1
        rows[i] = np.uint32(row)
    return place
