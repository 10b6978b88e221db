"""Quantizes rows block by block: ranges, parameters, codes and packing, while the block is in the cache.

`values` is float32 (n, dim), finite or not. `out` is a tuple of scales and offsets, float32 (n,) each; the same as
float16, given as bits, uint16 (2, n), for rows of that kind; the rows' kinds, uint8 (n,); and packed codes, uint8
(n, bytes a row). Rows of kind 0 must be stored raw, and the rest of `out` means nothing for them. Each function returns
how many rows have float16 parameters.

Parameters are found LANES rows at a time, in one flat float64 array of lines of LANES numbers, as in `kernels.search`:
loops without branches, so that they vectorize. Float16 values are computed as float64, because numba has no float16.
Tests define parameters in readable numpy, and compare bit for bit.

Loops over columns use unsigned indices: numba then handles no negative ones, and the compiler makes vectors of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper, kernel
from cnr_codecs.kernels.building.instructions import bits_of, float_of, prefetch
from cnr_codecs.kernels.pack import codes_apart, pack_block
from cnr_codecs.kernels.scratch import Scratch, for_thread, zeros
from cnr_codecs.kernels.search import (
    BEST_STEP,
    CENTRE,
    EXPLAINED,
    put_columns,
    search_columns,
    squared_errors,
    work_size,
)

LANES = 64
# The rows' ranges. Then the lines fitted to the rows: FITTED is more than 0 where there is a line, and later the line's
# kind; FIT_ERROR is the error that it leaves. Then the chosen parameters, their kind, and the error that they leave.
LOW, HIGH, FIT_SCALE, FIT_OFFSET, FITTED, FIT_ERROR = (line * LANES for line in range(6))
SCALE, OFFSET, KIND, ERROR = (line * LANES for line in range(6, 10))
LINES = 10 * LANES

# The kinds are the payload's parameter types. A row of kind 0 is stored raw.
FLOAT16, FLOAT32 = 1.0, 2.0

_MAX_WIDENING = 1 + 2.0**-7
_MAX_SHIFT = 2.0**-7
_TINY = 2.0**-126
_FLOAT16_MAX = 65504.0
_FLOAT16_NORMAL = 2.0**-14
_FLOAT16_UNITS = 2.0**24
# Bits of a float64 that a float16, and a scale of 16 bits, have no room for.
_SPARE_16 = np.int64((1 << 42) - 1)
_SPARE_SCALE = np.int64((1 << 37) - 1)


@helper
def take_fitted(work: Any) -> None:
    """Take a row's line if it leaves no larger error than its range does, or if the range can't be stored."""
    for k in range(LANES):
        better = (work[KIND + k] == 0.0) | (work[FIT_ERROR + k] <= work[ERROR + k])
        taken = (work[FITTED + k] > 0.0) & better
        work[SCALE + k] = work[FIT_SCALE + k] if taken else work[SCALE + k]
        work[OFFSET + k] = work[FIT_OFFSET + k] if taken else work[OFFSET + k]
        work[KIND + k] = work[FITTED + k] if taken else work[KIND + k]


@helper
def _holds(scale: float, offset: float, levels: float, overflow: float) -> Any:
    """Whether the codes' span and both its ends are finite, in float32 and in the element type."""
    start = np.float32(offset)
    reach = np.float32(scale * levels)
    end = start + reach
    return (reach < np.inf) & (abs(start) < overflow) & (abs(end) < overflow)


@helper
def _ceil_float16(size: float) -> float:
    """Round a value of 0 or more to float16 towards plus infinity."""
    bits = (bits_of(size) + _SPARE_16) & ~_SPARE_16
    normal = float_of(bits)
    up = normal if size >= _FLOAT16_NORMAL else np.ceil(size * _FLOAT16_UNITS) / _FLOAT16_UNITS
    return up if up <= _FLOAT16_MAX else np.inf


@helper
def _floor_float16(value: float) -> float:
    """Round to float16 towards minus infinity, never to -0."""
    size = abs(value)
    lower = -_ceil_float16(size) + 0.0
    bits = bits_of(size) & ~_SPARE_16
    normal = float_of(bits)
    down = normal if size >= _FLOAT16_NORMAL else np.floor(size * _FLOAT16_UNITS) / _FLOAT16_UNITS
    down = down if down < _FLOAT16_MAX else _FLOAT16_MAX
    return lower if value < 0.0 else down


