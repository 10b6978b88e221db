"""Parameters of uniform quantization: from the range of a row to the numbers its decoder will use.

Scales are rounded up and offsets down, so that the range stays covered. They are float16 where that costs
less than one part in 128 of the range, else float32 with at most 16 significant bits in the scale: scale *
code is then exact, and decoders that fuse the addition agree with those that don't. Rows that neither
serves are stored raw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# Float16 parameters may widen a row's range by this factor, and with it the row's error.
_MOST_WIDENED = 1 + 2**-7
_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, eq=False)
class Parameters:
    """Parameters of n rows. `scale` and `offset`, float32 (n,), are what codes are computed from; `stored`,
    float32 (parameters per row, n), what the segment holds. `float16` marks the rows whose parameters are
    stored as float16, `raw` the rows that are not quantized, whose parameters mean nothing.
    """

    scale: Float32s
    offset: Float32s
    stored: Float32s
    float16: Flags
    raw: Flags


def asymmetric(low: Float32s, high: Float32s, bits: int, element: Element) -> Parameters:
    """Scale and offset of rows with these ranges, which may be non-finite (then raw)."""
    levels = (1 << bits) - 1
    with np.errstate(all="ignore"):
        span = high.astype(np.float64) - low
        constant = span == 0
        offset16 = floor_float16(low)
        scale16 = ceil_float16((high - offset16.astype(np.float64)) / levels)
        scale16 = np.where(constant, np.float16(0), scale16)
        fits16 = np.where(
            constant, offset16 == low, scale16.astype(np.float64) * levels <= span * _MOST_WIDENED
        )
        fits16 &= _holds(scale16, offset16, levels, element)
        scale32 = ceil_16_bits(span / levels)
        fits32 = (constant | (scale32 >= _FLOAT32.tiny)) & _holds(scale32, low, levels, element)
    scale = np.where(fits16, scale16, scale32).astype(np.float32)
    offset = np.where(fits16, offset16, low).astype(np.float32)
    return Parameters(scale, offset, np.stack([scale, offset]), fits16, ~(fits16 | fits32))


def symmetric(magnitude: Float32s, bits: int, element: Element) -> Parameters:
    """Half steps of rows with these greatest magnitudes, which may be non-finite (then raw)."""
    levels = (1 << bits) - 1
    with np.errstate(all="ignore"):
        exact = magnitude.astype(np.float64) / levels
        half16 = ceil_float16(exact)
        half32 = ceil_16_bits(exact)
        fits16 = half16.astype(np.float64) <= exact * _MOST_WIDENED
        fits16 &= _holds(half16 * np.float32(2), half16 * np.float32(-levels), levels, element)
        fits32 = (half32 >= _FLOAT32.tiny) & _holds(half32 * 2, half32 * np.float32(-levels), levels, element)
        half = np.where(fits16, half16, half32).astype(np.float32)
        scale, offset = half * np.float32(2), half * np.float32(-levels)
    return Parameters(scale, offset, half[None], fits16, ~(fits16 | fits32))


def _holds(scale: npt.NDArray[Any], offset: npt.NDArray[Any], levels: int, element: Element) -> Flags:
    """Whether both ends of what the codes span are finite, in float32 and in the element type."""
    reach = scale.astype(np.float32) * np.float32(levels)
    start = offset.astype(np.float32)
    ends = np.abs(start) < element.overflow, np.abs(start + reach) < element.overflow
    return np.isfinite(reach) & np.isfinite(start) & ends[0] & ends[1]


def floor_float16(values: Float32s) -> npt.NDArray[np.float16]:
    """Rounded to float16 towards minus infinity."""
    nearest = values.astype(np.float16)
    return np.where(nearest > values, np.nextafter(nearest, np.float16(-np.inf)), nearest)


def ceil_float16(values: Float64s) -> npt.NDArray[np.float16]:
    """Rounded to float16 towards plus infinity."""
    nearest = values.astype(np.float16)
    return np.where(nearest < values, np.nextafter(nearest, np.float16(np.inf)), nearest)


def ceil_16_bits(values: Float64s) -> Float32s:
    """Non-negative values rounded up to 16 significant bits, as float32; infinite beyond its range."""
    spare = np.int64((1 << 37) - 1)
    return ((values.view(np.int64) + spare) & ~spare).view(np.float64).astype(np.float32)
