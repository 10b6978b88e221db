"""Parameters of quantized rows, LANES rows at a time. `cnr_codecs.uniform.parameters` says what they are.

All numbers lie in one flat float64 array of lines of LANES numbers, as in `kernels.search`; branch-free, so
that the loops vectorize. Float16 values are rounded as float64: numba has no float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

LANES = 64
# Ranges of the rows; lines fitted to them, and whether there is one (more than 0), later its kind, and what error
# it leaves; then what came of them.
LOW, HIGH, FIT_SCALE, FIT_OFFSET, FITTED, FIT_ERROR = (line * LANES for line in range(6))
SCALE, OFFSET, KIND, ERROR = (line * LANES for line in range(6, 10))
LINES = 10 * LANES

# The payload's parameter types; 0: the row is stored raw.
FLOAT16, FLOAT32 = 1.0, 2.0

_MOST_WIDENED = 1 + 2.0**-7
_MOST_MOVED = 2.0**-7
_TINY = 2.0**-126
_FLOAT16_MAX = 65504.0
_FLOAT16_NORMAL = 2.0**-14
_FLOAT16_UNITS = 2.0**24
# Bits of a float64 that a float16, and a scale of 16 bits, have no room for.
_SPARE_16 = np.int64((1 << 42) - 1)
_SPARE_SCALE = np.int64((1 << 37) - 1)


@njit(nogil=True, cache=True, error_model="numpy")
def asymmetric_parameters(work: Any, levels: float, overflow: float) -> None:
    """Scale and offset of the ranges LOW to HIGH, and their KIND."""
    held = 0
    for k in range(LANES):
        low, high = work[LOW + k], work[HIGH + k]
        finite = abs(high - low) < np.inf
        offset16 = _floor_float16(low)
        scale16 = _ceil_float16((high - offset16) / levels)
        narrow = scale16 * levels <= (high - low) * _MOST_WIDENED
        # A row of one value has scale 0; it fits if its value does.
        scale16 = 0.0 if low == high else scale16
        kept16 = ((low == high) & (offset16 == low)) | (narrow & (low != high))
        fits16 = finite & kept16 & _holds(scale16, offset16, levels, overflow)
        work[SCALE + k] = scale16
        work[OFFSET + k] = offset16
        work[KIND + k] = FLOAT16 if fits16 else 0.0
        held += fits16
    if held < LANES:
        _widen_parameters(work, levels, overflow)


@njit(nogil=True, cache=True, error_model="numpy")
def _widen_parameters(work: Any, levels: float, overflow: float) -> None:
    """The same of the ranges that float16 parameters don't serve, with float32 ones."""
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


@njit(nogil=True, cache=True, error_model="numpy")
def fitted_parameters(work: Any, levels: float, overflow: float) -> None:
    """The same of the lines, in FIT_SCALE, FIT_OFFSET and FITTED, of the rows that have one."""
    for k in range(LANES):
        scale, offset = work[FIT_SCALE + k], work[FIT_OFFSET + k]
        offset16, scale16 = _round_float16(offset), _round_float16(scale)
        moved = abs(offset16 - offset) + abs(scale16 - scale) * levels
        fits16 = (moved <= scale * levels * _MOST_MOVED) & _holds(scale16, offset16, levels, overflow)
        offset32 = np.float64(np.float32(offset)) + 0.0
        scale32 = _ceil_16_bits(scale)
        fits32 = (scale32 >= _TINY) & _holds(scale32, offset32, levels, overflow)
        fitted = (work[FITTED + k] > 0.0) & (fits16 | fits32)
        work[FIT_SCALE + k] = scale16 if fits16 else scale32
        work[FIT_OFFSET + k] = offset16 if fits16 else offset32
        work[FITTED + k] = (FLOAT16 if fits16 else FLOAT32) if fitted else 0.0


@njit(nogil=True, cache=True, error_model="numpy")
def take_fitted(work: Any) -> None:
    """Take the lines that leave no larger error than the ranges do, or whose ranges can't be stored."""
    for k in range(LANES):
        better = (work[KIND + k] == 0.0) | (work[FIT_ERROR + k] <= work[ERROR + k])
        taken = (work[FITTED + k] > 0.0) & better
        work[SCALE + k] = work[FIT_SCALE + k] if taken else work[SCALE + k]
        work[OFFSET + k] = work[FIT_OFFSET + k] if taken else work[OFFSET + k]
        work[KIND + k] = work[FITTED + k] if taken else work[KIND + k]


