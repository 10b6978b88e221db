"""Packs codes. Each row starts on a byte, and code j takes the bits [j * bits, (j + 1) * bits), lowest bit first."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper, routine

_ZERO, _ONE, _TWO, _THREE, _SEVEN, _EIGHT, _BYTE = (np.uintp(n) for n in (0, 1, 2, 3, 7, 8, 0xFF))


def codes_apart(dim: int, bits: int) -> int:
    """How far apart rows of `dim` codes begin in `pack_block` and `unpack_block`: whole bytes of 2 or 4 bits."""
    alike = 8 // bits if bits in (2, 4) else 1
    return -(-dim // alike) * alike


@helper
def _pack_row(codes: Any, first: Any, dim: Any, bits: Any, out: Any, to: Any) -> None:
    # Eight codes fill `bits` whole bytes.
    groups = dim >> _THREE
    for group in range(groups):
        start, place = first + (group << _THREE), to + group * bits
        word = _ZERO
        for k in range(_EIGHT):
            word |= np.uintp(codes[start + k]) << (bits * k)
        for k in range(bits):
            out[place + k] = np.uint8((word >> (k << _THREE)) & _BYTE)
    word = _ZERO
    for k in range(groups << _THREE, dim):
        word |= np.uintp(codes[first + k]) << (bits * (k & _SEVEN))
    for k in range(groups * bits, (dim * bits + _SEVEN) >> _THREE):
        out[to + k] = np.uint8(word & _BYTE)
        word >>= _EIGHT


@helper
def _unpack_row(packed: Any, first: Any, dim: Any, bits: Any, codes: Any, to: Any) -> None:
    mask, groups = (_ONE << bits) - _ONE, dim >> _THREE
    for group in range(groups):
        start, place = to + (group << _THREE), first + group * bits
        word = _ZERO
        for k in range(bits):
            word |= np.uintp(packed[place + k]) << (k << _THREE)
        for k in range(_EIGHT):
            codes[start + k] = np.uint8((word >> (bits * k)) & mask)
    word, shift = _ZERO, _ZERO
    for k in range(groups * bits, (dim * bits + _SEVEN) >> _THREE):
        word |= np.uintp(packed[first + k]) << shift
        shift += _EIGHT
    for k in range(groups << _THREE, dim):
        codes[to + k] = np.uint8(word & mask)
        word >>= bits


@routine
def pack_block(codes: Any, count: int, dim: int, bits: int, out: Any, to: int) -> None:
    """Pack `count` rows of `dim` codes (uint8), `codes_apart`, to out[to:] (uint8, flat).

    Codes between the rows must be 0.
    """
    target = np.uintp(to)
    width = np.uintp((dim * bits + 7) // 8)
    if bits == 4:
        for k in range(np.uintp(count) * width):
            place = k << _ONE
            out[target + k] = codes[place] | (codes[place + _ONE] << np.uint8(4))
    elif bits == 2:
        for k in range(np.uintp(count) * width):
            place = k << _TWO
            low = codes[place] | (codes[place + _ONE] << np.uint8(2))
            high = codes[place + _TWO] | (codes[place + _THREE] << np.uint8(2))
            out[target + k] = low | (high << np.uint8(4))
    else:
        # Where no row ends within a byte, all rows are one.
        length = np.uintp(dim) if width * _EIGHT > np.uintp(dim * bits) else np.uintp(count * dim)
        for first in range(_ZERO, np.uintp(count * dim), length):
            _pack_row(codes, first, length, np.uintp(bits), out, target)
            target += width


@routine
def unpack_block(packed: Any, first: int, count: int, dim: int, bits: int, codes: Any, to: int) -> None:
    """Unpack `count` rows, from packed[first:] (uint8, flat), to `codes` from codes[to:] on, `codes_apart`."""
    start, target = np.uintp(first), np.uintp(to)
    width = np.uintp((dim * bits + 7) // 8)
    if bits == 4:
        for k in range(np.uintp(count) * width):
            byte, place = packed[start + k], target + (k << _ONE)
            codes[place] = byte & np.uint8(0xF)
            codes[place + _ONE] = byte >> np.uint8(4)
    elif bits == 2:
        for k in range(np.uintp(count) * width):
            byte, place = packed[start + k], target + (k << _TWO)
            codes[place] = byte & np.uint8(3)
            codes[place + _ONE] = (byte >> np.uint8(2)) & np.uint8(3)
            codes[place + _TWO] = (byte >> np.uint8(4)) & np.uint8(3)
            codes[place + _THREE] = byte >> np.uint8(6)
    else:
        length = np.uintp(dim) if width * _EIGHT > np.uintp(dim * bits) else np.uintp(count * dim)
        for row in range(_ZERO, np.uintp(count * dim), length):
            _unpack_row(packed, start, length, np.uintp(bits), codes, target + row)
            start += width
