"""Decodes wanted rows of segments that are not quantized uniformly.

`rows` are the chunk's rows of a block (uint32, increasing), in the order of `codes` and of the parameters. Row i is
written to row `rows[i] - first_row` of the output, if that lies within `need` (uint8) and is marked there. The mark
is then cleared. The output is `flat`, whose row r starts at r * stride.

The wanted rows are listed before any is decoded: a branch beside the decoding, taken at random, would cost several
times the decoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cnr_codecs.kernels.pack import unpack_rows

# Rows whose codes are unpacked before any of them is decoded. They take some kilobytes, which stay in the cache.
_BLOCK = 32


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(rows: Any, first_row: int, need: Any) -> Any:
    """Return the wanted rows: their positions in `rows`, their rows of the output (int64). Clear their marks."""
    chosen = np.empty(rows.size + 1, np.int64)
    places = np.empty(rows.size + 1, np.int64)
    held = 0
    for i in range(rows.size):
        r = np.int64(rows[i]) - first_row
        if 0 <= r < need.size:
            chosen[held] = i
            places[held] = r
            held += need[r] != 0
    for k in range(held):
        need[places[k]] = 0
    return chosen[:held], places[:held]


@njit(nogil=True, cache=True, error_model="numpy")
def _unpack_chosen(codes: Any, chosen: Any, bits: int, dim: int, packed: Any, unpacked: Any) -> None:
    """Unpack rows of `codes` that may lie apart. They are copied to `packed` first, where they are contiguous."""
    for k in range(chosen.size):
        row = codes[chosen[k]]
        line = packed[k]
        for j in range(row.size):
            line[j] = row[j]
    unpack_rows(packed[: chosen.size], dim, bits, unpacked)


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
    """Write to `flat` the values of `table` (codebooks, 2**bits), of its dtype. Return the number of rows written.

    `books` (uint32) numbers each row's codebook, and the row's codes number the values in it.
    """
    chosen, places = _choose(rows, first_row, need)
    packed = np.empty((_BLOCK, codes.shape[1]), np.uint8)
    unpacked = np.empty(_BLOCK * dim, np.uint8)
    for first in range(0, chosen.size, _BLOCK):
        block = chosen[first : first + _BLOCK]
        _unpack_chosen(codes, block, bits, dim, packed, unpacked)
        for k in range(block.size):
            start = places[first + k] * stride
            book = table[books[block[k]]]
            for j in range(dim):
                flat[start + j] = book[unpacked[k * dim + j]]
    return len(chosen)


@njit(nogil=True, cache=True)
def copy_raw(codes: Any, rows: Any, first_row: int, need: Any, flat: Any, stride: int) -> int:
    """Write raw values to `flat` (uint8, with `stride` in bytes). Return the number of rows written."""
    chosen, places = _choose(rows, first_row, need)
    for k in range(chosen.size):
        row = codes[chosen[k]]
        line = flat[places[k] * stride : places[k] * stride + row.size]
        for j in range(row.size):
            line[j] = row[j]
    return len(chosen)


@njit(nogil=True, cache=True)
def widen_bfloat16(codes: Any, rows: Any, first_row: int, need: Any, flat: Any, stride: int) -> int:
    """Write raw bfloat16 values to `flat` (uint32: the bits of float32). Return the number of rows written."""
    dim = codes.shape[1] // 2
    chosen, places = _choose(rows, first_row, need)
    for k in range(chosen.size):
        row = codes[chosen[k]]
        line = flat[places[k] * stride : places[k] * stride + dim]
        for j in range(dim):
            line[j] = (np.uint32(row[2 * j]) << 16) | (np.uint32(row[2 * j + 1]) << 24)
    return len(chosen)
