"""The codes of lattice segments as they are stored.

Codes of a floating grid of m bits are the upper bits of a float32: its sign, and as magnitude all but the lowest 23 - m
bits. Magnitudes of neighbouring values are near each other and far from 0, so lines are stored as differences from
their centers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, array_dtype
from cnr_codecs.entropy.lines import CodedLines, block_room
from cnr_codecs.errors import PayloadError
from cnr_codecs.kernels.lattice import center_lines, find_centers, restore_lines

Codes = npt.NDArray[np.int32]

# Of up to so many columns, lines have as many rows as make this many codes: a class for each row would cost more than
# it gives.
NARROW_DIM, NARROW_LINE = 4, 32
# The greatest magnitudes of a lattice code, and of the difference of two.
MAX_CODE = (1 << 15) - 1
MAX_DIFFERENCE = 2 * MAX_CODE
# Codes are widened for their checksum so many at a time, so that they stay in the cache.
_CHECKED_CODES = 1 << 15
MAX_MANTISSA = 7
MANTISSA_BITS = 23
# Exponents of a float32 that codes have. Those above leave room to round up, those below are subnormal.
_LEAST_EXPONENT, _END_EXPONENT = 1, 254
# The exponent of 65,536, to which the largest values of float16 may be rounded.
_END_OF_FLOAT16 = 127 + 16
# Stands in a body where a lattice has its step; the second number is reserved.
FLOOR = struct.Struct("<HH")


@dataclass(frozen=True)
class FloatingGrid:
    """What a segment on a floating grid has in place of a step."""

    mantissa: int  # bits of the mantissa that codes keep, 1 to 7
    floor: int  # centers of lines are stored less this; one below the least of them
    signed: bool  # whether codes may be negative. Then the lowest bit of what is coded is the sign.

    @property
    def stored(self) -> bytes:
        """The grid as it is stored."""
        return FLOOR.pack(self.floor, 0)

    @classmethod
    def center(
        cls, codes: npt.NDArray[np.int16], line: int, mantissa: int
    ) -> tuple[FloatingGrid, npt.NDArray[np.int32]]:
        """Return a grid, and lines of symbols: of each line of flat codes its center, then the differences from it."""
        codes = codes.view()
        codes.flags.writeable = False
        signed = bool((codes < 0).any())
        centers = np.empty(-(-codes.size // line), np.int64)
        find_centers(codes, line, int(signed), centers)
        floor = int(centers.min(initial=1 << 16, where=centers > 0)) - 1
        grid = cls(mantissa, min(floor, (1 << 16) - 1), signed)
        symbols = np.empty(codes.size + centers.size, np.int32)
        center_lines(codes, line, int(signed), centers, grid.floor, symbols)
        return grid, symbols

    def restore(self, symbols: Codes, line: int) -> Codes:
        """Return the codes of lines of symbols, each `line` codes and a center. They are written over the symbols."""
        least, most = code_range(self.mantissa)
        held = int(restore_lines(symbols, line, int(self.signed), self.floor, least, most, symbols))
        if held < 0:
            raise PayloadError(f"a code is none of a floating grid of {self.mantissa} bits")
        return symbols[:held]


@dataclass(frozen=True, eq=False)
class CodedRows:
    """The codes of a lattice segment as they are stored, or the differences of a relative one."""

    # These integers, entropy-coded. On a floating grid a center stands before each line of them.
    lines: CodedLines
    line_rows: int  # rows of a line
    # crc32c of all codes as int32, row after row; of a relative segment too: of the codes that its rows end up with
    check: int
    # The floating grid of the codes. None: they are multiples of a step, or differences.
    grid: FloatingGrid | None = None

    @classmethod
    def encode(
        cls,
        codes: npt.NDArray[np.int16],
        mantissa: int = 0,
        differences: npt.NDArray[np.int32] | None = None,
    ) -> CodedRows:
        """Code rows (count, dim), of at least one value, on a floating grid of so many bits if there are any.

        Their differences are coded in place of them, where these are given.
        """
        line_rows = NARROW_LINE // codes.shape[1] if codes.shape[1] <= NARROW_DIM else 1
        flat, check = codes.reshape(-1), 0
        for first in range(0, flat.size, _CHECKED_CODES):
            check = checksum(check, flat[first : first + _CHECKED_CODES].astype(np.int32))
        line = line_rows * codes.shape[1]
        if mantissa == 0 or differences is not None:
            stored = flat if differences is None else differences.reshape(-1)
            return cls(CodedLines.encode(stored, line), line_rows, check)
        grid, symbols = FloatingGrid.center(flat, line, mantissa)
        return cls(CodedLines.encode(symbols, line + 1), line_rows, check, grid)

    def decode(self) -> npt.NDArray[np.int16]:
        """Return all codes, flat. `PayloadError` if they are damaged."""
        centers = 0 if self.grid is None else -(-self.lines.size // self.lines.line)
        codes, place, check = np.empty(self.lines.size - centers, np.int16), 0, 0
        room = block_room(self.lines)
        for number in range(self.lines.blocks):
            block = self.decode_block(number, room)
            codes[place : place + len(block)] = block
            check = checksum(check, block)
            place += len(block)
        self.prove(check)
        return codes

    def decode_block(
        self, number: int, room: npt.NDArray[np.int32], most: int = MAX_CODE
    ) -> npt.NDArray[np.int32]:
        """Return the codes of a block, of magnitudes up to `most`: a view of `room`, which is as `block_room`
        makes it.
        """
        codes, zigzag = self.lines.decode_block(number, room)
        if self.grid is not None:
            return self.grid.restore(codes, self.lines.line - 1)
        check_codes(zigzag, most)
        return codes

    def prove(self, check: int) -> None:
        """Compare the checksum of all codes. `PayloadError` if it is another."""
        if check != self.check:
            raise PayloadError("the codes are damaged (crc32c differs)")


def checksum(check: int, codes: npt.NDArray[np.int32]) -> int:
    """Return the crc32c of codes, given that of those before them."""
    return int(google_crc32c.extend(check, codes.astype("<i4", copy=False)))


def check_codes(zigzag: int, most: int = MAX_CODE) -> None:
    """Check the greatest zigzag code of a segment, whose codes have magnitudes up to `most`."""
    if zigzag > 2 * most:
        raise PayloadError(f"a code is beyond {most}")


def code_range(mantissa: int, element: str = "float32") -> tuple[int, int]:
    """Return the least and the greatest magnitude of codes other than 0.

    `mantissa`: bits of the mantissa that codes keep.
    `element`: the element type whose values they are.
    """
    end = _END_OF_FLOAT16 if element == "float16" else _END_EXPONENT
    return _LEAST_EXPONENT << mantissa, (end << mantissa) - 1


def floating_values(codes: npt.NDArray[np.integer[Any]], mantissa: int, element: str) -> npt.NDArray[Any]:
    """Return the values of codes, of the array dtype of an element type. All of them are exact.

    `codes`: signed integers of any shape, from `lattice.floating.floating_codes`.
    `mantissa`, `element`: what the codes were made with.
    """
    wide = codes.astype(np.int64)
    bits = (np.abs(wide) << (MANTISSA_BITS - mantissa)) | ((wide < 0).astype(np.int64) << 31)
    with np.errstate(over="ignore"):  # codes that no writer gives float16 rows
        return bits.astype(np.uint32).view(np.float32).astype(array_dtype(element), copy=False)


def has_floating_codes(element: Element) -> bool:
    """Whether values of the type may have codes of a floating grid."""
    return element.array.kind == "f"