@helper
def _round_float16(value: float) -> float:
    """Round to the nearest float16, ties to even, never to -0."""
    size = abs(value)
    bits = bits_of(size)
    odd = (bits >> np.int64(42)) & np.int64(1)
    bits = (bits + (_SPARE_16 >> np.int64(1)) + odd) & ~_SPARE_16
    normal = float_of(bits)
    near = normal if size >= _FLOAT16_NORMAL else np.rint(size * _FLOAT16_UNITS) / _FLOAT16_UNITS
    near = near if near <= _FLOAT16_MAX else np.inf
    return (-near if value < 0.0 else near) + 0.0


@helper
def _floor_float32(value: float) -> float:
    """Round to float32 towards minus infinity, never to -0."""
    nearest = np.float32(value)
    bits = np.int32(bits_of(nearest))
    # The bits of the next float32 below: one less if it is positive, one more if negative; below 0 is the first one.
    below = bits - np.int32(1) if nearest > 0 else bits + np.int32(1)
    below = below if nearest != 0 else np.int32(-0x7FFFFFFF)
    lower = float_of(np.int32(below))
    return np.float64(lower if nearest > value else nearest) + 0.0


@helper
def _ceil_16_bits(size: float) -> float:
    """Round a value of 0 or more up to 16 significant bits. It is infinite where float32 overflows."""
    bits = (bits_of(size) + _SPARE_SCALE) & ~_SPARE_SCALE
    return np.float64(np.float32(float_of(bits)))


@helper
def _widen_parameters(work: Any, levels: float, overflow: float) -> None:
    """Compute float32 parameters of the ranges that float16 ones don't fit."""
    for k in range(LANES):
        low, high = work[LOW + k], work[HIGH + k]
        finite = abs(high - low) < np.inf
        offset = _floor_float32(low)
        scale = _ceil_16_bits((high - offset) / levels)
        fits = finite & ((low == high) | (scale >= _TINY)) & _holds(scale, offset, levels, overflow)
        served = work[KIND + k] == FLOAT16
        work[SCALE + k] = work[SCALE + k] if served else scale
        work[OFFSET + k] = work[OFFSET + k] if served else offset
        work[KIND + k] = FLOAT16 if served else (FLOAT32 if fits else 0.0)


@helper
def asymmetric_parameters(work: Any, levels: float, overflow: float) -> None:
    """Compute SCALE, OFFSET and KIND of the ranges LOW to HIGH."""
    held = 0
    for k in range(LANES):
        low, high = work[LOW + k], work[HIGH + k]
        finite = abs(high - low) < np.inf
        offset16 = _floor_float16(low)
        scale16 = _ceil_float16((high - offset16) / levels)
        narrow = scale16 * levels <= (high - low) * _MAX_WIDENING
        # A row of one value has scale 0. It fits if the value does.
        scale16 = 0.0 if low == high else scale16
        kept16 = ((low == high) & (offset16 == low)) | (narrow & (low != high))
        fits16 = finite & kept16 & _holds(scale16, offset16, levels, overflow)
        work[SCALE + k] = scale16
        work[OFFSET + k] = offset16
        work[KIND + k] = FLOAT16 if fits16 else 0.0
        held += fits16
    if held < LANES:
        _widen_parameters(work, levels, overflow)


@helper
def fitted_parameters(work: Any, levels: float, overflow: float) -> None:
    """Round the lines FIT_SCALE, FIT_OFFSET of the rows that have one, and leave their kind in FITTED."""
    for k in range(LANES):
        scale, offset = work[FIT_SCALE + k], work[FIT_OFFSET + k]
        offset16, scale16 = _round_float16(offset), _round_float16(scale)
        shift = abs(offset16 - offset) + abs(scale16 - scale) * levels
        fits16 = (shift <= scale * levels * _MAX_SHIFT) & _holds(scale16, offset16, levels, overflow)
        offset32 = np.float64(np.float32(offset)) + 0.0
        scale32 = _ceil_16_bits(scale)
        fits32 = (scale32 >= _TINY) & _holds(scale32, offset32, levels, overflow)
        fitted = (work[FITTED + k] > 0.0) & (fits16 | fits32)
        work[FIT_SCALE + k] = scale16 if fits16 else scale32
        work[FIT_OFFSET + k] = offset16 if fits16 else offset32
        work[FITTED + k] = (FLOAT16 if fits16 else FLOAT32) if fitted else 0.0


@helper
def symmetric_parameters(work: Any, levels: float, overflow: float) -> None:
    """Compute SCALE, twice the half step, OFFSET, -levels times it, and KIND of rows between LOW and HIGH."""
    for k in range(LANES):
        low, high = abs(work[LOW + k]), abs(work[HIGH + k])
        exact = (low if low > high else high) / levels
        # If an end is NaN the sum is NaN, and the row becomes raw.
        exact = exact + 0.0 * (low + high)
        half16 = _ceil_float16(exact)
        fits16 = (half16 <= exact * _MAX_WIDENING) & _holds(2 * half16, -levels * half16, levels, overflow)
        half32 = _ceil_16_bits(exact)
        fits32 = (half32 >= _TINY) & _holds(2 * half32, -levels * half32, levels, overflow)
        half = half16 if fits16 else half32
        work[SCALE + k] = 2 * half
        work[OFFSET + k] = -levels * half
        work[KIND + k] = FLOAT16 if fits16 else (FLOAT32 if fits32 else 0.0)


