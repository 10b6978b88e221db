"""Integers to bytes, and back: see `payload.packed`."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import kernel


@kernel
def classify(codes: Any, line: int, classes: Any) -> None:
    """Write the class of each line of flat codes (int16 or int32) to `classes` (uint8): see `payload.packed`."""
    width = np.uintp(line)
    for i in range(classes.size):
        first = np.uintp(i * line)
        most, total = np.int64(0), np.int64(0)
        for j in range(first, first + width):
            code = np.int64(codes[j])
            most = max(most, (code << 1) ^ (code >> 63))
            total += abs(code)
        packed = (most > 0) + (most > 2) + (most > 14) + (most > 0xFF) + (most > 0xFFFF) + (most > 0xFFFFFF)
        mean, limit = 0, np.int64(line)
        while mean < 15 and 8 * total >= limit:
            mean += 1
            limit *= 2
        classes[i] = 16 * packed + (mean if packed else 0)


@kernel
def order_lines(classes: Any, ends: Any, order: Any) -> None:
    """Write the lines in the order of their classes (uint8) to `order` (uint32), and where those of each end.

    `ends` is int64 (256,), and zeros.
    """
    for i in range(classes.size):
        ends[classes[i]] += 1
    begin = np.int64(0)
    for each in range(ends.size):
        count = ends[each]
        ends[each] = begin
        begin += count
    for i in range(classes.size):
        place = ends[classes[i]]
        order[place] = i
        ends[classes[i]] = place + 1


@kernel
def add_gaps(gaps: Any, skip: int, rows: Any) -> Any:
    """Write the rows (uint32) that gaps (uint8) lie before, and return the last one; -1 if there are not so many.

    A gap of `skip` goes on with the next one.
    """
    row, count = np.int64(-1), 0
    for i in range(gaps.size):
        row += gaps[i]
        if gaps[i] != skip:
            if count == rows.size:
                return np.int64(-1)
            row += 1
            rows[count] = np.uint32(row)
            count += 1
    return row if count == rows.size else np.int64(-1)


@kernel
def pack_integers(codes: Any, base: int, count: int, packed: Any) -> None:
    """Write flat codes (int16 or int32) to `packed` (uint8): `count` of them a byte, as digits of `base`."""
    whole, size = codes.size // count, np.uintp(codes.size)
    if count == 1:
        for i in range(np.uintp(packed.size)):
            code = np.int32(codes[i])
            packed[i] = np.uint8((code << 1) ^ (code >> 31))
        return
    for i in range(packed.size):
        first, byte, digit = np.uintp(i * count), np.int32(0), np.int32(1)
        last = first + np.uintp(count) if i < whole else size
        for j in range(first, last):
            code = np.int32(codes[j])
            byte += digit * ((code << 1) ^ (code >> 31))
            digit *= np.int32(base)
        packed[i] = np.uint8(byte)


@kernel
def unpack_digits(packed: Any, limit: int, table: Any, integers: Any) -> bool:
    """Write what `table` has of each byte to `integers`, of its dtype. Whether all bytes are below `limit`."""
    most = np.uint8(0)
    for i in range(np.uintp(packed.size)):
        byte = packed[i]
        most = max(most, byte)
        integers[i] = table[byte]
    return bool(most < limit)


@kernel
def unpack_bytes(planes: Any, count: int, most: int, codes: Any) -> bool:
    """Write the codes (int16) of zigzag codes: of their lowest bytes, and of the next ones where `count` is 2.

    Whether no zigzag code is above `most`.
    """
    size, largest = np.uintp(codes.size), np.uint16(0)
    if count == 1:
        for i in range(size):
            zigzag = np.uint16(planes[i])
            codes[i] = np.int16(zigzag >> 1) ^ -np.int16(zigzag & 1)
        return True
    for i in range(size):
        zigzag = np.uint16(np.uint16(planes[i]) | np.uint16(np.uint16(planes[size + i]) << 8))
        largest = max(largest, zigzag)
        codes[i] = np.int16(np.int16(zigzag >> 1) ^ -np.int16(zigzag & 1))
    return bool(largest <= most)


@kernel
def unpack_wide(planes: Any, count: int, codes: Any) -> Any:
    """Do as `unpack_bytes` of 3 or 4 bytes a code (int32), and return the greatest zigzag code."""
    size, largest = np.uintp(codes.size), np.uint32(0)
    second, third = size + size, size + size + size
    for i in range(size):
        high = np.uint32(planes[third + i]) if count == 4 else np.uint32(0)
        zigzag = np.uint32(planes[i]) | np.uint32(np.uint32(planes[size + i]) << 8)
        zigzag = np.uint32(zigzag | np.uint32(np.uint32(planes[second + i]) << 16) | np.uint32(high << 24))
        largest = max(largest, zigzag)
        codes[i] = np.int32(np.int32(zigzag >> 1) ^ -np.int32(zigzag & 1))
    return np.int64(largest)
