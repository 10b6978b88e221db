"""Rows as integers, on one step or a floating grid: finds the integers of rows, and writes rows from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper, kernel
from cnr_codecs.kernels.building.instructions import bits_of, float_of, prefetch

# Beyond every limit, and within an int32.
_BEYOND = np.float64(1 << 16)
_1 = np.uint64(1)
# The least normal float32.
_LEAST = np.float32(2.0**-126)
# Sums lie anywhere in memory: those of a row are asked for so many rows before they are needed.
_AHEAD = 12
_LINE = 16
"""Sums of a line of the cache."""


@kernel
def quantize(values: Any, dim: int, inverse: float, limit: int, codes: Any, raw: Any) -> Any:
    """Write the codes of rows to `codes` (int16), one row after the other, and return how many rows have any.

    `values` is flat float32. A code is the value times `inverse`, as float64, rounded half even. A row that is not
    finite, has a code beyond `limit`, or is not zero and would be, is marked in `raw` (uint8), and its codes are
    overwritten.
    """
    width, held = np.uintp(dim), np.int64(0)
    for i in range(raw.size):
        start, place = np.uintp(i * dim), np.uintp(held * dim)
        most, size = np.int32(0), np.float32(0)
        for j in range(width):
            size = max(size, abs(values[start + j]))
            exact = np.float64(values[start + j]) * inverse
            # NaN fails each comparison, and ends beyond every limit.
            exact = exact if exact > -_BEYOND else -_BEYOND
            exact = exact if exact < _BEYOND else _BEYOND
            code = np.int32(np.rint(exact))
            codes[place + j] = np.int16(code)
            most = max(most, abs(code))
        has_none = most > limit or (most == 0 and size > 0)
        raw[i] = has_none
        held += not has_none
    return held


@kernel
def count_zero_rows(codes: Any, dim: int) -> int:
    """Return how many rows of flat codes (int16 or int32) are of zeros alone."""
    found, width = 0, np.uintp(dim)
    for i in range(codes.size // dim):
        start, any_bit = np.uintp(i * dim), np.int16(0)
        for j in range(width):
            any_bit |= codes[start + j]
        found += any_bit == 0
    return found


@kernel
def count_magnitudes(values: Any, drop: int, counts: Any) -> None:
    """Count flat float32, but 0 and what is not finite, by the bits of their magnitude above the lowest `drop`."""
    low = np.uint32(drop)
    for j in range(np.uintp(values.size)):
        size = bits_of(values[j]) & np.uint32(0x7FFFFFFF)
        if size != 0 and size < np.uint32(0x7F800000):
            counts[size >> low] += 1


@kernel
def place_rows(codes: Any, dim: int, grid: Any, rows: Any, place: Any) -> int:
    """Write the wanted ones of `rows` (uint32) to `flat` (float32), clear their marks, and return their number.

    Row i of `rows` has the codes from i * `dim` on. `place` is as in `kernels.decode`.

    `grid`: step, shift, scale, what codes are raised by, the lowest magnitude. A value is its code times the step. If
    that is 0, its bits are the code's magnitude, shifted by so many bits, and sign; negative codes that are exact,
    which are int32, have magnitudes from 0 on. If the scale is not 1, or codes are raised, magnitudes are first
    lessened by as much, and what their bits stand for is divided by the scale; one below the lowest that was not 0
    stands for the least normal number.
    """
    (step, shift, scale, raised, lowest), (first_row, need, flat, stride) = grid, place
    is_still = scale == 1 and raised == 0
    written, width, narrow = 0, np.uintp(dim), np.int64(codes.itemsize == 2)  # a constant of the compiler's
    for i in range(rows.size):
        row = np.int64(rows[i]) - first_row
        if row < 0 or row >= need.size or need[row] == 0:
            continue
        need[row] = 0
        written += 1
        source, to = np.uintp(i * dim), np.uintp(row * stride)
        if step > 0:
            for j in range(width):
                flat[to + j] = step * np.float32(codes[source + j])
            continue
        if not is_still:
            for j in range(width):
                number = np.int32(codes[source + j])
                magnitude = np.int32(abs(number) - np.int32(raised))
                value = float_of(np.uint32(max(magnitude, np.int32(lowest)) << np.int32(shift))) / scale
                value = value if magnitude >= lowest else _LEAST
                value = value if number > 0 else -value
                flat[to + j] = value if number else np.float32(0)
            continue
        for j in range(width):
            code = np.int64(codes[source + j])
            negative = code >> 63
            size = (code ^ negative) - negative * narrow
            flat[to + j] = float_of(np.uint32((size << shift) | (negative & 0x80000000)))
    return written


@kernel
def quantize_floating(
    bits: Any, dim: int, sign: int, shift: int, bias: int, limits: Any, codes: Any, raw: Any
) -> Any:
    """Write the codes of rows to `codes` (int16), one row after the other, and return how many rows have any.

    `bits` is flat uint32 or uint64: numbers whose sign is bit `sign`. A code's magnitude is what stands above `shift`
    bits, to which these are rounded half even, less `bias`; `raised` is added to those other than 0. A row with a
    magnitude that was neither that of 0 nor from `lowest` to `most` is marked in `raw` (uint8), and its codes are
    overwritten. But where there is no `bias`, smaller ones become `least`, or 0 in rows with negative values.

    `limits`: `least`, `lowest`, `most` and `raised`.
    """
    least, lowest, most, raised = limits
    width, held = np.uintp(dim), np.int64(0)
    below, top = np.uint64(shift), np.uint64(sign)
    mask, half = (_1 << top) - _1, (_1 << (below - _1)) - _1
    for i in range(raw.size):
        start, place = np.uintp(i * dim), np.uintp(held * dim)
        bad: Any = False
        signs = np.uint64(0)
        for j in range(width):
            number = np.uint64(bits[start + j])
            signs |= number if number & mask else np.uint64(0)
        small = 0 if signs >> top else least
        for j in range(width):
            number = np.uint64(bits[start + j])
            size = number & mask
            magnitude: Any = np.int64((size + half + ((size >> below) & _1)) >> below) - bias
            magnitude = magnitude if size else 0
            is_small = size != 0 and magnitude < lowest
            bad |= magnitude > most or (is_small and bias != 0)
            magnitude = small if is_small else magnitude + (raised if size else 0)
            codes[place + j] = np.int16(-magnitude if number >> top else magnitude)
        raw[i] = bad
        held += not bad
    return held


@helper
def scaled(value: Any, scale: Any) -> Any:
    is_small = abs(value) <= _LEAST
    product = (np.float32(0) if is_small else value) * scale
    return value if is_small else product


@kernel
def scale_floats(values: Any, scale: Any, out: Any) -> None:
    """Write flat float32 times `scale` to `out`, but those up to the least normal number as they are.

    With smaller ones processors are slow.
    """
    for j in range(np.uintp(values.size)):
        out[j] = scaled(values[j], scale)


@kernel
def find_centers(codes: Any, line: int, shift: int, centers: Any) -> None:
    """Write the mean of each line's magnitudes that are not 0, rounded down, to `centers` (int64); 0 without any.

    `codes` is flat int16. A magnitude is shifted by `shift` bits, the lowest of which is the sign.
    """
    for i in range(centers.size):
        total, count = np.int64(0), np.int64(0)
        for j in range(np.uintp(i * line), np.uintp(min((i + 1) * line, codes.size))):
            code = np.int64(codes[j])
            total += (abs(code) << shift) | (code < 0)
            count += code != 0
        centers[i] = total // count if count > 0 else 0


@kernel
def center_lines(codes: Any, line: int, shift: int, centers: Any, rests: Any) -> None:
    """Write the magnitudes of each line less its center to `rests` (int32).

    0 stays 0, so differences from 0 on are raised by 1.
    """
    for i in range(centers.size):
        center = np.int64(centers[i])
        for j in range(np.uintp(i * line), np.uintp(min((i + 1) * line, codes.size))):
            code = np.int64(codes[j])
            rest = ((abs(code) << shift) | (code < 0)) - center
            rest += rest >= 0
            rests[j] = np.int32(rest if code else 0)


@kernel
def restore_lines(rests: Any, line: int, shift: int, centers: Any, least: int, most: int, codes: Any) -> bool:
    """Write the codes (int16) of lines, of what `center_lines` wrote of them. Whether all are sound.

    A code other than 0 has a magnitude from `least` to `most`. A line of zeros has the center (int64) 0.
    """
    bad: Any = False
    below, width = np.int32(shift), np.uintp(line)
    for i in range(centers.size):
        center, first = np.int32(centers[i]), np.uintp(i * line)
        for j in range(first, first + width):
            rest = np.int32(rests[j])
            magnitude = np.int32(center + rest - np.int32(rest > 0))
            size = np.int32(magnitude >> below)
            bad |= rest != 0 and (center == 0 or size < least or size > most)
            negative = np.int32(magnitude & below)
            code = np.int32((size ^ -negative) + negative)
            codes[j] = np.int16(code if rest else 0)
    return not bad


@kernel
def add_rows(codes: Any, dim: int, grid: int, rows: Any, first_row: int, need: Any, kept: Any) -> bool:
    """Add the differences of the wanted ones of `rows` (uint32) to their sums. Whether no sum has another grid.

    `first_row` and `need` are as in `kernels.decode`; marks of 1 become 2, which says that there is a sum. What is
    `kept`: `sums`, `place`, `stride`, `grids` and `base`. Row i of the output has the sum (int32) from `place` + i *
    `stride` on, and the number `grids[base + i]` (uint8) of its grid.
    """
    sums, place, stride, grids, base = kept
    width = np.uintp(dim)
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            to = np.uintp(place + (np.int64(rows[i + _AHEAD]) - first_row) * stride)
            for j in range(np.uintp(0), width, np.uintp(_LINE)):
                prefetch(sums, to + j)
        row = np.int64(rows[i]) - first_row
        if row < 0 or row >= need.size or need[row] == 0:
            continue
        source, to = np.uintp(i * dim), np.uintp(place + row * stride)
        if need[row] == 1:
            need[row] = 2
            grids[base + row] = grid
            for j in range(width):
                sums[to + j] = codes[source + j]
        elif grids[base + row] != grid:
            return False
        else:
            for j in range(width):
                sums[to + j] += codes[source + j]
    return True


@kernel
def settle_rows(
    codes: Any, dim: int, grid: int, rows: Any, first_row: int, need: Any, kept: Any, limits: Any
) -> Any:
    """Add codes to the sums of those of `rows` that have any, and the sums to these codes.

    Return 0; 1 if the magnitude of a sum is neither 0 nor within `limits`, the least and the most; -1 if a sum has
    another grid. The other arguments are as for `add_rows`.
    """
    (sums, place, stride, grids, base), (least, most) = kept, limits
    width, bad = np.uintp(dim), False
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            to = np.uintp(place + (np.int64(rows[i + _AHEAD]) - first_row) * stride)
            for j in range(np.uintp(0), width, np.uintp(_LINE)):
                prefetch(sums, to + j)
        row = np.int64(rows[i]) - first_row
        if row < 0 or row >= need.size or need[row] != 2:
            continue
        if grids[base + row] != grid:
            return -1
        source, to = np.uintp(i * dim), np.uintp(place + row * stride)
        for j in range(width):
            code = np.int64(codes[source + j]) + np.int64(sums[to + j])
            size = abs(code)
            bad |= (size != 0) & ((size < least) | (size > most))
            codes[source + j] = np.int32(code)
            sums[to + j] = np.int32(code)
    return int(bad)


@kernel
def find_codes(values: Any, rows: Any, step: Any, shift: int, dim: int, codes: Any) -> None:
    """Write the codes of `rows` (int64) of `values`, flat float32 that `place_rows` made of them, one after the other.

    A negative row is none, and has zeros.
    """
    # A value is exactly its step times its code.
    inverse, width, low = np.float32(1) / step, np.uintp(dim), np.uint32(shift)
    narrow = np.int32(codes.itemsize == 2)
    for i in range(rows.size):
        row, to = np.int64(rows[i]), np.uintp(i * dim)
        if row < 0:
            for j in range(width):
                codes[to + j] = 0
            continue
        source = np.uintp(row * dim)
        if step > 0:
            for j in range(width):
                codes[to + j] = np.int16(np.rint(values[source + j] * inverse))
            continue
        for j in range(width):
            bits = bits_of(values[source + j])
            size = np.int32((bits & np.uint32(0x7FFFFFFF)) >> low)
            sign = np.int32(bits >> np.uint32(31))
            codes[to + j] = np.int32((size ^ -sign) + sign * narrow)
