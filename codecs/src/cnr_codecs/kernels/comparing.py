"""Rows beside what was stored of them: the same integers, or the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper, kernel
from cnr_codecs.kernels.building.instructions import bits_of
from cnr_codecs.kernels.lattice import scaled

SAME, OTHER, UNKNOWN = 0, 1, 2
# A value that is so far from its code, in steps, is rounded to it whatever the error of float32, of codes up to 32,767.
_NEAR = np.float32(0.49)
_SIZE, _SIGN = np.uint32(0x7FFFFFFF), np.uint32(31)
_K1, _K2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_32, _29 = np.uint64(32), np.uint64(29)


@kernel
def compare_steps(values: Any, dim: int, inverse: float, parent: Any, unknown: int, found: Any) -> None:
    """Write to `found` (uint8) whether `kernels.lattice.quantize` gives rows of flat float32 the codes `parent`.

    `parent` is flat int8 or int16. A row whose first code is `unknown` has none.
    """
    width, single = np.uintp(dim), np.float32(inverse)
    for i in range(found.size):
        first = np.uintp(i * dim)
        if parent[first] == unknown:
            found[i] = UNKNOWN
            continue
        near, used = True, np.int32(0)
        for j in range(first, first + width):
            code = np.int32(parent[j])
            near &= abs(values[j] * single - np.float32(code)) < _NEAR
            used |= code
        if near and used:
            found[i] = SAME
            continue
        other: Any = False
        for j in range(first, first + width):
            exact = np.float64(values[j]) * inverse
            # NaN is no code. A row that would be zeros and is not has no codes.
            other |= np.rint(exact) != parent[j]
            other |= used == 0 and values[j] != 0
        found[i] = OTHER if other else SAME


@kernel
def compare_floats(
    values: Any, dim: int, scale: Any, shift: int, limits: Any, parent: Any, unknown: int, found: Any
) -> None:
    """Write to `found` (uint8) whether `kernels.lattice.quantize_floating` gives rows the codes `parent`.

    `values` is flat float32, `parent` flat int16. A row whose first code is `unknown` has none. Values are coded as
    `kernels.lattice.scale_floats` makes them.
    """
    width, below, zero, one = np.uintp(dim), np.uint32(shift), np.uint32(0), np.uint32(1)
    least, lowest, most, raised = limits
    half, low, top = np.uint32((1 << (shift - 1)) - 1), np.uint32(lowest), np.uint32(most)
    more = np.uint32(raised)
    for i in range(found.size):
        first = np.uintp(i * dim)
        if parent[first] == unknown:
            found[i] = UNKNOWN
            continue
        # All numbers are kept at 32 bits, by which the loop is twice as fast. The sign of a difference tells what is
        # less.
        different, small, negative = zero, zero, zero
        for j in range(first, first + width):
            bits = bits_of(scaled(values[j], scale))
            size = np.uint32(bits & _SIZE)
            magnitude = np.uint32(np.uint32(size + np.uint32(half + ((size >> below) & one))) >> below)
            sign, used = np.uint32(zero - np.uint32(bits >> _SIGN)), np.uint32(zero - size)
            raised_size = np.uint32(magnitude + np.uint32(more & np.uint32(zero - np.uint32(used >> _SIGN))))
            code = np.uint32(np.uint32(raised_size ^ sign) - sign)
            different = np.uint32(different | (code ^ np.uint32(np.int32(parent[j]))))
            different = np.uint32(different | (np.uint32(top - magnitude) & ~_SIZE))
            small = np.uint32(small | (np.uint32(magnitude - low) & used))
            negative = np.uint32(negative | (used & bits))
        if small > _SIZE:
            least_code = zero if negative > _SIZE else np.uint32(least)
            different = zero
            for j in range(first, first + width):
                bits = bits_of(scaled(values[j], scale))
                size = np.uint32(bits & _SIZE)
                magnitude = np.uint32(np.uint32(size + np.uint32(half + ((size >> below) & one))) >> below)
                different = np.uint32(different | (np.uint32(top - magnitude) & ~_SIZE))
                if size != 0:
                    magnitude = least_code if magnitude < low else np.uint32(magnitude + more)
                sign = np.uint32(zero - np.uint32(bits >> _SIGN))
                code = np.uint32(np.uint32(magnitude ^ sign) - sign)
                different = np.uint32(different | (code ^ np.uint32(np.int32(parent[j]))))
        found[i] = OTHER if different else SAME


@kernel
def compare_exact(values: Any, dim: int, parent: Any, unknown: int, found: Any) -> None:
    """Do as `compare_floats`, where codes have all bits: `parent` is int32."""
    width = np.uintp(dim)
    for i in range(found.size):
        first, different = np.uintp(i * dim), np.int32(0)
        for j in range(first, first + width):
            bits = np.int32(bits_of(values[j]))
            different |= parent[j] ^ bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        found[i] = UNKNOWN if parent[first] == unknown else OTHER if different else SAME


@kernel
def read_steps(values: Any, dim: int, step: Any, most: int, codes: Any, unknown: int, found: Any) -> None:
    """Write the codes of rows of flat float32 to `codes` (int8 or int16) where each value is `step` times one.

    A row with another value, or a code beyond `most`, gets `unknown` as its first code, and is marked in `found`
    (uint8).
    """
    width = np.uintp(dim)
    for i in range(found.size):
        first = np.uintp(i * dim)
        bad: Any = False
        for j in range(first, first + width):
            quotient = values[j] / step
            quotient = quotient if abs(quotient) <= most else np.float32(0)
            code = np.int32(np.rint(quotient))
            bad |= step * np.float32(code) != values[j]
            codes[j] = code
        if bad:
            codes[first] = unknown
        found[i] = bad


@kernel
def read_floats(
    values: Any, dim: int, shift: int, least: int, most: int, codes: Any, unknown: int, found: Any
) -> None:
    """Do as `read_steps`, where each value of flat float32 has the bits of a code (int16, or int32 if it is exact)."""
    width, below = np.uintp(dim), np.uint32(shift)
    low, narrow = np.uint32((1 << shift) - 1), np.int32(codes.itemsize == 2)
    for i in range(found.size):
        first = np.uintp(i * dim)
        bad: Any = False
        for j in range(first, first + width):
            bits = bits_of(values[j])
            magnitude = np.int32((bits & _SIZE) >> below)
            bad |= (bits & low) != 0 or magnitude > most or (magnitude < least and bits != 0)
            sign = np.int32(bits >> _SIGN)
            codes[j] = np.int32((magnitude ^ -sign) + sign * narrow)
        if bad or codes[first] == unknown:
            codes[first] = unknown
            bad = True
        found[i] = bad


@helper
def _mixed(word: Any) -> Any:
    # No product moves the highest bit, which is a sign. Unmixed, flipped signs would cancel each other.
    return (word ^ (word >> _32)) * _K2


@kernel
def digest_rows(words: Any, width: int, key: Any, digests: Any) -> None:
    """Write a digest of each row, of `width` flat uint64, to `digests` (uint64)."""
    columns, four = np.uintp(width), np.uintp(width - width % 4)
    for i in range(digests.size):
        first = np.uintp(i * width)
        a, b, c, d = key, key ^ _K1, key ^ _K2, key + _K1
        for j in range(first, first + four, np.uintp(4)):
            a = (a ^ _mixed(words[j])) * _K1
            b = (b ^ _mixed(words[j + np.uintp(1)])) * _K1
            c = (c ^ _mixed(words[j + np.uintp(2)])) * _K1
            d = (d ^ _mixed(words[j + np.uintp(3)])) * _K1
            a, b, c, d = a ^ (a >> _32), b ^ (b >> _32), c ^ (c >> _32), d ^ (d >> _32)
        for j in range(first + four, first + columns):
            a = (a ^ _mixed(words[j])) * _K1
            a ^= a >> _32
        for lane in (b, c, d):
            a = (a ^ _mixed(lane)) * _K1
            a ^= a >> _29
        digests[i] = a ^ (a >> _32)
