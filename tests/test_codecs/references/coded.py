"""Bodies of coded segments in readable Python: the same bytes as `cnr_codecs.payload`, which tests check.

A body is the grid, 16 bytes; of absolute codes on a floating grid the bytes of the centers' frame, and this; then
the packed lines. A line has the codes of one row, or up to dim 4 those of as many rows as make up to 32 codes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import google_crc32c
from numcodecs import zstd

from tests.test_codecs.references.packed import class_of, encode, stored


def line_rows(dim: int) -> int:
    return 32 // dim if dim <= 4 else 1


def grid(
    codes: Sequence[int],
    dim: int,
    step: float,
    mantissa: int = 0,
    *,
    flags: int = 0,
    by: Sequence[int] | None = None,
) -> bytes:
    """Return the grid of codes. Its checksum is of the step, the scale, the shift, the mantissa, of the classes of the
    lines of codes, or of `by`, and of the codes, in the order in which these lines are stored.
    """
    line = line_rows(dim) * dim
    by_lines, classes = _classed(codes if by is None else by, line)
    lines, _ = _classed(codes, line)
    in_order = [code for number in stored(by_lines, classes) for code in lines[number]]
    kind, mask = ("I", 0xFFFFFFFF) if mantissa == 23 else ("H", 0xFFFF)
    proven = (
        struct.pack("<ffhB", step, 1, 0, mantissa)
        + bytes(classes)
        + struct.pack(f"<{len(in_order)}{kind}", *(code & mask for code in in_order))
    )
    check = google_crc32c.value(proven)
    return struct.pack("<ffhBBI", step, 1, 0, flags, 0, check)


def _classed(codes: Sequence[int], line: int) -> tuple[list[list[int]], list[int]]:
    """The lines, zeros behind the last code included, and their classes."""
    lines = [[*codes[first : first + line]] for first in range(0, len(codes), line)]
    lines[-1] += [0] * (line - len(lines[-1]))
    return lines, [*map(class_of, lines)]


def on_step(
    codes: Sequence[int],
    dim: int,
    step: float,
    differences: Sequence[int] | None = None,
    mantissa: int = 0,
) -> bytes:
    """Return the body of codes of a step, or on a floating grid of 23 bits; or of differences that give these codes."""
    held = codes if differences is None else differences
    return grid(codes, dim, step, mantissa, by=held) + encode(held, line_rows(dim) * dim)


def centered(centers: Sequence[int], rests: Sequence[int], line: int) -> bytes:
    """Return what follows the grid of codes on a floating grid: centers of lines, and differences from these.

    Lines of zeros have no center.
    """
    _, classes = _classed(rests, line)
    own = [center for center, each in zip(centers, classes, strict=True) if each]
    planes = bytes([center & 255 for center in own] + [center >> 8 for center in own])
    held = zstd.compress(planes, 1) if own else b""
    return struct.pack("<I", len(held)) + held + encode(rests, line)


def on_floats(codes: Sequence[int], dim: int, mantissa: int) -> bytes:
    """Return the body of absolute codes on a floating grid."""
    line = line_rows(dim) * dim
    signed, centers, rests = centers_of(codes, line)
    return grid(codes, dim, 0, mantissa, flags=2 * signed, by=rests) + centered(centers, rests, line)


def centers_of(codes: Sequence[int], line: int) -> tuple[bool, list[int], list[int]]:
    """Return whether there are signs, the centers of lines of codes, and the differences from these.

    A center is the mean of the magnitudes other than 0, rounded down. With signs, magnitudes are doubled, and raised
    by 1 if negative. Differences from 0 on are raised by 1, for 0 itself is 0.
    """
    signed = any(code < 0 for code in codes)
    magnitudes = [2 * abs(code) + (code < 0) if signed else code for code in codes]
    lines = [magnitudes[first : first + line] for first in range(0, len(magnitudes), line)]
    centers = [sum(each) // max(sum(map(bool, each)), 1) for each in lines]
    rests = [
        0 if not size else size - center + (size >= center)
        for center, each in zip(centers, lines, strict=True)
        for size in each
    ]
    return signed, centers, rests
