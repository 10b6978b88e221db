"""Rows quantized block by block, each block while it is in the cache: ranges, parameters, codes, packed.

The callers' arrays hold n rows: `values` float32 (n, dim), finite or not; `out` is a tuple of scales and
offsets, float32 (n,), the same as float16, uint16 (2, n), for rows whose kind says so, their kinds, uint8
(n,), and packed codes, uint8 (n, bytes a row). Rows of kind 0 are to be stored raw, and what is left for them
means nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cnr_codecs.kernels.pack import pack_rows
from cnr_codecs.kernels.parameters import (
    FIT_OFFSET,
    FIT_SCALE,
    FITTED,
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
)
from cnr_codecs.kernels.search import BEST_STEP, CENTRE, EXPLAINED, search, work_size

# Adding it to a float32 of 0 to 2**22 rounds half even, and leaves the integer in the lowest bits.
_ROUNDING = np.float32(3 << 22)


@njit(nogil=True, cache=True, error_model="numpy")
def row_keys(bits: Any, low: Any, high: Any) -> None:
    """Least and greatest of each row of `bits` (int32 (n, dim): float32 values' bits), as keys.

    A key orders like the float it stands for, so plain integer comparisons, which vectorize, find the
    extremes: -0 is below +0, NaN lies beyond the infinities.
    """
    for i in range(bits.shape[0]):
        row = bits[i]
        least = np.int32(0x7FFFFFFF)
        most = np.int32(-0x80000000)
        for j in range(row.size):
            key = row[j] ^ ((row[j] >> np.int32(31)) & np.int32(0x7FFFFFFF))
            least = min(least, key)
            most = max(most, key)
        low[i] = least
        high[i] = most


@njit(nogil=True, cache=True, error_model="numpy")
def encode_ranges(values: Any, bits: int, symmetric: bool, overflow: float, out: Any) -> None:
    """Quantize rows over their own ranges."""
    levels = np.float64((1 << bits) - 1)
    work = np.zeros(LINES)
    low, high = np.zeros(LANES, np.int32), np.zeros(LANES, np.int32)
    codes = np.empty(LANES * values.shape[1], np.uint8)
    for first in range(0, len(values), LANES):
        rows = slice(first, min(first + LANES, len(values)))
        _ranges(values[rows], low, high, work)
        if symmetric:
            symmetric_parameters(work, levels, overflow)
        else:
            asymmetric_parameters(work, levels, overflow)
        _finish(values[rows], bits, work, codes, rows, out)


@njit(nogil=True, cache=True, error_model="numpy")
def encode_windows(values: Any, low: Any, high: Any, bits: int, overflow: float, out: Any) -> None:
    """Quantize rows over given ranges, `low` to `high` (float64 (n,)); values beyond are clamped."""
    work = np.zeros(LINES)
    codes = np.empty(LANES * values.shape[1], np.uint8)
    for first in range(0, len(values), LANES):
        rows = slice(first, min(first + LANES, len(values)))
        for k in range(rows.stop - first):
            work[LOW + k] = low[first + k]
            work[HIGH + k] = high[first + k]
        asymmetric_parameters(work, np.float64((1 << bits) - 1), overflow)
        _finish(values[rows], bits, work, codes, rows, out)


@njit(nogil=True, cache=True, error_model="numpy")
def encode_searched(values: Any, bits: int, normal_step: Any, overflow: float, out: Any) -> None:
    """Quantize rows with the scale and offset that a search finds for each."""
    levels = (1 << bits) - 1
    work = np.zeros(LINES)
    low, high = np.zeros(LANES, np.int32), np.zeros(LANES, np.int32)
    codes = np.empty(LANES * values.shape[1], np.uint8)
    search_work = np.zeros(work_size(values.shape[1]), np.float32)
    least, factor = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for first in range(0, len(values), LANES):
        rows = slice(first, min(first + LANES, len(values)))
        _ranges(values[rows], low, high, work)
        _factors(work, np.float32(levels), least, factor)
        search(values[rows], least, factor, levels, normal_step, search_work)
        _lines(search_work, factor, levels * 0.5, work)
        asymmetric_parameters(work, np.float64(levels), overflow)
        fitted_parameters(work, np.float64(levels), overflow)
        _finish(values[rows], bits, work, codes, rows, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _ranges(values: Any, low: Any, high: Any, work: Any) -> None:
    """LOW and HIGH of the rows."""
    row_keys(values.view(np.int32), low, high)
    for k in range(LANES):
        key = low[k]
        work[LOW + k] = np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
    for k in range(LANES):
        key = high[k]
        work[HIGH + k] = np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _factors(work: Any, levels: Any, least: Any, factor: Any) -> None:
    """What maps a row's range to its levels; 0, so that nothing is found, where that is no float32."""
    for k in range(LANES):
        least[k] = np.float32(work[LOW + k])
        span = np.float32(work[HIGH + k]) - least[k]
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
def _finish(values: Any, bits: int, work: Any, codes: Any, rows: Any, out: Any) -> None:
    """Codes by SCALE and OFFSET, packed, and the parameters themselves, into `rows` of `out`."""
    scales, offsets, kind, packed = out[0][rows], out[1][rows], out[3][rows], out[4][rows]
    count, dim = values.shape
    for k in range(count):
        scales[k] = np.float32(work[SCALE + k])
    for k in range(count):
        offsets[k] = np.float32(work[OFFSET + k])
    for k in range(count):
        kind[k] = np.uint8(np.int32(work[KIND + k]))
    _float16_bits(scales, out[2][0][rows])
    _float16_bits(offsets, out[2][1][rows])
    top = np.float32((1 << bits) - 1)
    if bits == 8:
        _quantize(values, scales, offsets, top, packed.reshape(-1))
    else:
        _quantize(values, scales, offsets, top, codes)
        pack_rows(codes, dim, bits, packed)


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize(values: Any, scales: Any, offsets: Any, top: Any, codes: Any) -> None:
    """code = round half even of clamp((x - offset) * (1 / scale), 0, top), in float32; scale 0 counts as 1."""
    count, dim = values.shape
    for k in range(count):
        row = values[k]
        line = codes[k * dim : (k + 1) * dim]
        offset = offsets[k]
        gain = np.float32(1) / (scales[k] if scales[k] > 0 else np.float32(1))
        for j in range(dim):
            t = (row[j] - offset) * gain
            t = t if t > np.float32(0) else np.float32(0)
            t = t if t < top else top
            line[j] = np.uint8(np.float32(t + _ROUNDING).view(np.uint32) & np.uint32(0xFF))


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
