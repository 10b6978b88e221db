"""Scale and offset of rows, as `cnr_codecs.uniform.parameters` defines them, with float64 numbers.

Each function returns scale, offset and kind: 1 where both are float16, 2 where they are float32, 0 where the row must
be stored raw. They do what `cnr_codecs.kernels.parameters` does, operation by operation.
"""

import triton
import triton.language as tl

_MAX_WIDENING = tl.constexpr(1 + 2.0**-7)
_MAX_SHIFT = tl.constexpr(2.0**-7)
_TINY = tl.constexpr(2.0**-126)
_FLOAT16_MAX = tl.constexpr(65504.0)
_FLOAT16_NORMAL = tl.constexpr(2.0**-14)
_FLOAT16_UNITS = tl.constexpr(2.0**24)
# Adding this to a float64 of 0 to 2**52, and taking it away, rounds it half even.
_ROUNDING = tl.constexpr(2.0**52)
# Bits of a float64 that a float16, and a scale of 16 bits, have no room for.
_SPARE_16 = tl.constexpr((1 << 42) - 1)
_SPARE_SCALE = tl.constexpr((1 << 37) - 1)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _bits(value):
    return value.to(tl.int64, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _narrow(value):
    """Round to the nearest float32, and widen it again."""
    return value.to(tl.float32).to(tl.float64)


@triton.jit
def _ceil_float16(size):
    """Round a value of 0 or more to float16 towards plus infinity."""
    normal = _float((_bits(size) + _SPARE_16) & ~_SPARE_16)
    up = tl.where(size >= _FLOAT16_NORMAL, normal, tl.ceil(size * _FLOAT16_UNITS) / _FLOAT16_UNITS)
    return tl.where(up <= _FLOAT16_MAX, up, _INFINITY)


@triton.jit
def _floor_float16(value):
    """Round to float16 towards minus infinity, never to -0."""
    size = tl.abs(value)
    lower = 0.0 - _ceil_float16(size)
    normal = _float(_bits(size) & ~_SPARE_16)
    down = tl.where(size >= _FLOAT16_NORMAL, normal, tl.floor(size * _FLOAT16_UNITS) / _FLOAT16_UNITS)
    down = tl.where(down < _FLOAT16_MAX, down, _FLOAT16_MAX)
    return tl.where(value < 0.0, lower, down)


@triton.jit
def _round_float16(value):
    """Round to the nearest float16, ties to even, never to -0."""
    size = tl.abs(value)
    bits = _bits(size)
    normal = _float((bits + (_SPARE_16 >> 1) + ((bits >> 42) & 1)) & ~_SPARE_16)
    near = ((size * _FLOAT16_UNITS + _ROUNDING) - _ROUNDING) / _FLOAT16_UNITS
    near = tl.where(size >= _FLOAT16_NORMAL, normal, near)
    near = tl.where(near <= _FLOAT16_MAX, near, _INFINITY)
    return tl.where(value < 0.0, 0.0 - near, near)


@triton.jit
def _floor_float32(value):
    """Round to float32 towards minus infinity, never to -0."""
    nearest = value.to(tl.float32)
    bits = nearest.to(tl.int32, bitcast=True)
    below = tl.where(nearest > 0.0, bits - 1, bits + 1)
    below = tl.where(nearest == 0.0, -0x7FFFFFFF, below)
    lower = below.to(tl.float32, bitcast=True)
    return tl.where(nearest.to(tl.float64) > value, lower, nearest).to(tl.float64) + 0.0


@triton.jit
def _ceil_16_bits(size):
    """Round a value of 0 or more up to 16 significant bits. It is infinite where float32 overflows."""
    return _narrow(_float((_bits(size) + _SPARE_SCALE) & ~_SPARE_SCALE))


@triton.jit
def _holds(scale, offset, levels, overflow):
    """Whether the codes' span and both its ends are finite, in float32 and in the element type."""
    start, reach = offset.to(tl.float32), (scale * levels).to(tl.float32)
    end = start + reach
    return (reach < _INFINITY) & (tl.abs(start) < overflow) & (tl.abs(end) < overflow)


@triton.jit
def _kind(fits16, fits32):
    return tl.where(fits16, 1, tl.where(fits32, 2, 0))


@triton.jit
def asymmetric(low, high, levels, overflow):
    """Parameters of the ranges `low` to `high`, float64."""
    span, constant = high - low, low == high
    finite = tl.abs(span) < _INFINITY
    offset16 = _floor_float16(low)
    scale16 = _ceil_float16((high - offset16) / levels)
    narrow = scale16 * levels <= span * _MAX_WIDENING
    # A row of one value has scale 0. It fits if the value does.
    scale16 = tl.where(constant, 0.0, scale16)
    kept16 = tl.where(constant, offset16 == low, narrow)
    fits16 = finite & kept16 & _holds(scale16, offset16, levels, overflow)
    offset32 = _floor_float32(low)
    scale32 = _ceil_16_bits((high - offset32) / levels)
    fits32 = finite & (constant | (scale32 >= _TINY)) & _holds(scale32, offset32, levels, overflow)
    return tl.where(fits16, scale16, scale32), tl.where(fits16, offset16, offset32), _kind(fits16, fits32)


@triton.jit
def fitted(scale, offset, explained, levels, overflow):
    """Parameters of lines, float64. The kind is 0 where there is none, of which `explained` is 0."""
    offset16, scale16 = _round_float16(offset), _round_float16(scale)
    shift = tl.abs(offset16 - offset) + tl.abs(scale16 - scale) * levels
    fits16 = (shift <= scale * levels * _MAX_SHIFT) & _holds(scale16, offset16, levels, overflow)
    offset32, scale32 = _narrow(offset) + 0.0, _ceil_16_bits(scale)
    fits32 = (scale32 >= _TINY) & _holds(scale32, offset32, levels, overflow)
    kind = tl.where(explained > 0.0, _kind(fits16, fits32), 0)
    return tl.where(fits16, scale16, scale32), tl.where(fits16, offset16, offset32), kind


@triton.jit
def symmetric(low, high, levels, overflow):
    """Parameters of rows between `low` and `high`: twice the half step, and -levels times it."""
    low, high, down = tl.abs(low), tl.abs(high), 0.0 - levels
    # If an end is NaN the sum is NaN, and the row becomes raw.
    exact = tl.where(low > high, low, high) / levels + 0.0 * (low + high)
    half16 = _ceil_float16(exact)
    fits16 = (half16 <= exact * _MAX_WIDENING) & _holds(2.0 * half16, down * half16, levels, overflow)
    half32 = _ceil_16_bits(exact)
    fits32 = (half32 >= _TINY) & _holds(2.0 * half32, down * half32, levels, overflow)
    half = tl.where(fits16, half16, half32)
    return 2.0 * half, down * half, _kind(fits16, fits32)
