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
from numba import njit

from cnr_codecs.kernels.pack import pack_rows
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
from cnr_codecs.kernels.prefetch import prefetch
from cnr_codecs.kernels.search import (
    BEST_STEP,
    CENTRE,
    EXPLAINED,
    put_columns,
    search,
    squared_errors,
    work_size,
)

# Adding this to a float32 of 0 to 2**22 rounds it half even, and leaves the integer in the lowest bits.
_ROUNDING = np.float32(3 << 22)


@njit(nogil=True, cache=True, error_model="numpy")
def row_extremes(bits: Any, first: int, count: int, dim: int, low: Any, high: Any) -> None:
    """Find the least and the greatest value of `count` rows of `dim` values, from row `first` on.

    `bits`, `low` and `high` are int32: the bits of float32 values. -0 is below +0, and NaN beyond the infinities.
    Integers sort as positive floats do, and in the reverse order of negative ones. So three comparisons, which
    vectorize, find both ends.
    """
    start, width = np.uintp(first * dim), np.uintp(dim)
    for k in range(np.uintp(count)):
        least, greatest = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        largest = np.uint32(0)
        for j in range(width):
            value = bits[start + k * width + j]
            least = min(least, value)
            greatest = max(greatest, value)
            largest = max(largest, np.uint32(value))
        low[k] = np.int32(largest) if least < 0 else least
        high[k] = greatest if greatest >= 0 else least


@njit(nogil=True, cache=True, error_model="numpy")
def encode_ranges(values: Any, bits: int, symmetric: bool, overflow: float, out: Any) -> int:
    """Quantize rows over their own ranges."""
    count, dim = values.shape
    levels = np.float64((1 << bits) - 1)
    work, low, high = np.zeros(LINES), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    codes = np.empty(LANES * dim, np.uint8)
    # Views are made once: for narrow rows, making them would take as long as a block does.
    flat, low_bits, high_bits = values.reshape(-1), low.view(np.int32), high.view(np.int32)
    keys = flat.view(np.int32)
    halves = 0
    for first in range(0, count, LANES):
        last = min(first + LANES, count)
        row_extremes(keys, first, last - first, dim, low_bits, high_bits)
        _ranges(low, high, work)
        if symmetric:
            symmetric_parameters(work, levels, overflow)
        else:
            asymmetric_parameters(work, levels, overflow)
        halves += _finish(flat, first, last, dim, bits, work, codes, out)
    _float16_bits(out[0], out[2][0])
    _float16_bits(out[1], out[2][1])
    return halves


@njit(nogil=True, cache=True, error_model="numpy")
def encode_windows(values: Any, low: Any, high: Any, bits: int, overflow: float, out: Any) -> int:
    """Quantize rows over given ranges, `low` to `high` (float64 (n,)). Values beyond them are clamped."""
    count, dim = values.shape
    work, codes, flat = np.zeros(LINES), np.empty(LANES * dim, np.uint8), values.reshape(-1)
    halves = 0
    for first in range(0, count, LANES):
        last = min(first + LANES, count)
        for k in range(last - first):
            work[LOW + k] = low[first + k]
            work[HIGH + k] = high[first + k]
        asymmetric_parameters(work, np.float64((1 << bits) - 1), overflow)
        halves += _finish(flat, first, last, dim, bits, work, codes, out)
    _float16_bits(out[0], out[2][0])
    _float16_bits(out[1], out[2][1])
    return halves


@njit(nogil=True, cache=True, error_model="numpy")
def encode_searched(values: Any, bits: int, normal_step: Any, overflow: float, out: Any) -> int:
    """Quantize each row with the scale and offset that a search finds, where these are better than its range's."""
    count, dim = values.shape
    levels = (1 << bits) - 1
    work, low, high = np.zeros(LINES), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    codes, flat = np.empty(LANES * dim, np.uint8), values.reshape(-1)
    search_work = np.zeros(work_size(dim), np.float32)
    factor = np.zeros(LANES, np.float32)
    halves = 0
    for first in range(0, count, LANES):
        last = min(first + LANES, count)
        row_extremes(flat.view(np.int32), first, last - first, dim, low.view(np.int32), high.view(np.int32))
        _ranges(low, high, work)
        _factors(low, high, np.float32(levels), factor)
        search(values[first:last], low, factor, levels, normal_step, search_work)
        _lines(search_work, factor, levels * 0.5, work)
        asymmetric_parameters(work, np.float64(levels), overflow)
        fitted_parameters(work, np.float64(levels), overflow)
        put_columns(values[first:last], search_work)
        _measure(SCALE, OFFSET, ERROR, factor, levels, dim, search_work, work)
        _measure(FIT_SCALE, FIT_OFFSET, FIT_ERROR, factor, levels, dim, search_work, work)
        take_fitted(work)
        halves += _finish(flat, first, last, dim, bits, work, codes, out)
    _float16_bits(out[0], out[2][0])
    _float16_bits(out[1], out[2][1])
    return halves


