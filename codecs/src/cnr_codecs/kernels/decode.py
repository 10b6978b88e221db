"""Rows out of segments, into the rows of an array that ask for them.

`rows` are the chunk's rows of a block (uint32), matching the rows of `codes` and the parameters. A row goes
to row `rows[i] - first_row` of the output if that lies within `need` (uint8) and is marked there; the mark
is then cleared. The output is `flat`, whose row r starts at r * stride.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cnr_codecs.kernels.pack import unpack_row


@njit(nogil=True, cache=True)
def _wanted(row: Any, first_row: int, need: Any) -> Any:
    """The row of the output, or -1."""
    r = np.int64(row) - first_row
    if r < 0 or r >= need.size or need[r] == 0:
        return -1
    return r


@njit(nogil=True, cache=True)
def decode_float32(
    codes: Any,
    rows: Any,
    scale: Any,
    offset: Any,
    bits: int,
    dim: int,
    to_bfloat16: bool,
    first_row: int,
    need: Any,
    flat: Any,
    stride: int,
) -> int:
    """Rows into `flat` (float32), rounded to bfloat16 if asked; the number of rows written."""
    unpacked = np.empty(dim, np.uint8)
    written = 0
    for i in range(rows.size):
        r = _wanted(rows[i], first_row, need)
        if r < 0:
            continue
        unpack_row(codes[i], bits, unpacked)
        line = flat[r * stride : r * stride + dim]
        _dequantize(unpacked, scale[i], offset[i], line)
        if to_bfloat16:
            _round_bfloat16(line.view(np.uint32))
        need[r] = 0
        written += 1
    return written


@njit(nogil=True, cache=True)
def decode_float16(
    codes: Any,
    rows: Any,
    scale: Any,
    offset: Any,
    bits: int,
    dim: int,
    first_row: int,
    need: Any,
    flat: Any,
    stride: int,
) -> int:
    """Rows into `flat` (uint16: the bits of float16); the number of rows written."""
    unpacked = np.empty(dim, np.uint8)
    line = np.empty(dim, np.float32)
    written = 0
    for i in range(rows.size):
        r = _wanted(rows[i], first_row, need)
        if r < 0:
            continue
        unpack_row(codes[i], bits, unpacked)
        _dequantize(unpacked, scale[i], offset[i], line)
        _round_float16(line, line.view(np.uint32), flat[r * stride : r * stride + dim])
        need[r] = 0
        written += 1
    return written


@njit(nogil=True, cache=True)
def look_up(
    codes: Any,
    rows: Any,
    table: Any,
    books: Any,
    bits: int,
    dim: int,
    first_row: int,
    need: Any,
    flat: Any,
    stride: int,
) -> int:
    """Rows into `flat`: the values that `table` (codebooks, 2**bits), of the same dtype, has for their codes in
    their codebook (`books`: uint32); the number of rows written.
    """
    unpacked = np.empty(dim, np.uint8)
    written = 0
    for i in range(rows.size):
        r = _wanted(rows[i], first_row, need)
        if r < 0:
            continue
        unpack_row(codes[i], bits, unpacked)
        book = table[books[i]]
        for j in range(dim):
            flat[r * stride + j] = book[unpacked[j]]
        need[r] = 0
        written += 1
    return written


@njit(nogil=True, cache=True)
def copy_raw(codes: Any, rows: Any, first_row: int, need: Any, flat: Any, stride: int) -> int:
    """Raw values into `flat` (uint8: the bytes of the output, as is `stride`); the number of rows written."""
    written = 0
    for i in range(rows.size):
        r = _wanted(rows[i], first_row, need)
        if r < 0:
            continue
        flat[r * stride : r * stride + codes.shape[1]] = codes[i]
        need[r] = 0
        written += 1
    return written


@njit(nogil=True, cache=True)
def widen_bfloat16(codes: Any, rows: Any, first_row: int, need: Any, flat: Any, stride: int) -> int:
    """Raw bfloat16 values into `flat` (uint32: the bits of float32); the number of rows written."""
    dim = codes.shape[1] // 2
    written = 0
    for i in range(rows.size):
        r = _wanted(rows[i], first_row, need)
        if r < 0:
            continue
        for j in range(dim):
            flat[r * stride + j] = (np.uint32(codes[i, 2 * j]) << 16) | (np.uint32(codes[i, 2 * j + 1]) << 24)
        need[r] = 0
        written += 1
    return written


@njit(nogil=True, cache=True)
def _dequantize(codes: Any, scale: Any, offset: Any, line: Any) -> None:
    for j in range(codes.size):
        line[j] = scale * np.float32(codes[j]) + offset


@njit(nogil=True, cache=True)
def _round_bfloat16(bits: Any) -> None:
    """Round to the nearest bfloat16, ties to even. Codes decode to no NaN."""
    for j in range(bits.size):
        odd = (bits[j] >> np.uint32(16)) & np.uint32(1)
        bits[j] = (bits[j] + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)


@njit(nogil=True, cache=True)
def _round_float16(line: Any, bits: Any, out: Any) -> None:
    """Round to the nearest float16, ties to even; `bits` is `line` as uint32. Codes decode to no NaN."""
    for j in range(line.size):
        sign = (bits[j] >> np.uint32(16)) & np.uint32(0x8000)
        magnitude = bits[j] & np.uint32(0x7FFFFFFF)
        if magnitude >= np.uint32(0x47800000):
            half = np.uint32(0x7C00)
        elif magnitude < np.uint32(0x38800000):
            # Below the normal range a float16 counts in units of 2**-24.
            half = np.uint32(np.rint(abs(line[j]) * np.float32(16777216)))
        else:
            odd = (magnitude >> np.uint32(13)) & np.uint32(1)
            half = (magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
        out[j] = np.uint16(sign | half)
