"""Packs codes. Each row starts on a byte, and code j takes the bits [j * bits, (j + 1) * bits), lowest bit first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def pack_rows(codes: Any, dim: int, bits: int, out: Any) -> None:
    """Pack rows of `dim` codes, contiguous in `codes` (uint8), into `out` (uint8 (n, bytes a row))."""
    count, width = out.shape
    if dim * bits == 8 * width:
        # No row ends within a byte, so all rows can be packed as one.
        pack_row(codes[: count * dim], bits, out.reshape(-1))
    else:
        for i in range(count):
            pack_row(codes[i * dim : (i + 1) * dim], bits, out[i])


@njit(nogil=True, cache=True)
def pack_row(codes: Any, bits: int, out: Any) -> None:
    """Pack `codes` (uint8, each below 2**bits) into `out` (uint8, ceil(len(codes) * bits / 8))."""
    dim = codes.size
    if bits == 8:
        for j in range(dim):
            out[j] = codes[j]
    elif bits == 4:
        pairs = codes[: dim // 2 * 2].view(np.uint16)
        for k in range(pairs.size):
            out[k] = np.uint8((pairs[k] | (pairs[k] >> np.uint16(4))) & np.uint16(0xFF))
        if dim % 2:
            out[dim // 2] = codes[dim - 1]
    elif bits == 2:
        fours = codes[: dim // 4 * 4].view(np.uint32)
        for k in range(fours.size):
            pair = fours[k] | (fours[k] >> np.uint32(6))
            out[k] = np.uint8((pair | (pair >> np.uint32(12))) & np.uint32(0xFF))
        _pack_tail(codes, dim // 4 * 4, bits, out, dim // 4)
    else:
        # Eight codes fill `bits` whole bytes.
        for group in range(dim // 8):
            word = np.uint64(0)
            for k in range(8):
                word |= np.uint64(codes[8 * group + k]) << np.uint64(bits * k)
            for k in range(bits):
                out[group * bits + k] = np.uint8((word >> np.uint64(8 * k)) & np.uint64(0xFF))
        _pack_tail(codes, dim // 8 * 8, bits, out, dim // 8 * bits)


@njit(nogil=True, cache=True)
def _pack_tail(codes: Any, first: int, bits: int, out: Any, start: int) -> None:
    """Pack the last codes of a row, fewer than eight."""
    word = np.uint64(0)
    for j in range(first, codes.size):
        word |= np.uint64(codes[j]) << np.uint64(bits * (j - first))
    for k in range(start, out.size):
        out[k] = np.uint8((word >> np.uint64(8 * (k - start))) & np.uint64(0xFF))


@njit(nogil=True, cache=True)
def unpack_rows(packed: Any, dim: int, bits: int, codes: Any) -> None:
    """Unpack what `pack_rows` packed."""
    count, width = packed.shape
    if dim * bits == 8 * width:
        unpack_row(packed.reshape(-1), bits, codes[: count * dim])
    else:
        for i in range(count):
            unpack_row(packed[i], bits, codes[i * dim : (i + 1) * dim])


@njit(nogil=True, cache=True)
def unpack_row(packed: Any, bits: int, codes: Any) -> None:
    """Unpack what `pack_row` packed: fill `codes` (uint8) from `packed` (uint8)."""
    dim = codes.size
    if bits == 8:
        for j in range(dim):
            codes[j] = packed[j]
    elif bits == 4:
        pairs = codes[: dim // 2 * 2].view(np.uint16)
        for k in range(pairs.size):
            byte = np.uint16(packed[k])
            pairs[k] = (byte | (byte << np.uint16(4))) & np.uint16(0x0F0F)
        if dim % 2:
            codes[dim - 1] = packed[dim // 2] & 0xF
    elif bits == 2:
        fours = codes[: dim // 4 * 4].view(np.uint32)
        for k in range(fours.size):
            pair = np.uint32(packed[k]) | (np.uint32(packed[k]) << np.uint32(12))
            fours[k] = (pair | (pair << np.uint32(6))) & np.uint32(0x03030303)
        _unpack_tail(packed, dim // 4, bits, codes, dim // 4 * 4)
    else:
        mask = np.uint64((1 << bits) - 1)
        for group in range(dim // 8):
            word = np.uint64(0)
            for k in range(bits):
                word |= np.uint64(packed[group * bits + k]) << np.uint64(8 * k)
            for k in range(8):
                codes[8 * group + k] = np.uint8((word >> np.uint64(bits * k)) & mask)
        _unpack_tail(packed, dim // 8 * bits, bits, codes, dim // 8 * 8)


@njit(nogil=True, cache=True)
def _unpack_tail(packed: Any, start: int, bits: int, codes: Any, first: int) -> None:
    word = np.uint64(0)
    for k in range(start, packed.size):
        word |= np.uint64(packed[k]) << np.uint64(8 * (k - start))
    mask = np.uint64((1 << bits) - 1)
    for j in range(first, codes.size):
        codes[j] = np.uint8((word >> np.uint64(bits * (j - first))) & mask)