@njit(nogil=True, cache=True, error_model="numpy")
def _measure(
    scale: int, offset: int, error: int, factor: Any, levels: int, dim: int, columns: Any, work: Any
) -> None:
    """Compute ERROR from SCALE and OFFSET, or FIT_ERROR from FIT_SCALE and FIT_OFFSET."""
    squared_errors(
        work[scale : scale + LANES],
        work[offset : offset + LANES],
        factor,
        levels,
        dim,
        columns,
        work[error : error + LANES],
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _ranges(low: Any, high: Any, work: Any) -> None:
    """Fill in LOW and HIGH of the rows."""
    for k in range(LANES):
        work[LOW + k] = low[k]
        work[HIGH + k] = high[k]


@njit(nogil=True, cache=True, error_model="numpy")
def _factors(low: Any, high: Any, levels: Any, factor: Any) -> None:
    """Compute what maps a row's range to its levels, or 0 where no float32 does: the search then finds nothing."""
    for k in range(LANES):
        span = high[k] - low[k]
        gain = levels / span
        factor[k] = gain if (span < np.inf) & (gain < np.inf) else np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy")
def _lines(found: Any, factor: Any, half: float, work: Any) -> None:
    """Convert the windows that the search found to lines in the rows' own units."""
    for k in range(LANES):
        unit = np.float64(factor[k])
        step = np.float64(found[BEST_STEP + k])
        shift = np.float64(found[CENTRE + k]) + half - step * half
        work[FIT_SCALE + k] = step / unit
        work[FIT_OFFSET + k] = work[LOW + k] + shift / unit
        work[FITTED + k] = found[EXPLAINED + k] if unit > 0.0 else 0.0


@njit(nogil=True, cache=True, error_model="numpy")
def _finish(values: Any, first: int, last: int, dim: int, bits: int, work: Any, codes: Any, out: Any) -> int:
    """Write the parameters of the rows `first` to `last`, and their packed codes, to `out`.

    Return how many of these rows have float16 parameters.
    """
    scales, offsets, _, kind, packed = out
    start, halves = np.uintp(first), 0
    for k in range(np.uintp(last - first)):
        scales[start + k] = np.float32(work[SCALE + k])
        offsets[start + k] = np.float32(work[OFFSET + k])
    for k in range(np.uintp(last - first)):
        kind[start + k] = np.uint8(np.int32(work[KIND + k]))
        halves += work[KIND + k] == FLOAT16
    top = np.float32((1 << bits) - 1)
    if bits == 8:
        _quantize(values, first, last, dim, scales, offsets, top, packed.reshape(-1), first * dim)
    else:
        _quantize(values, first, last, dim, scales, offsets, top, codes, 0)
        pack_rows(codes, dim, bits, packed[first:last])
    return halves


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize(
    values: Any, first: int, last: int, dim: int, scales: Any, offsets: Any, top: Any, codes: Any, to: int
) -> None:
    """Compute codes: clamp((x - offset) * (1 / scale), 0, top) in float32, rounded half even. Scale 0 counts as 1."""
    start, target, width = np.uintp(first), np.uintp(to), np.uintp(dim)
    for k in range(np.uintp(last - first)):
        offset, scale = offsets[start + k], scales[start + k]
        gain = np.float32(1) / (scale if scale > 0 else np.float32(1))
        for line in range(np.uintp(0), width, np.uintp(16)):
            prefetch(values, (start + k + np.uintp(LANES)) * width + line)
        for j in range(width):
            t = (values[(start + k) * width + j] - offset) * gain
            t = t if t > np.float32(0) else np.float32(0)
            t = t if t < top else top
            codes[target + k * width + j] = np.uint8(
                np.float32(t + _ROUNDING).view(np.uint32) & np.uint32(0xFF)
            )


@njit(nogil=True, cache=True, error_model="numpy")
def _float16_bits(values: Any, halves: Any) -> None:
    """Convert float32s whose values are float16s to the bits of these."""
    bits = values.view(np.uint32)
    for k in range(bits.size):
        size = bits[k] & np.uint32(0x7FFFFFFF)
        normal = (size - np.uint32(0x38000000)) >> np.uint32(13)
        units = np.uint32(size).view(np.float32) * np.float32(1 << 24) + _ROUNDING
        small = np.float32(units).view(np.uint32) & np.uint32(0x3FF)
        half = normal if size >= np.uint32(0x38800000) else small
        halves[k] = np.uint16(half | ((bits[k] >> np.uint32(16)) & np.uint32(0x8000)))
