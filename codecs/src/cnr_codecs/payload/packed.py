"""Lines of integers, packed into bytes and compressed, in blocks that are decoded one by one.

A line has a class, a byte: above, the width in which its integers are packed, and below, their mean magnitude. Lines
are stored in the order of their classes, so that lines of a block are alike, and zstd makes a table for each. The lines
of a width are cut into blocks of up to `BLOCK_CODES` integers, at least one line each. An integer c is packed as its
zigzag code, 2c or -2c - 1: four a byte, as digits of base 3; two a byte, of base 15; or as one to four bytes, of which
all the lowest stand first. A line of zeros takes nothing. The reference of the tests writes the same bytes.

What is stored, each number as u32: the bytes of the frame of all classes, and this frame; the bytes of each block; the
blocks. A block is a frame; of integers of three and four bytes the bytes of a frame, and this frame, for each place,
since the bytes of each have a table of their own. Blocks of zeros have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import PayloadError
from cnr_codecs.kernels.building.compiled import read_only
from cnr_codecs.kernels.packed import (
    classify,
    order_lines,
    pack_integers,
    unpack_bytes,
    unpack_digits,
    unpack_wide,
)
from cnr_codecs.payload.frames import Frame, compress, decompress

Codes: TypeAlias = npt.NDArray[np.int32]
Integers: TypeAlias = npt.NDArray[np.int16] | Codes
Lines: TypeAlias = npt.NDArray[np.uint32]
_Bytes: TypeAlias = npt.NDArray[np.uint8]

# Of a class: the bits below the width.
WIDTH_SHIFT = 4
ZEROS, FOURS, TWOS, ONE_BYTE, THREE_BYTES, FOUR_BYTES = 0, 1, 2, 3, 5, 6
MAX_UINT16 = (1 << 16) - 1
# Integers of a block, by width: enough that threads seldom wait for each other's use of the interpreter, few enough for
# the cache.
BLOCK_CODES = (1 << 18, 1 << 18, 1 << 18, 1 << 18, 1 << 17, 1 << 17, 1 << 17)
# Bases of the digits that a byte has of several integers, and how many these are.
BASES = {FOURS: (3, 4), TWOS: (15, 2)}


def _digits(base: int, count: int, packed: type[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    """Of each byte its integers, int16 one after the other, as one number; those of bytes that have none are 0."""
    zigzag = np.arange(256)[:, None] // base ** np.arange(count) % base
    integers = ((zigzag >> 1) ^ -(zigzag & 1)).astype(np.int16)
    table: npt.NDArray[Any] = integers.view(packed).reshape(-1)
    table.flags.writeable = False
    return table


_TABLES: dict[int, npt.NDArray[Any]] = {
    FOURS: _digits(*BASES[FOURS], np.uint64),
    TWOS: _digits(*BASES[TWOS], np.uint32),
}


@dataclass(frozen=True, eq=False)
class PackedLines:
    """Packed integers."""

    line: int  # how many integers a line has
    order: Lines  # (lines,): the lines in the order in which they are stored
    blocks: tuple[
        tuple[int, int, int], ...
    ]  # of each block its width, and its first and last line in `order`
    classes: _Bytes  # (lines,): the class of each
    head: Frame  # the frame of the classes
    frames: tuple[Frame, ...]  # those of the blocks; b"" of zeros

    @classmethod
    def encode(cls, codes: npt.NDArray[np.signedinteger[Any]], line: int) -> PackedLines:
        """Pack integers, int16 or int32, of at least one. Zeros are put behind them to fill the last line."""
        lines = in_lines(codes, line)
        classes = np.empty(len(lines), np.uint8)
        classify(read_only(lines), line, classes)
        order, blocks = _blocks(classes, line)
        frames = (_pack(np.take(lines, order[begin:end], axis=0), width) for width, begin, end in blocks)
        return cls(line, order, blocks, classes, compress(classes), tuple(frames))

    @classmethod
    def parse(cls, data: Frame, lines: int, line: int, where: str) -> PackedLines:
        """Return the packed lines that are stored as `data`. What blocks hold is proven when they are decoded."""
        held, place = _sizes(data, 0, 1, where)
        head, place = data[place : place + held[0]], place + held[0]
        try:
            classes = decompress(head, lines)
            order, blocks = _blocks(classes, line)
        except PayloadError as error:
            raise PayloadError(f"{where}: the classes of {lines} lines: {error}") from error
        stored = [width != ZEROS for width, *_ in blocks]
        held, place = _sizes(data, place, sum(stored), where)
        if sum(held) != len(data) - place:
            raise PayloadError(
                f"{where}: its blocks are said to take {sum(held)} bytes, they have {len(data) - place}"
            )
        frames, sizes = [], iter(held)
        for is_stored in stored:
            size = next(sizes) if is_stored else 0
            frames.append(data[place : place + size])
            place += size
        return cls(line, order, blocks, classes, head, tuple(frames))

    @property
    def data(self) -> bytes:
        """The lines as they are stored."""
        sizes = np.array([len(each) for each in self.frames if each], "<u4").tobytes()
        return b"".join([len(self.head).to_bytes(4, "little"), self.head, sizes, *self.frames])

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in memory."""
        return self.order.nbytes + self.classes.nbytes + sum(len(each) for each in (self.head, *self.frames))

    def decode_block(self, number: int, most: int) -> Integers:
        """Return the integers of a block, of magnitudes up to `most`, line after line: int16 where they fit."""
        width, begin, end = self.blocks[number]
        size = (end - begin) * self.line
        try:
            return _unpack(self.frames[number], width, size, most)
        except PayloadError as error:
            raise PayloadError(f"block {number} of {len(self.blocks)}: {error}") from error


