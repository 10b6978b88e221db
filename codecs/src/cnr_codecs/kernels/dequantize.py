"""Decodes wanted rows of uniformly quantized segments, block by block.

`packed`, uint8 (n, bytes a row), has the codes of a segment. Its parameters, (2, n) or (1, n), are in `halves`
(uint16: the bits of float16) or in `floats` (float32); the other array is (0, 0). The segment's rows `start` to
`stop` are decoded. `rows` (uint32) has their rows of the chunk; if it is empty, row i is the chunk's row i. A row is
written to row `row - first_row` of the output, if that lies within `need` (uint8) and is marked there. The mark is
then cleared. The output is `flat`, whose row r starts at r * stride. Each function returns how many rows it wrote.

Loops over columns use unsigned indices: numba then handles no negative ones, and the compiler makes vectors of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cnr_codecs.kernels.pack import unpack_rows
from cnr_codecs.kernels.validate import valid_halves

# Codes and rows of a block: what is decoded from them stays in the cache.
_BLOCK_CODES, _BLOCK_ROWS = 1 << 13, 1 << 9


@njit(nogil=True, cache=True, error_model="numpy")
def decode_all(packed: Any, halves: Any, bits: int, dim: int, flat: Any) -> bool:
    """Write all rows of a segment to `flat` (float32). Return False, and write none, if a parameter is not valid."""
    if not valid_halves(halves):
        return False
    most = max(1, min(_BLOCK_CODES // dim, _BLOCK_ROWS))
    codes = np.empty(most * dim if bits < 8 else 0, np.uint8)
    scale, offset = np.empty(most, np.float32), np.empty(most, np.float32)
    for first in range(0, len(packed), most):
        last = min(first + most, len(packed))
        _widen(halves[0][first:last], scale)
        _widen(halves[1][first:last], offset)
        _decode(packed[first:last], bits, dim, scale, offset, codes, flat[first * dim :], dim)
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def decode_float32(
    packed: Any,
    halves: Any,
    floats: Any,
    bits: int,
    dim: int,
    start: int,
    stop: int,
    rows: Any,
    first_row: int,
    need: Any,
    flat: Any,
    stride: int,
    to_bfloat16: bool,
) -> int:
    """Write rows to `flat` (float32), rounded to bfloat16 if `to_bfloat16`."""
    most = max(1, min(_BLOCK_CODES // dim, _BLOCK_ROWS))
    chosen, places = np.empty(most, np.int64), np.empty(most, np.int64)
    gathered, codes = np.empty((most, packed.shape[1]), np.uint8), np.empty(most * dim, np.uint8)
    scale, offset = np.empty(most, np.float32), np.empty(most, np.float32)
    wide = np.empty(most * dim, np.float32)
    written = 0
    for first in range(start, stop, most):
        last = min(first + most, stop)
        count = _choose(rows, start, first, last, first_row, need, chosen, places)
        if count == 0:
            continue
        written += count
        _affine(halves, floats, first, last, bits, scale, offset)
        together = places[count - 1] - places[0] == count - 1
        if not together and not to_bfloat16 and 2 * count > last - first:
            # Most of the block is wanted: to unpack all of it costs less than to gather the wanted rows.
            block = packed[first:last]
            _scatter(block, bits, dim, scale, offset, codes, chosen[:count], flat, places, stride)
            continue
        block = _gather(packed[first:last], chosen[:count], gathered, scale, offset)
        if together and not to_bfloat16:
            _decode(block, bits, dim, scale, offset, codes, flat[places[0] * stride :], stride)
            continue
        _decode(block, bits, dim, scale, offset, codes, wide, dim)
        if to_bfloat16:
            _round_bfloat16(wide[: count * dim].view(np.uint32))
        for k in range(count):
            _copy(wide, k * dim, flat, places[k] * stride, dim)
    return written


@njit(nogil=True, cache=True, error_model="numpy")
def decode_float16(
    packed: Any,
    halves: Any,
    floats: Any,
    bits: int,
    dim: int,
    start: int,
    stop: int,
    rows: Any,
    first_row: int,
    need: Any,
    flat: Any,
    stride: int,
) -> int:
    """Write rows to `flat` (uint16: the bits of float16)."""
    most = max(1, min(_BLOCK_CODES // dim, _BLOCK_ROWS))
    chosen, places = np.empty(most, np.int64), np.empty(most, np.int64)
    gathered, codes = np.empty((most, packed.shape[1]), np.uint8), np.empty(most * dim, np.uint8)
    scale, offset = np.empty(most, np.float32), np.empty(most, np.float32)
    wide, narrow = np.empty(most * dim, np.float32), np.empty(most * dim, np.uint16)
    written = 0
    for first in range(start, stop, most):
        last = min(first + most, stop)
        count = _choose(rows, start, first, last, first_row, need, chosen, places)
        if count == 0:
            continue
        written += count
        _affine(halves, floats, first, last, bits, scale, offset)
        block = _gather(packed[first:last], chosen[:count], gathered, scale, offset)
        _decode(block, bits, dim, scale, offset, codes, wide, dim)
        _round_float16(wide[: count * dim], wide[: count * dim].view(np.uint32), narrow)
        for k in range(count):
            _copy(narrow, k * dim, flat, places[k] * stride, dim)
    return written


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(
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


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(packed: Any, chosen: Any, gathered: Any, scale: Any, offset: Any) -> Any:
    """Return the chosen rows of `packed`, made contiguous, and move their scales and offsets likewise."""
    if chosen.size == len(packed):
        return packed
    for k in range(chosen.size):
        line, row = gathered[k], packed[chosen[k]]
        for j in range(row.size):
            line[j] = row[j]
        scale[k] = scale[chosen[k]]
        offset[k] = offset[chosen[k]]
    return gathered[: chosen.size]


@njit(nogil=True, cache=True, error_model="numpy")
def _decode(
    packed: Any, bits: int, dim: int, scale: Any, offset: Any, codes: Any, flat: Any, stride: int
) -> None:
    """Write all rows of `packed` to `flat`, `stride` values apart."""
    if bits == 8:
        _dequantize(packed.reshape(-1), scale, offset, len(packed), dim, flat, stride)
    else:
        unpack_rows(packed, dim, bits, codes)
        _dequantize(codes, scale, offset, len(packed), dim, flat, stride)


@njit(nogil=True, cache=True, error_model="numpy")
def _dequantize(codes: Any, scale: Any, offset: Any, count: int, dim: int, flat: Any, stride: int) -> None:
    """Write scale * code + offset of each row to `flat`."""
    width, apart = np.uintp(dim), np.uintp(stride)
    for k in range(np.uintp(count)):
        step, start = scale[k], offset[k]
        for j in range(width):
            flat[k * apart + j] = step * np.float32(np.int32(codes[k * width + j])) + start


@njit(nogil=True, cache=True, error_model="numpy")
def _scatter(
    packed: Any,
    bits: int,
    dim: int,
    scale: Any,
    offset: Any,
    codes: Any,
    chosen: Any,
    flat: Any,
    places: Any,
    stride: int,
) -> None:
    """Write the chosen rows of `packed` to the rows `places` of `flat`."""
    if bits == 8:
        plain = packed.reshape(-1)
    else:
        unpack_rows(packed, dim, bits, codes)
        plain = codes
    width, apart = np.uintp(dim), np.uintp(stride)
    for k in range(np.uintp(chosen.size)):
        row = np.uintp(chosen[k])
        step, start = scale[row], offset[row]
        source, to = row * width, np.uintp(places[k]) * apart
        for j in range(width):
            flat[to + j] = step * np.float32(np.int32(plain[source + j])) + start


@njit(nogil=True, cache=True, error_model="numpy")
def _copy(source: Any, start: int, flat: Any, to: int, dim: int) -> None:
    """Copy `dim` values of `source` from `start` on to `flat` from `to` on."""
    first, target = np.uintp(start), np.uintp(to)
    for j in range(np.uintp(dim)):
        flat[target + j] = source[first + j]


@njit(nogil=True, cache=True, error_model="numpy")
def _affine(halves: Any, floats: Any, first: int, last: int, bits: int, scale: Any, offset: Any) -> None:
    """Compute scale and offset of the segment's rows `first` to `last`, as `Segment.affine` does."""
    if len(halves):
        _widen(halves[0][first:last], scale)
    else:
        scale[: last - first] = floats[0][first:last]
    if len(halves) == 2:
        _widen(halves[1][first:last], offset)
    elif len(floats) == 2:
        offset[: last - first] = floats[1][first:last]
    else:
        most = np.float32(1 - (1 << bits))
        for k in range(last - first):
            offset[k] = scale[k] * most
            scale[k] = scale[k] * np.float32(2)


