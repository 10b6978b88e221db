"""Parameters of quantized rows, LANES rows at a time. Tests define them in readable numpy, and compare bit for bit.

All numbers are in one flat float64 array of lines of LANES numbers, as in `kernels.search`. The loops have no branches,
so that they vectorize. Float16 values are computed as float64, because numba has no float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper
from cnr_codecs.kernels.building.instructions import bits_of, float_of

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
