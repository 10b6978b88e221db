"""Packs codes. Each row starts on a byte, and code j takes the bits [j * bits, (j + 1) * bits), lowest bit first."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper

_ZERO, _ONE, _TWO, _THREE, _SEVEN, _EIGHT, _BYTE = (np.uintp(n) for n in (0, 1, 2, 3, 7, 8, 0xFF))


def codes_apart(dim: int, bits: int) -> int:
    """How far apart rows of `dim` codes begin in `pack_block` and `unpack_block`: whole bytes of 2 or 4 bits."""
    alike = 8 // bits if bits in (2, 4) else 1
    return -(-dim // alike) * alike


@helper
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
        size, groups = np.uintp(bits), length >> _THREE
        for first in range(_ZERO, np.uintp(count * dim), length):
            # Eight codes fill `bits` whole bytes.
            for group in range(groups):
                start, place = first + (group << _THREE), target + group * size
                word = _ZERO
                for k in range(_EIGHT):
                    word |= np.uintp(codes[start + k]) << (size * k)
                for k in range(size):
                    out[place + k] = np.uint8((word >> (k << _THREE)) & _BYTE)
            word = _ZERO
            for k in range(groups << _THREE, length):
                word |= np.uintp(codes[first + k]) << (size * (k & _SEVEN))
            for k in range(groups * size, (length * size + _SEVEN) >> _THREE):
                out[target + k] = np.uint8(word & _BYTE)
                word >>= _EIGHT
            target += width


@helper
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
        size, groups = np.uintp(bits), length >> _THREE
        mask = (_ONE << size) - _ONE
        for row in range(target, target + np.uintp(count * dim), length):
            for group in range(groups):
                place, source = row + (group << _THREE), start + group * size
                word = _ZERO
                for k in range(size):
                    word |= np.uintp(packed[source + k]) << (k << _THREE)
                for k in range(_EIGHT):
                    codes[place + k] = np.uint8((word >> (size * k)) & mask)
            word, shift = _ZERO, _ZERO
            for k in range(groups * size, (length * size + _SEVEN) >> _THREE):
                word |= np.uintp(packed[start + k]) << shift
                shift += _EIGHT
            for k in range(groups << _THREE, length):
                codes[row + k] = np.uint8(word & mask)
                word >>= size
            start += width