@njit(nogil=True, cache=True, error_model="numpy")
def _widen(halves: Any, out: Any) -> None:
    """Widen finite float16s, given as bits. No step is a subnormal float32, which a thread may flush to zero."""
    for k in range(halves.size):
        size = np.uint32(halves[k]) & np.uint32(0x7FFF)
        normal = np.uint32((size << np.uint32(13)) + np.uint32(0x38000000)).view(np.float32)
        small = np.float32(np.int32(size)) * np.float32(2.0**-24)
        value = normal if size >= np.uint32(0x400) else small
        out[k] = value if halves[k] < np.uint16(0x8000) else -value


@njit(nogil=True, cache=True, error_model="numpy")
def _round_bfloat16(bits: Any) -> None:
    """Round to the nearest bfloat16, ties to even. No value is NaN."""
    for j in range(bits.size):
        odd = (bits[j] >> np.uint32(16)) & np.uint32(1)
        bits[j] = (bits[j] + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)


@njit(nogil=True, cache=True, error_model="numpy")
def _round_float16(line: Any, bits: Any, out: Any) -> None:
    """Round to the nearest float16, ties to even. `bits` is `line` as uint32. No value is NaN."""
    for j in range(line.size):
        sign = (bits[j] >> np.uint32(16)) & np.uint32(0x8000)
        size = bits[j] & np.uint32(0x7FFFFFFF)
        odd = (size >> np.uint32(13)) & np.uint32(1)
        normal = (size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
        # Subnormal float16s are multiples of 2**-24. Adding 1.5 * 2**23 rounds to whole ones.
        units = abs(line[j]) * np.float32(1 << 24) + np.float32(3 << 22)
        small = np.float32(units).view(np.uint32) & np.uint32(0xFFFF)
        half = normal if size >= np.uint32(0x38800000) else small
        half = half if size < np.uint32(0x47800000) else np.uint32(0x7C00)
        out[j] = np.uint16(sign | half)