@njit(nogil=True, cache=True, error_model="numpy")
def symmetric_parameters(work: Any, levels: float, overflow: float) -> None:
    """SCALE and OFFSET, twice and -levels times the half step, of rows between LOW and HIGH; and KIND."""
    for k in range(LANES):
        low, high = abs(work[LOW + k]), abs(work[HIGH + k])
        exact = (low if low > high else high) / levels
        # Where an end is NaN, the sum is too, and the row is raw.
        exact = exact + 0.0 * (low + high)
        half16 = _ceil_float16(exact)
        fits16 = (half16 <= exact * _MOST_WIDENED) & _holds(2 * half16, -levels * half16, levels, overflow)
        half32 = _ceil_16_bits(exact)
        fits32 = (half32 >= _TINY) & _holds(2 * half32, -levels * half32, levels, overflow)
        half = half16 if fits16 else half32
        work[SCALE + k] = 2 * half
        work[OFFSET + k] = -levels * half
        work[KIND + k] = FLOAT16 if fits16 else (FLOAT32 if fits32 else 0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _holds(scale: float, offset: float, levels: float, overflow: float) -> Any:
    """Whether what the codes span, and both its ends, are finite, in float32 and in the element type."""
    start = np.float32(offset)
    reach = np.float32(scale * levels)
    end = start + reach
    return (reach < np.inf) & (abs(start) < overflow) & (abs(end) < overflow)


@njit(nogil=True, cache=True, error_model="numpy")
def _floor_float16(value: float) -> float:
    """Rounded to float16 towards minus infinity; never -0."""
    size = abs(value)
    lower = -_ceil_float16(size) + 0.0
    bits = np.float64(size).view(np.int64) & ~_SPARE_16
    normal = np.int64(bits).view(np.float64)
    down = normal if size >= _FLOAT16_NORMAL else np.floor(size * _FLOAT16_UNITS) / _FLOAT16_UNITS
    down = down if down < _FLOAT16_MAX else _FLOAT16_MAX
    return lower if value < 0.0 else down


@njit(nogil=True, cache=True, error_model="numpy")
def _ceil_float16(size: float) -> float:
    """A value of 0 or more, rounded to float16 towards plus infinity."""
    bits = (np.float64(size).view(np.int64) + _SPARE_16) & ~_SPARE_16
    normal = np.int64(bits).view(np.float64)
    up = normal if size >= _FLOAT16_NORMAL else np.ceil(size * _FLOAT16_UNITS) / _FLOAT16_UNITS
    return up if up <= _FLOAT16_MAX else np.inf


@njit(nogil=True, cache=True, error_model="numpy")
def _round_float16(value: float) -> float:
    """Rounded to the nearest float16, ties to even; never -0."""
    size = abs(value)
    bits = np.float64(size).view(np.int64)
    odd = (bits >> np.int64(42)) & np.int64(1)
    bits = (bits + (_SPARE_16 >> np.int64(1)) + odd) & ~_SPARE_16
    normal = np.int64(bits).view(np.float64)
    near = normal if size >= _FLOAT16_NORMAL else np.rint(size * _FLOAT16_UNITS) / _FLOAT16_UNITS
    near = near if near <= _FLOAT16_MAX else np.inf
    return (-near if value < 0.0 else near) + 0.0


@njit(nogil=True, cache=True, error_model="numpy")
def _floor_float32(value: float) -> float:
    """Rounded to float32 towards minus infinity; never -0."""
    nearest = np.float32(value)
    bits = np.float32(nearest).view(np.int32)
    # The next one below: down from a positive one, up from a negative one, and the first below zero.
    below = bits - np.int32(1) if nearest > 0 else bits + np.int32(1)
    below = below if nearest != 0 else np.int32(-0x7FFFFFFF)
    lower = np.int32(below).view(np.float32)
    return np.float64(lower if nearest > value else nearest) + 0.0


@njit(nogil=True, cache=True, error_model="numpy")
def _ceil_16_bits(size: float) -> float:
    """A value of 0 or more rounded up to 16 significant bits; infinite where float32 can't hold it."""
    bits = (np.float64(size).view(np.int64) + _SPARE_SCALE) & ~_SPARE_SCALE
    return np.float64(np.float32(np.int64(bits).view(np.float64)))
