"""Rows quantized block by block, each block while it is in the cache: ranges, parameters, codes, packed.

The callers' arrays hold n rows: `values` float32 (n, dim), finite or not; `out` is a tuple of scales and
offsets, float32 (n,), the same as float16, uint16 (2, n), for rows whose kind says so, their kinds, uint8
(n,), and packed codes, uint8 (n, bytes a row). Rows of kind 0 are to be stored raw, and what is left for them
means nothing. Returned is how many rows have float16 parameters.
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

# Adding it to a float32 of 0 to 2**22 rounds half even, and leaves the integer in the lowest bits.
_ROUNDING = np.float32(3 << 22)


@njit(nogil=True, cache=True, error_model="numpy")
def row_extremes(bits: Any, first: int, count: int, dim: int, least: Any, most: Any) -> None:
    """Least and greatest value of `count` rows of `dim` values, from row `first` of `bits` on (int32: float32 values'
    bits), as such bits too.

    -0 is below +0, and NaN lies beyond the infinities. Integers order positive floats as they are, negative ones the
    other way round; so three plain comparisons, which vectorize, find both ends.
    """
    start, width = np.uintp(first * dim), np.uintp(dim)
    for k in range(np.uintp(count)):
        low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        largest = np.uint32(0)
        for j in range(width):
            value = bits[start + k * width + j]
            low = min(low, value)
            high = max(high, value)
            largest = max(largest, np.uint32(value))
        least[k] = np.int32(largest) if low < 0 else low
        most[k] = high if high >= 0 else low


@njit(nogil=True, cache=True, error_model="numpy")
def encode_ranges(values: Any, bits: int, symmetric: bool, overflow: float, out: Any) -> int:
    """Quantize rows over their own ranges."""
    count, dim = values.shape
    levels = np.float64((1 << bits) - 1)
    work, low, high = np.zeros(LINES), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    codes = np.empty(LANES * dim, np.uint8)
    # Views are made once: for narrow rows, making them for each block would take as long as the block.
    flat, least, most = values.reshape(-1), low.view(np.int32), high.view(np.int32)
    keys = flat.view(np.int32)
    halves = 0
    for first in range(0, count, LANES):
        last = min(first + LANES, count)
        row_extremes(keys, first, last - first, dim, least, most)
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
    """Quantize rows over given ranges, `low` to `high` (float64 (n,)); values beyond are clamped."""
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
    """Quantize rows with the scale and offset that a search finds for each, where they are better than its range's."""
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
    """The line ERROR or FIT_ERROR, from the lines of scales and offsets."""
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
    """LOW and HIGH of the rows."""
    for k in range(LANES):
        work[LOW + k] = low[k]
        work[HIGH + k] = high[k]


@njit(nogil=True, cache=True, error_model="numpy")
def _factors(low: Any, high: Any, levels: Any, factor: Any) -> None:
    """What maps a row's range to its levels; 0, so that nothing is found, where that is no float32."""
    for k in range(LANES):
        span = high[k] - low[k]
        gain = levels / span
        factor[k] = gain if (span < np.inf) & (gain < np.inf) else np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy")
def _lines(found: Any, factor: Any, half: float, work: Any) -> None:
    """The windows that the search found, as lines in the rows' own units."""
    for k in range(LANES):
        unit = np.float64(factor[k])
        step = np.float64(found[BEST_STEP + k])
        shift = np.float64(found[CENTRE + k]) + half - step * half
        work[FIT_SCALE + k] = step / unit
        work[FIT_OFFSET + k] = work[LOW + k] + shift / unit
        work[FITTED + k] = found[EXPLAINED + k] if unit > 0.0 else 0.0


@njit(nogil=True, cache=True, error_model="numpy")
def _finish(values: Any, first: int, last: int, dim: int, bits: int, work: Any, codes: Any, out: Any) -> int:
    """Codes of the rows `first` to `last` by SCALE and OFFSET, packed, and the parameters themselves, into `out`; how
    many of these rows have float16 parameters.
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
    """code = round half even of clamp((x - offset) * (1 / scale), 0, top), in float32; scale 0 counts as 1.

    Unsigned indices count from no end, which lets the inner loop be one of vectors.
    """
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
    """The bits of float32s that are float16s."""
    bits = values.view(np.uint32)
    for k in range(bits.size):
        size = bits[k] & np.uint32(0x7FFFFFFF)
        normal = (size - np.uint32(0x38000000)) >> np.uint32(13)
        units = np.uint32(size).view(np.float32) * np.float32(1 << 24) + _ROUNDING
        small = np.float32(units).view(np.uint32) & np.uint32(0x3FF)
        half = normal if size >= np.uint32(0x38800000) else small
        halves[k] = np.uint16(half | ((bits[k] >> np.uint32(16)) & np.uint32(0x8000)))
