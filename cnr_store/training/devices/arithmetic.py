"""Quantizes and decodes rows by torch's operations on their own device, to the bits of the host's kernels.

The kernels of `cnr_codecs.kernels` define the numbers. Each operation here rounds once, and torch fuses none of them:
so bits are equal by construction where two rules hold. No number is divided by a Python number: CUDA multiplies by
its reciprocal. And columns are added one by one, because their order decides the last bit.

Parameters of rows are float64 (n,) until they are stored. What searches read is (dim, n): a line for each column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch.nn.functional import pad

from cnr_codecs.elements import element_named
from cnr_codecs.kernels.search import MAX_DIM, NORMAL_STEPS, trials
from cnr_codecs.lattice.floating import FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows, most_code
from cnr_codecs.payload.coded import MANTISSA_BITS, MAX_CODE, code_range
from cnr_codecs.uniform.uniform import UniformRows

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Parameters = tuple[Tensor, Tensor, Tensor]
"""Scale, offset, and kind: 1 where both are float16, 2 where they are float32, 0 where the row must be stored raw."""
Codec: TypeAlias = UniformRows | LatticeRows | FloatingRows
WORK_BYTES = 64 << 20
"""Of the device's memory, for the rows that are worked on together."""
# What these take at most: seven float32 for each value, and float64 numbers for each row.
_VALUE_BYTES, _ROW_BYTES = 28, 256
Limits = tuple[float, float]
"""The greatest code, and the smallest magnitude that the element type has no number for."""
ELEMENTS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_INFINITY = float("inf")
_MAX_WIDENING, _MAX_SHIFT, _TINY = 1 + 2.0**-7, 2.0**-7, 2.0**-126
_FLOAT16_MAX, _FLOAT16_NORMAL, _FLOAT16_UNITS = 65504.0, 2.0**-14, 2.0**24
# Bits of a float64 that a float16, and a scale of 16 bits, have no room for.
_SPARE_16, _SPARE_SCALE = (1 << 42) - 1, (1 << 37) - 1
_EXACT = 1 << 24  # quarters, up to which their sums are exact in float32


def _over(value: Tensor, number: float) -> Tensor:
    return value / torch.full_like(value, number)