def in_lines(codes: npt.NDArray[Any], line: int) -> npt.NDArray[Any]:
    """Return codes as (lines, line), the last one filled with zeros."""
    if codes.size % line:
        filled = np.zeros(codes.size + -codes.size % line, codes.dtype)
        filled[: codes.size] = codes.reshape(-1)
        codes = filled
    return codes.reshape(-1, line)


def _blocks(classes: _Bytes, line: int) -> tuple[Lines, tuple[tuple[int, int, int], ...]]:
    ends, order = np.zeros(256, np.int64), np.empty(len(classes), np.uint32)
    order_lines(classes, ends, order)
    edges = [0, *ends[(1 << WIDTH_SHIFT) - 1 :: 1 << WIDTH_SHIFT][: FOUR_BYTES + 1].tolist()]
    if edges[-1] != len(classes):
        raise PayloadError("one is none that a line may have")
    blocks = tuple(
        (width, begin, min(begin + lines, edges[width + 1]))
        for width, lines in enumerate(max(1, codes // line) for codes in BLOCK_CODES)
        for begin in range(edges[width], edges[width + 1], lines)
    )
    return order, blocks


def _sizes(data: Frame, place: int, count: int, where: str) -> tuple[list[int], int]:
    end = place + 4 * count
    if end > len(data):
        raise PayloadError(f"{where}: the sizes of {count} frames are cut off")
    return np.frombuffer(data, "<u4", count, place).tolist(), end


def _pack(codes: npt.NDArray[np.signedinteger[Any]], width: int) -> bytes:
    """Return the frame of a block's integers (lines, line)."""
    if width == ZEROS:
        return b""
    flat = read_only(codes)
    if width <= ONE_BYTE:
        base, count = BASES.get(width, (0, 1))
        packed = np.empty(-(-flat.size // count), np.uint8)
        pack_integers(flat, base, count, packed)
        return compress(packed)
    zigzag = (flat << 1) ^ (flat >> (8 * flat.itemsize - 1))
    planes = np.ascontiguousarray(
        zigzag.astype("<i4", copy=False).view(np.uint8).reshape(-1, 4)[:, : width - TWOS].T
    )
    if width < THREE_BYTES:
        return compress(planes.reshape(-1))
    frames = [compress(plane) for plane in planes]
    return b"".join([part for frame in frames for part in (len(frame).to_bytes(4, "little"), frame)])


def _unpack(frame: Frame, width: int, size: int, most: int) -> Integers:
    if width == ZEROS:
        return np.zeros(size, np.int16)
    if width < ONE_BYTE:
        base, count = BASES[width]
        packed = decompress(frame, -(-size // count))
        table = _TABLES[width]
        whole = np.empty(len(packed), table.dtype)
        if not unpack_digits(packed, base**count, table, whole):
            raise PayloadError("a byte stands for no integers")
        return whole.view(np.int16)[:size]
    if width < THREE_BYTES:
        planes = decompress(frame, (width - TWOS) * size)
        codes = np.empty(size, np.int16)
        if not unpack_bytes(planes, width - TWOS, min(2 * most, MAX_UINT16), codes):
            raise PayloadError(f"a code is beyond {most}")
        return codes
    parts, place = [], 0
    for _ in range(width - TWOS):
        begin = place + 4
        place = begin + int.from_bytes(frame[place:begin], "little")
        parts.append(decompress(frame[begin:place], size))
    if place != len(frame):
        raise PayloadError(f"its frames are said to take {place} bytes, they have {len(frame)}")
    planes, wide = np.concatenate(parts), np.empty(size, np.int32)
    if unpack_wide(planes, width - TWOS, wide) > 2 * most:
        raise PayloadError(f"a code is beyond {most}")
    return wide
