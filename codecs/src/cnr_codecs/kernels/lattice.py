"""Rows as integers on one step: finds the integers of rows, and writes rows from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

SUM_LANES = 8
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
def sum_squares(values: Any, sums: Any) -> Any:
    """Add the squares of finite values to `sums`, float64 (SUM_LANES,), and return how many are finite.

    `values` is flat float32. Value j belongs to sum j mod SUM_LANES, and sums go from the first value to the last.
    """
    finite = np.int64(0)
    for j in range(np.uintp(values.size)):
        value = np.float64(values[j])
        known = abs(value) < np.inf
        sums[j & np.uintp(SUM_LANES - 1)] += value * value if known else 0.0
        finite += known
    return finite


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
