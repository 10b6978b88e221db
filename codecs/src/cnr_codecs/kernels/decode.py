"""Decodes wanted rows of segments, but those of integers.

`rows` are the chunk's rows of a block (uint32, increasing), in the order of `codes` (uint8, flat) and of the
parameters. `place` says where they go: `first_row`, `need`, `flat` and `stride`. Row i is written to row `rows[i] -
first_row` of the output, if that lies in `need` (uint8) and is marked there. The mark is then cleared. The output is
`flat`, whose row r starts at r * stride. `listed`, `chosen` and `places` (int64), is scratch memory for one row more
than there are. Each function returns how many rows it wrote.

The wanted rows are listed before any is decoded: a branch beside the decoding, taken at random, would cost several
times the decoding.

Uniformly quantized segments are decoded block by block. What is `stored` of one: `packed`, uint8 and flat, the codes of
its `count` rows; its parameters, (2, count) or (1, count), in `halves` (uint16: the bits of float16) or in `floats`
(float32), of which the other is (0, 0); `bits`, `dim`, and `apart` of `kernels.pack`. The `part` of it that is decoded:
rows `start` to `stop`, and `rows`; if that is empty, row i is the chunk's row i. `scratch` is that of `scratch_for`.
Loops over columns use unsigned indices: numba then handles no negative ones, and the compiler makes vectors of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper, kernel
from cnr_codecs.kernels.building.instructions import bits_of, float_of
from cnr_codecs.kernels.pack import codes_apart, unpack_block
from cnr_codecs.kernels.scratch import Scratch, for_thread, zeros

# Codes and rows of a block: what is decoded from them stays in the cache.
_BLOCK_CODES, _BLOCK_ROWS = 1 << 13, 1 << 9
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


@for_thread
def scratch_for(dim: int, bits: int) -> Scratch:
    """Memory for a block of rows: their codes and the same read-only, scales, offsets, their numbers and places."""
    rows = max(1, min(_BLOCK_CODES // dim, _BLOCK_ROWS))
    codes = zeros(0 if bits == 8 else rows * codes_apart(dim, bits), np.uint8)
    read = codes.view()
    read.flags.writeable = False
    scale, offset = zeros(rows, np.float32), zeros(rows, np.float32)
    return codes, read, scale, offset, zeros(rows, np.int64), zeros(rows, np.int64)


@helper
def _dequantize(
    codes: Any, at: int, apart: int, scale: Any, offset: Any, count: int, dim: int, flat: Any, to: int
) -> None:
    """Write scale * code + offset of each row to flat[to:]."""
    start, step_codes, width, target = np.uintp(at), np.uintp(apart), np.uintp(dim), np.uintp(to)
    for k in range(np.uintp(count)):
        step, low = scale[k], offset[k]
        for j in range(width):
            code = np.float32(np.int32(codes[start + k * step_codes + j]))
            flat[target + k * width + j] = step * code + low


@helper
def _scatter(
    codes: Any,
    at: int,
    apart: int,
    alone: bool,
    scale: Any,
    offset: Any,
    chosen: Any,
    count: int,
    dim: int,
    flat: Any,
    places: Any,
    stride: int,
) -> None:
    """Write the chosen rows to the rows `places` of `flat`. `codes` has all rows, or the chosen ones `alone`."""
    width = np.uintp(dim)
    for k in range(np.uintp(count)):
        row = np.uintp(chosen[k])
        step, low = scale[row], offset[row]
        source = np.uintp(at) + (k if alone else row) * np.uintp(apart)
        to = np.uintp(places[k]) * np.uintp(stride)
        for j in range(width):
            flat[to + j] = step * np.float32(np.int32(codes[source + j])) + low


@helper
def _widen(halves: Any, line: int, first: int, count: int, out: Any) -> None:
    """Widen finite float16s, given as bits. No step is a subnormal float32, which a thread may flush to zero."""
    start = np.uintp(first)
    for k in range(np.uintp(count)):
        half = np.uint32(halves[line, start + k])
        size = half & np.uint32(0x7FFF)
        normal = float_of(np.uint32((size << np.uint32(13)) + np.uint32(0x38000000)))
        small = np.float32(np.int32(size)) * np.float32(2.0**-24)
        value = normal if size >= np.uint32(0x400) else small
        out[k] = value if half < np.uint32(0x8000) else -value


@helper
def _valid_halves(bits: Any) -> Any:
    """Whether float16s, `bits` (uint16 (1 or 2, n)), are all finite, and none of the first row, of scales, negative."""
    worst = np.uint16(0)
    for k in range(bits.shape[1]):
        # As integers, negative and non-finite numbers are the greatest.
        worst = bits[0, k] if bits[0, k] > worst else worst
    for k in range(bits.shape[1] if len(bits) > 1 else 0):
        size = bits[1, k] & np.uint16(0x7FFF)
        worst = size if size > worst else worst
    return worst < np.uint16(0x7C00)


@helper
def _affine(halves: Any, floats: Any, first: int, last: int, bits: int, scale: Any, offset: Any) -> None:
    """Compute scale and offset of the segment's rows `first` to `last`: a code q decodes to scale * q + offset.

    A half step h decodes a code to h * (2q - (2**bits - 1)). That is scale 2h and offset -h * (2**bits - 1), both
    exact, so a row of zeros decodes to +0.
    """
    count, start = np.uintp(last - first), np.uintp(first)
    lines = len(halves) + len(floats)
    for line in range(lines):
        out = offset if line else scale
        if len(halves):
            _widen(halves, line, first, last - first, out)
        else:
            for k in range(count):
                out[k] = floats[line, start + k]
    if lines == 1:
        most = np.float32(1 - (1 << bits))
        for k in range(count):
            offset[k] = scale[k] * most
            scale[k] = scale[k] * np.float32(2)


@helper
def _round_bfloat16(flat: Any, places: Any, count: int, dim: int, stride: int) -> None:
    """Round rows to the nearest bfloat16, ties to even. No value is NaN."""
    for k in range(np.uintp(count)):
        start = np.uintp(places[k]) * np.uintp(stride)
        for j in range(np.uintp(dim)):
            bits = bits_of(flat[start + j])
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = np.uint32((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000))
            flat[start + j] = float_of(rounded)


@helper
def _round_float16(wide: Any, count: int, dim: int, flat: Any, places: Any, stride: int) -> None:
    """Write rows of `wide` to `flat`, rounded to the nearest float16, ties to even. No value is NaN."""
    width = np.uintp(dim)
    for k in range(np.uintp(count)):
        start = np.uintp(places[k]) * np.uintp(stride)
        for j in range(width):
            value = np.float32(wide[k * width + j])
            bits = bits_of(value)
            sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
            size = bits & np.uint32(0x7FFFFFFF)
            odd = (size >> np.uint32(13)) & np.uint32(1)
            normal = (size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
            # Subnormal float16s are multiples of 2**-24. Adding 1.5 * 2**23 rounds to whole ones.
            units = abs(value) * np.float32(1 << 24) + np.float32(3 << 22)
            small = bits_of(np.float32(units)) & np.uint32(0xFFFF)
            half = normal if size >= np.uint32(0x38800000) else small
            half = half if size < np.uint32(0x47800000) else np.uint32(0x7C00)
            flat[start + j] = np.uint16(sign | half)


@kernel
def decode_all(packed: Any, halves: Any, bits: int, dim: int, apart: int, flat: Any, scratch: Any) -> bool:
    """Write all rows of a segment to `flat` (float32). Return False, and write none, if a parameter is not valid."""
    codes, read, scale, offset, _, _ = scratch
    if not _valid_halves(halves):
        return False
    count, width = halves.shape[1], (dim * bits + 7) // 8
    for first in range(0, count, scale.size):
        held = scale.size if scale.size < count - first else count - first
        for line in range(2):
            _widen(halves, line, first, held, offset if line else scale)
        source, at = packed, first * width
        if bits < 8:
            unpack_block(packed, at, held, dim, bits, codes, 0)
            source, at = read, 0
        _dequantize(source, at, apart, scale, offset, held, dim, flat, first * dim)
    return True


@kernel
def decode_float32(stored: Any, part: Any, place: Any, to_bfloat16: bool, scratch: Any) -> int:
    """Write rows to `flat` (float32), rounded to bfloat16 if `to_bfloat16`."""
    packed, halves, floats, bits, dim, apart = stored
    (start, stop, rows), (first_row, need, flat, stride) = part, place
    codes, read, scale, offset, chosen, places = scratch
    width, written = (dim * bits + 7) // 8, 0
    for first in range(start, stop, scale.size):
        last = first + scale.size if first + scale.size < stop else stop
        count = choose(rows, start, first, last, first_row, need, chosen, places)
        if count == 0:
            continue
        written += count
        _affine(halves, floats, first, last, bits, scale, offset)
        # SIMD unpacks a block of 2 or 4 bits in no time; of other bits only the wanted rows, where these are few.
        source, at, alone = packed, first * width, False
        if bits < 8:
            alone = bits != 4 and bits != 2 and 2 * count <= last - first
            for k in range(count if alone else 1):
                row, held = (chosen[k], 1) if alone else (0, last - first)
                unpack_block(packed, at + row * width, held, dim, bits, codes, k * apart)
            source, at = read, 0
        if count == last - first and stride == dim and places[count - 1] - places[0] == count - 1:
            _dequantize(source, at, apart, scale, offset, count, dim, flat, places[0] * stride)
        else:
            _scatter(source, at, apart, alone, scale, offset, chosen, count, dim, flat, places, stride)
        if to_bfloat16:
            _round_bfloat16(flat, places, count, dim, stride)
    return written


@kernel
def decode_float16(stored: Any, part: Any, place: Any, scratch: Any, wide: Any, numbers: Any) -> int:
    """Write rows to `flat` (uint16: the bits of float16). `numbers` are 0 to the most rows of a block, less 1."""
    packed, halves, floats, bits, dim, apart = stored
    (start, stop, rows), (first_row, need, flat, stride) = part, place
    codes, read, scale, offset, chosen, places = scratch
    width, written = (dim * bits + 7) // 8, 0
    for first in range(start, stop, scale.size):
        last = first + scale.size if first + scale.size < stop else stop
        count = choose(rows, start, first, last, first_row, need, chosen, places)
        if count == 0:
            continue
        written += count
        _affine(halves, floats, first, last, bits, scale, offset)
        # SIMD unpacks a block of 2 or 4 bits in no time; of other bits only the wanted rows, where these are few.
        source, at, alone = packed, first * width, False
        if bits < 8:
            alone = bits != 4 and bits != 2 and 2 * count <= last - first
            for k in range(count if alone else 1):
                row, held = (chosen[k], 1) if alone else (0, last - first)
                unpack_block(packed, at + row * width, held, dim, bits, codes, k * apart)
            source, at = read, 0
        _scatter(source, at, apart, alone, scale, offset, chosen, count, dim, wide, numbers, dim)
        _round_float16(wide, count, dim, flat, places, stride)
    return written
