"""Quantizes rows block by block: ranges, parameters, codes and packing, while the block is in the cache.

`values` is float32 (n, dim), finite or not. `out` is a tuple of scales and offsets, float32 (n,) each; the same as
float16, given as bits, uint16 (2, n), for rows of that kind; the rows' kinds, uint8 (n,); and packed codes, uint8
(n, bytes a row). Rows of kind 0 must be stored raw, and the rest of `out` means nothing for them. Each function returns
how many rows have float16 parameters.

Loops over columns use unsigned indices: numba then handles no negative ones, and the compiler makes vectors of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper, kernel
from cnr_codecs.kernels.building.instructions import bits_of, float_of, prefetch
from cnr_codecs.kernels.pack import codes_apart, pack_block
from cnr_codecs.kernels.parameters import (
    ERROR,
    FIT_ERROR,
    FIT_OFFSET,
    FIT_SCALE,
    FITTED,
    FLOAT16,
    HIGH,
    KIND,
    LANES,
    LINES,
    LOW,
    OFFSET,
    SCALE,
    asymmetric_parameters,
    fitted_parameters,
    symmetric_parameters,
    take_fitted,
)
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
