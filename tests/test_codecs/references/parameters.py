"""Parameters of uniform quantization: the numbers that a row is decoded with, computed from its range.

This is readable numpy. `cnr_codecs.kernels.uniform` computes the same, bit for bit.

The scale of a range is rounded up and its offset down, so that the codes cover the range. The scale and offset of a
searched line are rounded to the nearest. Both are float16 where that costs less than 1/128 of the range. Otherwise both
are float32, and the scale has at most 16 significant bits: scale * code is then exact, and decoders that fuse the
addition agree with those that don't. A row that fits neither is stored raw.

Ranges may be anything. Callers silence numpy's floating-point warnings, and must look at `raw`.
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

# Float16 parameters may widen a row's range, and with it the row's error, by this factor. They may shift the values of
# a line's codes by this share of the codes' span.
_MAX_WIDENING = 1 + 2**-7
_MAX_SHIFT = 2**-7
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, eq=False)
class Parameters:
    """Parameters of n rows.

    Attributes
    ----------
    scale, offset
        float32 (n,): what codes are computed from.
    stored
        float32 (parameters per row, n): what the segment stores.
    float16
        bool (n,): the rows whose parameters are stored as float16.
    raw
        bool (n,): the rows that are not quantized. Their parameters mean nothing.
    """

    scale: Float32s
    offset: Float32s
    stored: Float32s
    float16: Flags
    raw: Flags


def asymmetric(low: Float64s, high: Float64s, bits: int, element: Element) -> Parameters:
    """Return scale and offset of rows with these ranges. Rows of non-finite ranges are raw."""
    levels = (1 << bits) - 1
    constant = low == high
    offset16 = _floor(low, np.float16)
    scale16 = np.where(constant, np.float64(0), _ceil_float16((high - offset16) / levels))
    widened = np.where(constant, offset16 != low, scale16 * levels > (high - low) * _MAX_WIDENING)
    fits16 = ~widened & _holds(scale16, offset16, levels, element)
    offset32 = _floor(low, np.float32)
    scale32 = _ceil_16_bits((high - offset32) / levels)
    fits32 = (constant | (scale32 >= _TINY)) & _holds(scale32, offset32, levels, element)
    scale = np.where(fits16, scale16, scale32).astype(np.float32)
    offset = np.where(fits16, offset16, offset32).astype(np.float32)
    return Parameters(scale, offset, np.stack([scale, offset]), fits16, ~(fits16 | fits32))


def fitted(scale: Float64s, offset: Float64s, bits: int, element: Element) -> Parameters:
    """Return scale and offset of rows with these lines, whose scales are positive."""
    levels = (1 << bits) - 1
    scale16, offset16 = (each.astype(np.float16).astype(np.float64) + 0.0 for each in (scale, offset))
    shift = np.abs(offset16 - offset) + np.abs(scale16 - scale) * levels
    fits16 = (shift <= scale * levels * _MAX_SHIFT) & _holds(scale16, offset16, levels, element)
    scale32 = _ceil_16_bits(scale)
    offset32 = offset.astype(np.float32).astype(np.float64) + 0.0
    fits32 = (scale32 >= _TINY) & _holds(scale32, offset32, levels, element)
    scale_ = np.where(fits16, scale16, scale32).astype(np.float32)
    offset_ = np.where(fits16, offset16, offset32).astype(np.float32)
    return Parameters(scale_, offset_, np.stack([scale_, offset_]), fits16, ~(fits16 | fits32))


def symmetric(magnitude: Float64s, bits: int, element: Element) -> Parameters:
    """Return half steps of rows with these greatest magnitudes. Rows of non-finite magnitudes are raw."""
    levels = (1 << bits) - 1
    exact = magnitude / levels
    half16 = _ceil_float16(exact)
    fits16 = (half16 <= exact * _MAX_WIDENING) & _holds(2 * half16, -levels * half16, levels, element)
    half32 = _ceil_16_bits(exact)
    fits32 = (half32 >= _TINY) & _holds(2 * half32, -levels * half32, levels, element)
    half = np.where(fits16, half16, half32).astype(np.float32)
    scale, offset = half * np.float32(2), half * np.float32(-levels)
    return Parameters(scale, offset, half[None], fits16, ~(fits16 | fits32))


def _holds(scale: Float64s, offset: Float64s, levels: int, element: Element) -> Flags:
    """Whether the codes' span and both its ends are finite, in float32 and in the element type."""
    start = offset.astype(np.float32)
    reach = (scale * levels).astype(np.float32)
    end: Float32s = start + reach
    held: Flags = np.isfinite(reach) & (np.abs(start) < element.overflow) & (np.abs(end) < element.overflow)
    return held


def _floor(values: Float64s, dtype: type[np.floating[Any]]) -> Float64s:
    """Return values rounded to a narrower type towards minus infinity, without -0."""
    nearest = values.astype(dtype)
    below = np.nextafter(nearest, dtype(-np.inf))
    return np.where(nearest > values, below, nearest).astype(np.float64) + 0.0


def _ceil_float16(values: Float64s) -> Float64s:
    """Return values rounded to float16 towards plus infinity, without -0."""
    return -_floor(-values, np.float16) + 0.0


def _ceil_16_bits(values: Float64s) -> Float64s:
    """Return non-negative values rounded up to 16 significant bits, infinite where float32 overflows."""
    spare = np.int64((1 << 37) - 1)
    rounded = ((values.view(np.int64) + spare) & ~spare).view(np.float64)
    return rounded.astype(np.float32).astype(np.float64)