def _float16(size: Tensor, carry: Tensor | int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Values of 0 or more as float16, in which numbers below the normal ones are multiples of one unit."""
    normal = ((size.view(torch.int64) + carry) & ~_SPARE_16).view(torch.float64)
    return torch.where(size >= _FLOAT16_NORMAL, normal, rounded(size * _FLOAT16_UNITS) * (1 / _FLOAT16_UNITS))


def _ceil_float16(size: Tensor) -> Tensor:
    """Round values of 0 or more to float16 towards plus infinity."""
    up = _float16(size, _SPARE_16, torch.ceil)
    return torch.where(up <= _FLOAT16_MAX, up, _INFINITY)


def _floor_float16(value: Tensor) -> Tensor:
    """Round to float16 towards minus infinity, never to -0."""
    size = value.abs()
    down = _float16(size, 0, torch.floor).clamp(max=_FLOAT16_MAX)
    return torch.where(value < 0, 0.0 - _ceil_float16(size), down)


def _round_float16(value: Tensor) -> Tensor:
    """Round to the nearest float16, ties to even, never to -0."""
    size = value.abs()
    near = _float16(size, (_SPARE_16 >> 1) + ((size.view(torch.int64) >> 42) & 1), torch.round)
    near = torch.where(near <= _FLOAT16_MAX, near, _INFINITY)
    return torch.where(value < 0, 0.0 - near, near)


def _floor_float32(value: Tensor) -> Tensor:
    """Round to float32 towards minus infinity, never to -0."""
    nearest = value.float()
    bits = nearest.view(torch.int32)
    below = torch.where(nearest > 0, bits - 1, bits + 1)
    lower = torch.where(nearest == 0, -0x7FFFFFFF, below).view(torch.float32)
    return torch.where(nearest.double() > value, lower, nearest).double() + 0.0


def _ceil_16_bits(size: Tensor) -> Tensor:
    """Round values of 0 or more up to 16 significant bits. They are infinite where float32 overflows."""
    return ((size.view(torch.int64) + _SPARE_SCALE) & ~_SPARE_SCALE).view(torch.float64).float().double()


def _holds(scale: Tensor, offset: Tensor, limits: Limits) -> Tensor:
    """Whether the codes' span and both its ends are finite, in float32 and in the element type."""
    start, reach, overflow = offset.float(), (scale * limits[0]).float(), limits[1]
    return (reach < _INFINITY) & (start.abs() < overflow) & ((start + reach).abs() < overflow)


def _first_that_fits(kept16: Tensor, narrow: Pair, kept32: Tensor, wide: Pair, limits: Limits) -> Parameters:
    fits16, fits32 = kept16 & _holds(*narrow, limits), kept32 & _holds(*wide, limits)
    scale, offset = (torch.where(fits16, one, other) for one, other in zip(narrow, wide, strict=True))
    return scale, offset, torch.where(fits16, 1, fits32 * 2)


def _asymmetric(low: Tensor, high: Tensor, limits: Limits) -> Parameters:
    """Parameters of the ranges `low` to `high`."""
    levels, span, constant = limits[0], high - low, low == high
    finite, offset16 = span.abs() < _INFINITY, _floor_float16(low)
    scale16 = _ceil_float16(_over(high - offset16, levels))
    # A row of one value has scale 0. It fits if the value does.
    kept16 = torch.where(constant, offset16 == low, scale16 * levels <= span * _MAX_WIDENING)
    scale16 = torch.where(constant, 0.0, scale16)
    offset32 = _floor_float32(low)
    scale32 = _ceil_16_bits(_over(high - offset32, levels))
    kept16, kept32 = finite & kept16, finite & (constant | (scale32 >= _TINY))
    return _first_that_fits(kept16, (scale16, offset16), kept32, (scale32, offset32), limits)


def _fitted(scale: Tensor, offset: Tensor, limits: Limits) -> Parameters:
    """Parameters of the lines that a search found."""
    offset16, scale16 = _round_float16(offset), _round_float16(scale)
    levels, shift = limits[0], (offset16 - offset).abs() + (scale16 - scale).abs() * limits[0]
    offset32, scale32 = offset.float().double() + 0.0, _ceil_16_bits(scale)
    is_near = shift <= scale * levels * _MAX_SHIFT
    return _first_that_fits(is_near, (scale16, offset16), scale32 >= _TINY, (scale32, offset32), limits)


def _symmetric(low: Tensor, high: Tensor, limits: Limits) -> Parameters:
    """Parameters of rows between `low` and `high`: twice the half step, and -levels times it."""
    levels, low, high = limits[0], low.abs(), high.abs()
    # If an end is NaN the sum is NaN, and the row becomes raw.
    exact = _over(torch.where(low > high, low, high), levels) + (low + high) * 0.0
    half16, half32 = _ceil_float16(exact), _ceil_16_bits(exact)
    narrow, wide = (half16 * 2.0, half16 * -levels), (half32 * 2.0, half32 * -levels)
    return _first_that_fits(half16 <= exact * _MAX_WIDENING, narrow, half32 >= _TINY, wide, limits)


def _keys(bits: Tensor) -> Tensor:
    """Integers that sort as float32 values do, from their bits: -0 below +0, NaN beyond the infinities. Also back."""
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _factor(low: Tensor, high: Tensor, parts: int) -> Tensor:
    """What maps ranges to so many parts, or 0 where no float32 does: a search then finds nothing."""
    span = high - low
    factor = torch.full_like(span, parts) / span
    return torch.where((span < _INFINITY) & (factor < _INFINITY), factor, 0.0)


def _rounded(steps: Tensor, top: float) -> Tensor:
    """Clamp to the codes and round, in place. NaN becomes 0."""
    return steps.nan_to_num_(nan=0.0).clamp_(0.0, top).round_()


def _gain(scale: Tensor) -> Tensor:
    """The reciprocal of the scale. A scale of 0 counts as 1."""
    return torch.ones_like(scale) / torch.where(scale > 0, scale, 1.0)


def _summed(columns: Tensor) -> Tensor:
    total = torch.zeros_like(columns[0])
    for column in columns:
        total += column
    return total


def _search(values: Tensor, low: Tensor, factor: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """How much of its row the best line explains (0: there is none), its centre and its step."""
    dim, top, one = values.shape[1], (1 << bits) - 1.0, torch.ones_like(low)
    half, normal = np.float32(top / 2), NORMAL_STEPS[bits]
    z = values.T.clone(memory_format=torch.contiguous_format).sub_(low).mul_(factor).sub_(float(half))
    total = _summed(z)
    mean = _over(total, dim)
    off = z - mean
    deviation = _over(_summed(off.mul_(off)), dim).sqrt()
    moments = mean, torch.where(deviation > 0, deviation, 1.0)
    explained, centre, step = torch.zeros_like(low), torch.zeros_like(low), one
    at, width, product = centre, step, torch.empty_like(z)
    for window, by, by_halves, of, of_normal in trials():
        # A trial starts from the best window so far, from the row's moments, or from where the one before it did.
        at, width = (centre, step) if window == 1 else moments if window == 2 else (at, width)
        begin = at + width * float(by * (half if by_halves else np.float32(1)))
        gain = one / (width * float(of * (normal if of_normal else np.float32(1))))
        code = torch.mul(z, gain, out=off).add_(float(half) - begin * gain)
        codes = _rounded(code, top).sub_(float(half)).sum(0)
        torch.mul(code, code, out=product)
        squares = product.sum(0) if top * top * dim <= _EXACT else _summed(product)
        products = _summed(torch.mul(code, z, out=product))
        variance, covariance = squares * dim - codes * codes, products * dim - codes * total
        fits = (variance > 0) & (covariance > 0)
        slope = covariance / torch.where(fits, variance, 1.0)
        better = fits & (covariance * slope > explained)
        explained = torch.where(better, covariance * slope, explained)
        centre = torch.where(better, _over(total - slope * codes, dim), centre)
        step = torch.where(better, slope, step)
    return explained, centre, step


def _error(columns: Tensor, scale: Tensor, offset: Tensor, factor: Tensor, top: float) -> Tensor:
    """The squared errors of rows quantized with these parameters, in steps of the whole range."""
    scale, offset = scale.float(), offset.float()
    code = _rounded((columns - offset).mul_(_gain(scale)), top)
    off = code.mul_(scale).add_(offset).sub_(columns).mul_(factor)
    return _summed(off.mul_(off))


def _searched(values: Tensor, ends: Pair, bits: int, limits: Limits) -> Parameters:
    """The parameters that the search finds, or those of the ranges between the `ends` where these are better."""
    top, (least, most) = (1 << bits) - 1, ends
    factor, low = _factor(least, most, top), least.double()
    explained, centre, step = _search(values, least, factor, bits)
    scale, offset, kind = _asymmetric(low, most.double(), limits)
    unit, slope = factor.double(), step.double()
    moved = (centre.double() + top * 0.5) - slope * (top * 0.5)
    fit_scale, fit_offset, fit_kind = _fitted(slope / unit, low + moved / unit, limits)
    is_there = (explained > 0) & (factor > 0) & (fit_kind > 0)
    columns = values.T.contiguous()
    error = _error(columns, scale, offset, factor, top)
    taken = is_there & ((kind == 0) | (_error(columns, fit_scale, fit_offset, factor, top) <= error))
    scale, offset = torch.where(taken, fit_scale, scale), torch.where(taken, fit_offset, offset)
    return scale, offset, torch.where(taken, fit_kind, kind)


def _parameters(codec: UniformRows, values: Tensor, overflow: float) -> Parameters:
    keys, limits = _keys(values.view(torch.int32)), ((1 << codec.bits) - 1.0, overflow)
    ends = _keys(keys.amin(1)).view(torch.float32), _keys(keys.amax(1)).view(torch.float32)
    del keys
    if codec.scheme == "symmetric":
        return _symmetric(ends[0].double(), ends[1].double(), limits)
    if codec.scheme == "adaptive" and values.shape[1] <= MAX_DIM and codec.bits in NORMAL_STEPS:
        return _searched(values, ends, codec.bits, limits)
    return _asymmetric(ends[0].double(), ends[1].double(), limits)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes (n, dim) of so many bits each: eight of them are so many bytes. A row starts on a byte."""
    if bits == 8:
        return codes
    count, dim = codes.shape
    eights = pad(codes, (0, -dim % 8)).view(count, -(-dim // 8), 8)
    words = torch.zeros(eights.shape[:2], dtype=torch.int64, device=codes.device)
    for place in range(8):
        words |= eights[:, :, place].long() << (bits * place)
    octets = words.view(torch.uint8).view(eights.shape)[:, :, :bits]
    return octets.reshape(count, eights.shape[1] * bits)[:, : (dim * bits + 7) // 8].contiguous()


def _unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The codes (n, dim) that `_packed` packed."""
    if bits == 8:
        return packed
    count, eights = len(packed), -(-dim // 8)
    octets = pad(pad(packed, (0, eights * bits - packed.shape[1])).view(count, eights, bits), (0, 8 - bits))
    words, codes = octets.view(torch.int64)[:, :, 0], torch.empty_like(octets)
    for place in range(8):
        codes[:, :, place] = (words >> (bits * place)) & ((1 << bits) - 1)
    return codes.view(count, eights * 8)[:, :dim]


def _on_lattice(values: Tensor, step: float, limit: int) -> tuple[Tensor, Tensor]:
    beyond = MAX_CODE + 1.0
    exact = (values.double() * (1 / step)).nan_to_num_(nan=beyond).clamp_(-beyond, beyond).round_()
    most = torch.maximum(exact.amax(1), -exact.amin(1))
    raw = (most > limit) | ((most == 0) & (values != 0).any(1))
    return raw.byte(), exact.clamp_(max=MAX_CODE).to(torch.int16)


def _on_floating_grid(values: Tensor, shift: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    bits = values.view(torch.int32)
    size = bits & 0x7FFFFFFF
    # The lowest bits are rounded by themselves: the sum with all bits of a NaN is beyond int32.
    magnitude, lowest = size >> shift, (size & ((1 << shift) - 1)).add_((1 << (shift - 1)) - 1)
    magnitude += lowest.add_(magnitude & 1).bitwise_right_shift_(shift)
    raw = (magnitude > most).any(1)
    small = torch.where(((bits < 0) & (size != 0)).any(1, keepdim=True), 0, least)
    magnitude = torch.where((size != 0) & (magnitude < least), small, magnitude)
    return raw.byte(), torch.where(bits < 0, -magnitude, magnitude).to(torch.int16)


def rows_together(dim: int) -> int:
    """How many rows of so many values are worked on together."""
    return max(1, WORK_BYTES // (_VALUE_BYTES * dim + _ROW_BYTES))


def quantize(codec: Codec, rows: Tensor) -> tuple[Tensor, ...]:
    """Quantize rows (n, dim) of an element type of `ELEMENTS`; dim is 1 or more.

    `codec`: a lattice must have its step.

    Returns: uint8 (n,), then what else is stored. For a lattice and a floating grid: which rows have no codes; int16
    (n, dim),
    their codes. Else the kinds of parameters, 0 for rows that have none; float32 (n, 2), scale and offset; uint8
    (n, bytes a row), packed codes. Codes of rows that have none are anything.
    """
    element, values = element_named(ELEMENTS[rows.dtype]), rows.float().contiguous()
    if isinstance(codec, LatticeRows):
        assert codec.step is not None
        return _on_lattice(values, codec.step, most_code(codec.step, element))
    if isinstance(codec, FloatingRows):
        limits = code_range(codec.mantissa_bits, element.name)
        return _on_floating_grid(values, MANTISSA_BITS - codec.mantissa_bits, *limits)
    scale, offset, kind = _parameters(codec, values, element.overflow)
    floats = torch.stack([scale.float(), offset.float()], dim=1)
    steps = (values - floats[:, 1:]).mul_(_gain(floats[:, :1]))
    codes = _rounded(steps, (1 << codec.bits) - 1.0).byte()
    return kind.byte(), floats, _packed(codes, codec.bits)


def uniform_values(packed: Tensor, parameters: Tensor, bits: int, dim: int) -> Tensor:
    """The values, float32 (n, dim), of packed codes: scale * code, which is exact, plus offset.

    `parameters`: (2, n), scales and offsets; or (1, n), half steps h: then a code q is h * (2q - (2**bits - 1)).
    """
    scale, offset = parameters[0].float(), parameters[-1].float()
    if len(parameters) == 1:
        scale, offset = scale * 2.0, offset * (1.0 - (1 << bits))
    return _unpacked(packed, bits, dim).float().mul_(scale[:, None]).add_(offset[:, None])


def grid_values(codes: Tensor, mantissa: int, step: float) -> Tensor:
    """The values, float32 (n, dim), of int16 codes: on a floating grid of so many bits, or with 0 on a step."""
    if not mantissa:
        return codes.float().mul_(step)
    wide = codes.int()
    return ((wide.abs() << (MANTISSA_BITS - mantissa)) | (wide & -0x80000000)).view(torch.float32)
