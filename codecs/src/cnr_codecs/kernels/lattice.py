"""Rows as integers on one step: finds the integers of rows, and writes rows from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

# Beyond every limit, and within an int32.
_BEYOND = np.float64(1 << 16)


@njit(nogil=True, cache=True, error_model="numpy")
def quantize(values: Any, dim: int, inverse: float, limit: int, codes: Any, raw: Any) -> Any:
    """Write the codes of rows to `codes` (int16), one row after the other, and return how many rows have any.

    `values` is flat float32. A code is the value times `inverse`, as float64, rounded half even. A row that is not
    finite, or has a code beyond `limit`, is marked in `raw` (uint8), and its codes are overwritten.
    """
    width, held = np.uintp(dim), np.int64(0)
    for i in range(raw.size):
        start, place = np.uintp(i * dim), np.uintp(held * dim)
        most = np.int32(0)
        for j in range(width):
            exact = np.float64(values[start + j]) * inverse
            # NaN fails each comparison, and ends beyond every limit.
            exact = exact if exact > -_BEYOND else -_BEYOND
            exact = exact if exact < _BEYOND else _BEYOND
            code = np.int32(np.rint(exact))
            codes[place + j] = np.int16(code)
            most = max(most, abs(code))
        raw[i] = most > limit
        held += most <= limit
    return held


@njit(nogil=True, cache=True, error_model="numpy")
def sum_squares(values: Any) -> float:
    """Return the sum of the squares of `values`, flat float32, as float64. It is not finite if a value is not.

    Value j belongs to sum j mod 8. The eight sums are added in order.
    """
    s0, s1, s2, s3, s4, s5, s6, s7 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    whole = np.uintp(values.size // 8 * 8)
    for j in range(np.uintp(0), whole, np.uintp(8)):
        s0 += np.float64(values[j]) * np.float64(values[j])
        s1 += np.float64(values[j + np.uintp(1)]) * np.float64(values[j + np.uintp(1)])
        s2 += np.float64(values[j + np.uintp(2)]) * np.float64(values[j + np.uintp(2)])
        s3 += np.float64(values[j + np.uintp(3)]) * np.float64(values[j + np.uintp(3)])
        s4 += np.float64(values[j + np.uintp(4)]) * np.float64(values[j + np.uintp(4)])
        s5 += np.float64(values[j + np.uintp(5)]) * np.float64(values[j + np.uintp(5)])
        s6 += np.float64(values[j + np.uintp(6)]) * np.float64(values[j + np.uintp(6)])
        s7 += np.float64(values[j + np.uintp(7)]) * np.float64(values[j + np.uintp(7)])
    sums = (s0, s1, s2, s3, s4, s5, s6, s7)
    total = 0.0
    for k in range(8):
        last = np.float64(values[whole + k]) if whole + k < values.size else 0.0
        total += sums[k] + last * last
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def place_rows(
    codes: Any, first: int, dim: int, step: Any, rows: Any, first_row: int, need: Any, flat: Any, stride: int
) -> int:
    """Write the wanted ones of `rows` (uint32) to `flat` (float32), clear their marks, and return their number.

    Row i of `rows` has the codes (int32) from `first` + i * `dim` on, and is row `rows[i] - first_row` of the output,
    which `need` (uint8) marks if it is wanted, and which begins at that many times `stride`.
    """
    written, width = 0, np.uintp(dim)
    for i in range(rows.size):
        place = np.int64(rows[i]) - first_row
        if need[place] == 0:
            continue
        need[place] = 0
        written += 1
        source, to = np.uintp(first + i * dim), np.uintp(place * stride)
        for j in range(width):
            flat[to + j] = step * np.float32(codes[source + j])
    return written