# Adding this to a float32 of 0 to 2**22 rounds it half even, and leaves the integer in the lowest bits.
_ROUNDING = np.float32(3 << 22)


@for_thread
def scratch_for(dim: int, bits: int) -> Scratch:
    """Memory for a block of rows: parameters, ends of ranges, codes."""
    low, high = zeros(LANES, np.float32), zeros(LANES, np.float32)
    codes = zeros(LANES * codes_apart(dim, bits) if bits < 8 else 0, np.uint8)
    return zeros(LINES, np.float64), low, high, codes


@for_thread
def search_scratch(dim: int) -> Scratch:
    """Memory for the search of a block of rows: see `kernels.search`; and what maps the rows to their levels."""
    return zeros(work_size(dim), np.float32), zeros(LANES, np.float32)


@helper
def _row_extremes(values: Any, first: int, count: int, dim: int, low: Any, high: Any) -> None:
    """Find the least and the greatest value of `count` rows of `dim` values, from row `first` on.

    -0 is below +0, and NaN beyond the infinities. The bits of float32 values, as integers, sort as positive floats do,
    and in the reverse order of negative ones. So three comparisons, which vectorize, find both ends.
    """
    start, width = np.uintp(first * dim), np.uintp(dim)
    for k in range(np.uintp(count)):
        least, greatest = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        largest = np.uint32(0)
        for j in range(width):
            value = np.int32(bits_of(values[start + k * width + j]))
            key = np.uint32(value)
            least = value if value < least else least
            greatest = value if value > greatest else greatest
            largest = key if key > largest else largest
        least, greatest = np.int32(largest) if least < 0 else least, greatest if greatest >= 0 else least
        low[k] = float_of(np.int32(least))
        high[k] = float_of(np.int32(greatest))


@helper
def _lines(found: Any, factor: Any, half: float, work: Any) -> None:
    """Convert the windows that the search found to lines in the rows' own units."""
    for k in range(LANES):
        unit = np.float64(factor[k])
        step = np.float64(found[BEST_STEP + k])
        shift = np.float64(found[CENTRE + k]) + half - step * half
        work[FIT_SCALE + k] = step / unit
        work[FIT_OFFSET + k] = work[LOW + k] + shift / unit
        work[FITTED + k] = found[EXPLAINED + k] if unit > 0.0 else 0.0


@helper
def _quantize(
    values: Any,
    first: int,
    last: int,
    dim: int,
    scales: Any,
    offsets: Any,
    top: Any,
    codes: Any,
    to: int,
    apart: int,
) -> None:
    """Compute codes: clamp((x - offset) * (1 / scale), 0, top) in float32, rounded half even. Scale 0 counts as 1."""
    start, target, width, stride = np.uintp(first), np.uintp(to), np.uintp(dim), np.uintp(apart)
    for k in range(np.uintp(last - first)):
        offset, scale = offsets[start + k], scales[start + k]
        gain = np.float32(1) / (scale if scale > 0 else np.float32(1))
        for line in range(np.uintp(0), width, np.uintp(16)):
            prefetch(values, (start + k + np.uintp(LANES)) * width + line)
        for j in range(width):
            t = (values[(start + k) * width + j] - offset) * gain
            t = t if t > np.float32(0) else np.float32(0)
            t = t if t < top else top
            codes[target + k * stride + j] = np.uint8(bits_of(np.float32(t + _ROUNDING)) & np.uint32(0xFF))


