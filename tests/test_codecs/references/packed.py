"""Packed lines in readable Python: the same bytes as `cnr_codecs.payload.packed`, which tests check.

Code c has the zigzag code z = 2c, or -2c - 1 if c is negative. A line's class is 16 times its width, plus the least i
with a mean magnitude below 2**(i - 3), at most 15. Widths, by the greatest z of the line:

    0  0          nothing
    1  up to 2    four codes a byte, digits of base 3, the first one lowest
    2  up to 14   two codes a byte, digits of base 15
    3  up to 2**8 - 1, 4: 2**16 - 1, 5: 2**24 - 1, 6: 2**32 - 1
                  one to four bytes a code: first the lowest bytes of all codes, then the next ones

Lines are stored in the order of their classes, equal ones in their own. Those of a width are cut into blocks, each
a zstd frame of its own, or one for each place of 3 and 4 bytes: of as many lines as have 2**18 codes, of widths from 4
on 2**17.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import groupby

from numcodecs import zstd

Line = Sequence[int]
_BLOCK_CODES = (1 << 18, 1 << 18, 1 << 18, 1 << 18, 1 << 17, 1 << 17, 1 << 17)
_DIGITS = {1: (3, 4), 2: (15, 2)}
_MOST = (0, 2, 14, (1 << 8) - 1, (1 << 16) - 1, (1 << 24) - 1, (1 << 32) - 1)


def zigzag(code: int) -> int:
    return 2 * code if code >= 0 else -2 * code - 1


def class_of(line: Line) -> int:
    """Return the class of a line."""
    width = next(width for width, most in enumerate(_MOST) if max(map(zigzag, line)) <= most)
    total = sum(map(abs, line))
    mean = next((i for i in range(15) if 8 * total < len(line) << i), 15)
    return 16 * width + (mean if width else 0)


def encode(codes: Sequence[int], line: int) -> bytes:
    """Return the bytes of packed lines."""
    lines = [[*codes[first : first + line]] for first in range(0, len(codes), line)]
    lines[-1] += [0] * (line - len(lines[-1]))
    classes = [class_of(each) for each in lines]
    frames = [
        _framed(_packed(block, width), width, len(block) * line)
        for width, block in _blocks(lines, classes, line)
        if width
    ]
    held = zstd.compress(bytes(classes), 1)
    sizes = struct.pack(f"<{len(frames)}I", *map(len, frames))
    data: bytes = struct.pack("<I", len(held)) + held + sizes + b"".join(frames)
    return data


def stored(lines: Sequence[Line], classes: Sequence[int]) -> list[int]:
    """Return the numbers of lines in the order in which they are stored."""
    return sorted(range(len(lines)), key=lambda each: classes[each])


def _blocks(lines: Sequence[Line], classes: Sequence[int], line: int) -> Iterator[tuple[int, list[Line]]]:
    for width, alike in groupby(stored(lines, classes), key=lambda each: classes[each] // 16):
        held = [*alike]
        count = max(1, _BLOCK_CODES[width] // line)
        for first in range(0, len(held), count):
            yield width, [lines[each] for each in held[first : first + count]]


def _framed(data: bytes, width: int, size: int) -> bytes:
    """The frame of a block; of three bytes a code and more, one of each place, its size in front."""
    if width < 5:
        return bytes(zstd.compress(data, 1))
    frames = [zstd.compress(data[first : first + size], 1) for first in range(0, len(data), size)]
    return b"".join(struct.pack("<I", len(each)) + each for each in frames)


def _unframed(data: bytes, width: int) -> bytes:
    if width < 5:
        return bytes(zstd.decompress(data))
    found, place = b"", 0
    while place < len(data):
        (size,) = struct.unpack_from("<I", data, place)
        found += zstd.decompress(data[place + 4 : place + 4 + size])
        place += 4 + size
    return found


def _packed(lines: Sequence[Line], width: int) -> bytes:
    codes = [zigzag(code) for line in lines for code in line]
    if width not in _DIGITS:
        return bytes(code >> 8 * place & 255 for place in range(width - 2) for code in codes)
    base, count = _DIGITS[width]
    groups = (codes[first : first + count] for first in range(0, len(codes), count))
    return bytes(sum(digit * base**place for place, digit in enumerate(group)) for group in groups)


def decode(data: bytes, size: int, line: int) -> list[int]:
    """Return the codes of packed lines, which must be sound."""
    count, place = -(-size // line), 4 + struct.unpack_from("<I", data)[0]
    classes = [*zstd.decompress(data[4:place])]
    blocks = [*_blocks([[each] for each in range(count)], classes, line)]
    frames = struct.unpack_from(f"<{sum(width > 0 for width, _ in blocks)}I", data, place)
    place += 4 * len(frames)
    lines: dict[int, list[int]] = {}
    sizes = iter(frames)
    for width, block in blocks:
        codes = [0] * (len(block) * line)
        if width:
            end = place + next(sizes)
            codes = _unpacked(_unframed(data[place:end], width), width, len(codes))
            place = end
        for position, (number,) in enumerate(block):
            lines[number] = codes[position * line : (position + 1) * line]
    assert place == len(data)
    return [code for number in range(count) for code in lines[number]][:size]


def _unpacked(data: bytes, width: int, size: int) -> list[int]:
    if width in _DIGITS:
        base, count = _DIGITS[width]
        found = [byte // base**place % base for byte in data for place in range(count)][:size]
    else:
        planes = [data[place * size : (place + 1) * size] for place in range(width - 2)]
        found = [
            sum(byte << 8 * place for place, byte in enumerate(each)) for each in zip(*planes, strict=True)
        ]
    return [z >> 1 if z % 2 == 0 else -(z + 1 >> 1) for z in found]
