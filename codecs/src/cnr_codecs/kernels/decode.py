"""Decodes wanted rows of segments that are not quantized uniformly.

`rows` are the chunk's rows of a block (uint32, increasing), in the order of `codes` (uint8, flat) and of the
parameters. `place` says where they go: `first_row`, `need`, `flat` and `stride`. Row i is written to row `rows[i] -
first_row` of the output, if that lies in `need` (uint8) and is marked there. The mark is then cleared. The output is
`flat`, whose row r starts at r * stride. `listed`, `chosen` and `places` (int64), is scratch memory for one row more
than there are. Each function returns how many rows it wrote.

The wanted rows are listed before any is decoded: a branch beside the decoding, taken at random, would cost several
times the decoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper, kernel
from cnr_codecs.kernels.pack import unpack_block

# Of a literal, the compiler would make another copy of `choose`.
_0 = np.int64(0)


@helper
def choose(
    rows: Any, start: int, first: int, last: int, first_row: int, need: Any, chosen: Any, places: Any
) -> int:
    """List the wanted rows among the segment's rows `first` to `last`, clear their marks, and return their count.

    `chosen` gets their numbers, counted from `first`, and `places` their rows of the output.
    """
    place = (np.int64(rows[first - start]) if rows.size else first) - first_row
    end = (np.int64(rows[last - 1 - start]) if rows.size else last - 1) - first_row
    if place >= 0 and end < need.size and end - place == last - 1 - first:
        marked = 0
        for k in range(last - first):
            marked += need[place + k] != 0
        if marked == last - first:
            for k in range(last - first):
                need[place + k] = 0
                chosen[k] = k
                places[k] = place + k
            return marked
    count = 0
    for i in range(first, last):
        to = (np.int64(rows[i - start]) if rows.size else i) - first_row
        if 0 <= to < need.size:
            # There is no branch on the mark: at random marks it would cost more than the row.
            chosen[count] = i - first
            places[count] = to
            count += need[to] != 0
    for k in range(count):
        need[places[k]] = 0
    return count


@kernel
def look_up(
    codes: Any, rows: Any, table: Any, books: Any, bits: int, dim: int, place: Any, listed: Any, unpacked: Any
) -> Any:
    """Write to `flat` the values of `table` (codebooks, 2**bits), of its dtype.

    `books` (uint32) numbers each row's codebook, and the row's codes number the values in it. `unpacked` is scratch
    memory for the codes of a row.
    """
    (first_row, need, flat, stride), (chosen, places) = place, listed
    width = (dim * bits + 7) // 8
    count = np.uintp(choose(rows, _0, _0, rows.size, first_row, need, chosen, places))
    for k in range(count):
        start, book = places[k] * stride, table[books[chosen[k]]]
        unpack_block(codes, chosen[k] * width, 1, dim, bits, unpacked, 0)
        for j in range(dim):
            flat[start + j] = book[unpacked[j]]
    return np.int64(count)


@kernel
def copy_raw(codes: Any, width: int, rows: Any, place: Any, listed: Any) -> Any:
    """Write raw values, of `width` bytes a row, to `flat` (uint8, with `stride` in bytes)."""
    (first_row, need, flat, stride), (chosen, places) = place, listed
    count = np.uintp(choose(rows, _0, _0, rows.size, first_row, need, chosen, places))
    for k in range(count):
        source, to = np.uintp(chosen[k]) * np.uintp(width), np.uintp(places[k]) * np.uintp(stride)
        for j in range(np.uintp(width)):
            flat[to + j] = codes[source + j]
    return np.int64(count)


@kernel
def widen_bfloat16(codes: Any, width: int, rows: Any, place: Any, listed: Any) -> Any:
    """Write raw bfloat16 values, of `width` bytes a row, to `flat` (uint32: the bits of float32)."""
    (first_row, need, flat, stride), (chosen, places) = place, listed
    dim = np.uintp(width // 2)
    count = np.uintp(choose(rows, _0, _0, rows.size, first_row, need, chosen, places))
    for k in range(count):
        source, to = np.uintp(chosen[k]) * np.uintp(width), np.uintp(places[k]) * np.uintp(stride)
        for j in range(dim):
            low, high = codes[source + j + j], codes[source + j + j + np.uintp(1)]
            flat[to + j] = (np.uint32(low) << np.uint32(16)) | (np.uint32(high) << np.uint32(24))
    return np.int64(count)