@helper
def _float16_bits(values: Any, first: int, last: int, halves: Any, line: int) -> None:
    """Convert float32s whose values are float16s to the bits of these."""
    for k in range(np.uintp(first), np.uintp(last)):
        bits = bits_of(values[k])
        size = bits & np.uint32(0x7FFFFFFF)
        normal = (size - np.uint32(0x38000000)) >> np.uint32(13)
        units = float_of(np.uint32(size)) * np.float32(1 << 24) + _ROUNDING
        small = bits_of(np.float32(units)) & np.uint32(0x3FF)
        half = normal if size >= np.uint32(0x38800000) else small
        halves[line, k] = np.uint16(half | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


@helper
def _finish(values: Any, first: int, last: int, dim: int, bits: int, work: Any, codes: Any, out: Any) -> int:
    """Write the parameters of the rows `first` to `last`, and their packed codes, to `out`.

    Return how many of these rows have float16 parameters.
    """
    scales, offsets, halves, kind, packed = out
    start, count, float16_rows = np.uintp(first), np.uintp(last - first), 0
    for k in range(count):
        scales[start + k] = np.float32(work[SCALE + k])
        offsets[start + k] = np.float32(work[OFFSET + k])
    for k in range(count):
        kind[start + k] = np.uint8(np.int32(work[KIND + k]))
        float16_rows += work[KIND + k] == FLOAT16
    for line in range(2):
        _float16_bits(offsets if line else scales, first, last, halves, line)
    # Of 8 bits, codes are written where they stay.
    whole = bits == 8
    target, to, apart = (
        packed if whole else codes,
        first * dim if whole else 0,
        dim if whole else codes.size // LANES,
    )
    _quantize(values, first, last, dim, scales, offsets, np.float32((1 << bits) - 1), target, to, apart)
    if not whole:
        pack_block(codes, last - first, dim, bits, packed, first * ((dim * bits + 7) // 8))
    return float16_rows


@kernel
def row_extremes(values: Any, count: int, dim: int, low: Any, high: Any) -> None:
    """Find the least and the greatest value of each of `count` rows of `dim` values. See `_row_extremes`."""
    _row_extremes(values, 0, count, dim, low, high)


@kernel
def encode_ranges(
    values: Any, dim: int, bits: int, overflow: float, scratch: Any, out: Any, symmetric: bool
) -> int:
    """Quantize rows over their own ranges, or over ranges that are symmetric about 0."""
    work, low, high, codes = scratch
    count, levels, float16_rows = out[0].size, np.float64((1 << bits) - 1), 0
    for first in range(0, count, LANES):
        last = first + LANES if first + LANES < count else count
        _row_extremes(values, first, last - first, dim, low, high)
        for k in range(LANES):
            work[LOW + k] = low[k]
            work[HIGH + k] = high[k]
        if symmetric:
            symmetric_parameters(work, levels, overflow)
        else:
            asymmetric_parameters(work, levels, overflow)
        float16_rows += _finish(values, first, last, dim, bits, work, codes, out)
    return float16_rows


@kernel
def encode_windows(
    values: Any, lows: Any, highs: Any, dim: int, bits: int, overflow: float, scratch: Any, out: Any
) -> int:
    """Quantize rows over given ranges, `lows` to `highs` (float64 (n,)). Values beyond them are clamped."""
    work, _, _, codes = scratch
    count, levels, float16_rows = out[0].size, np.float64((1 << bits) - 1), 0
    for first in range(0, count, LANES):
        last = first + LANES if first + LANES < count else count
        for k in range(last - first):
            work[LOW + k] = lows[first + k]
            work[HIGH + k] = highs[first + k]
        asymmetric_parameters(work, levels, overflow)
        float16_rows += _finish(values, first, last, dim, bits, work, codes, out)
    return float16_rows


@kernel
def encode_searched(
    values: Any, dim: int, bits: int, normal_step: Any, overflow: float, scratch: Any, search: Any, out: Any
) -> int:
    """Quantize each row with the scale and offset that a search finds, where these are better than its range's."""
    work, low, high, codes = scratch
    columns, factor = search
    count, levels, float16_rows = out[0].size, (1 << bits) - 1, 0
    top = np.float64(levels)
    for first in range(0, count, LANES):
        last = first + LANES if first + LANES < count else count
        _row_extremes(values, first, last - first, dim, low, high)
        for k in range(LANES):
            work[LOW + k] = low[k]
            work[HIGH + k] = high[k]
            # What maps the row's range to its levels, or 0 where no float32 does: the search then finds nothing.
            span = high[k] - low[k]
            gain = np.float32(levels) / span
            factor[k] = gain if (span < np.inf) & (gain < np.inf) else np.float32(0)
        put_columns(values, first, last - first, dim, columns)
        search_columns(dim, low, factor, levels, normal_step, columns)
        _lines(columns, factor, top * 0.5, work)
        asymmetric_parameters(work, top, overflow)
        fitted_parameters(work, top, overflow)
        put_columns(values, first, last - first, dim, columns)
        # First the errors of the ranges, then of the lines.
        for scale, offset, error in ((SCALE, OFFSET, ERROR), (FIT_SCALE, FIT_OFFSET, FIT_ERROR)):
            squared_errors(work, scale, offset, factor, levels, dim, columns, error)
        take_fitted(work)
        float16_rows += _finish(values, first, last, dim, bits, work, codes, out)
    return float16_rows
