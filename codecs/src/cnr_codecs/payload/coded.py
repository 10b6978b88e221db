"""The codes of lattice segments as they are stored.

Codes of a floating grid of m bits are the upper bits of a float32: its sign, and as magnitude all but the lowest 23 - m
bits. Magnitudes of neighbouring values are near each other and far from 0, so lines are stored as differences from
their centers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, array_dtype
from cnr_codecs.errors import PayloadError
from cnr_codecs.kernels.lattice import center_lines, find_centers, restore_lines
from cnr_codecs.payload.frames import Frame
from cnr_codecs.payload.packed import Lines, PackedLines, in_lines

Codes = npt.NDArray[np.int32]

# Of up to so many columns, lines have as many rows as make this many codes: a class for each row would cost more than
# it gives.
NARROW_DIM, NARROW_LINE = 4, 32
# The greatest magnitudes of a lattice code, and of the difference of two.
MAX_CODE = (1 << 15) - 1
MAX_DIFFERENCE = 2 * MAX_CODE
# Centers are packed as lines of so many.
CENTERS_LINE = 64
# In place of a row that is none: more than a chunk may have.
NO_ROW = np.uint32((1 << 32) - 1)
MAX_MANTISSA = 7
MANTISSA_BITS = 23
# Exponents of a float32 that codes have. Those above leave room to round up, those below are subnormal.
_LEAST_EXPONENT, _END_EXPONENT = 1, 254
# The exponent of 65,536, to which the largest values of float16 may be rounded.
_END_OF_FLOAT16 = 127 + 16


class Grid(NamedTuple):
    """What integers stand for: multiples of a step, or the upper bits of floating-point numbers."""

    step: float = 0.0  # 0 of a floating grid
    mantissa: int = 0  # bits of the mantissa that codes keep on a floating grid, 1 to 7; else 0

    def __str__(self) -> str:
        return f"the floating grid of {self.mantissa} bits" if self.mantissa else f"the step {self.step!r}"


@dataclass(frozen=True, eq=False)
class Centers:
    """Centers of lines of codes on a floating grid, whose magnitudes are near each other and far from 0."""

    mantissa: int
    is_signed: bool  # whether codes may be negative. Then the lowest bit of what is coded is the sign.
    lines: int  # how many there are
    packed: PackedLines

    @classmethod
    def find(cls, codes: npt.NDArray[np.int16], line: int, mantissa: int) -> tuple[Centers, Codes]:
        """Return the centers of lines of flat codes, and the differences from them."""
        codes = codes.view()
        codes.flags.writeable = False
        is_signed = bool((codes < 0).any())
        centers = np.empty(-(-codes.size // line), np.int64)
        find_centers(codes, line, int(is_signed), centers)
        rests = np.empty(codes.size, np.int32)
        center_lines(codes, line, int(is_signed), centers, rests)
        packed = PackedLines.encode(centers.astype(np.int32), CENTERS_LINE)
        return cls(mantissa, is_signed, len(centers), packed), rests

    @cached_property
    def values(self) -> npt.NDArray[np.int64]:
        """Of each line, 0 of zeros."""
        found = self.packed.decode(MAX_DIFFERENCE + 1).reshape(-1)[: self.lines]
        if (found < 0).any():
            raise PayloadError("a center is negative")
        return found.astype(np.int64)

    def restore(self, rests: Codes, line: int, lines: Lines) -> None:
        """Write codes over differences from the centers of their lines."""
        least, most = code_range(self.mantissa)
        if not restore_lines(rests, line, int(self.is_signed), self.values[lines], least, most):
            raise PayloadError(f"a code is none of a floating grid of {self.mantissa} bits")


@dataclass(frozen=True, eq=False)
class CodedRows:
    """The codes of a lattice segment as they are stored, or the differences of a relative one."""

    count: int  # rows
    dim: int
    lines: PackedLines  # these integers; on a floating grid their differences from the centers of their lines
    # crc32c of all codes as int32, in the order in which lines are stored, zeros that fill the last one included; of a
    # relative segment too: of the codes that its rows end up with
    check: int
    centers: Centers | None = None  # of codes on a floating grid

    @classmethod
    def encode(
        cls,
        codes: npt.NDArray[np.int16],
        mantissa: int = 0,
        differences: npt.NDArray[np.signedinteger[Any]] | None = None,
    ) -> CodedRows:
        """Code rows (count, dim), of at least one value, on a floating grid of so many bits if there are any.

        Their differences are coded in place of them, where these are given.
        """
        count, dim = codes.shape
        line, centers = rows_of_line(dim) * dim, None
        stored: npt.NDArray[np.signedinteger[Any]]
        if mantissa == 0 or differences is not None:
            stored = codes if differences is None else differences
        else:
            centers, stored = Centers.find(codes.reshape(-1), line, mantissa)
        lines, table, check = PackedLines.encode(stored, line), in_lines(codes, line), 0
        for _, begin, end in lines.blocks:
            check = checksum(check, np.take(table, lines.order[begin:end], axis=0).astype(np.int32))
        return cls(count, dim, lines, check, centers)

    @property
    def data(self) -> bytes:
        """The rows as they are stored."""
        if self.centers is None:
            return self.lines.data
        centers = self.centers.packed.data
        return len(centers).to_bytes(4, "little") + centers + self.lines.data

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in memory."""
        return self.lines.nbytes + (
            0 if self.centers is None else self.centers.packed.nbytes + 8 * self.centers.lines
        )

    @classmethod
    def parse(
        cls,
        data: Frame,
        shape: tuple[int, int],
        check: int,
        mantissa: int,
        is_signed: bool,
        where: str,
    ) -> CodedRows:
        """Return the rows (count, dim) that are stored as `data`. What blocks hold is proven when they are decoded.

        `mantissa`: of codes on a floating grid; else 0.
        """
        line_rows = rows_of_line(shape[1])
        lines, centers = -(-shape[0] // line_rows), None
        if mantissa:
            nbytes = int.from_bytes(data[:4], "little")
            if len(data) < 4 + nbytes:
                raise PayloadError(f"{where}: the centers of its lines are cut off")
            held = data[4 : 4 + nbytes]
            packed = PackedLines.parse(held, -(-lines // CENTERS_LINE), CENTERS_LINE, where)
            centers = Centers(mantissa, is_signed, lines, packed)
            data = data[4 + nbytes :]
        packed = PackedLines.parse(data, lines, line_rows * shape[1], where)
        return cls(*shape, packed, check, centers)

    def decode(self) -> npt.NDArray[np.int16]:
        """Return all codes, flat. `PayloadError` if they are damaged."""
        codes = np.empty((len(self.lines.order), self.lines.line), np.int16)
        check = 0
        for number, (_, begin, end) in enumerate(self.lines.blocks):
            block = self.decode_block(number)
            check = checksum(check, block)
            codes[self.lines.order[begin:end]] = block.reshape(-1, self.lines.line)
        self.prove(check)
        return codes.reshape(-1)[: self.count * self.dim]

    def decode_block(self, number: int, most: int = MAX_CODE) -> Codes:
        """Return the codes of a block, of magnitudes up to `most`, line after line."""
        codes = self.lines.decode_block(number, most if self.centers is None else MAX_DIFFERENCE + 1)
        if self.centers is not None:
            _, begin, end = self.lines.blocks[number]
            self.centers.restore(codes, self.lines.line, self.lines.order[begin:end])
        return codes

    def rows_of_block(self, number: int, offsets: Lines) -> Lines:
        """Return the rows whose codes a block has, in its order. `NO_ROW` are the rows that fill the last line.

        `offsets`: (count,): all rows.
        """
        _, begin, end = self.lines.blocks[number]
        lines = self.lines.order[begin:end]
        line_rows = rows_of_line(self.dim)
        if line_rows == 1:
            return np.take(offsets, lines)
        places = (lines[:, None] * np.uint32(line_rows) + np.arange(line_rows, dtype=np.uint32)).reshape(-1)
        rows = offsets[np.minimum(places, np.uint32(self.count - 1))]
        rows[places >= self.count] = NO_ROW
        return rows

    def prove(self, check: int) -> None:
        """Compare the checksum of all codes. `PayloadError` if it is another."""
        if check != self.check:
            raise PayloadError("the codes are damaged (crc32c differs)")


def rows_of_line(dim: int) -> int:
    """Return how many rows of so many columns a line of codes has."""
    return NARROW_LINE // dim if dim <= NARROW_DIM else 1


def checksum(check: int, codes: npt.NDArray[np.int32]) -> int:
    """Return the crc32c of codes, given that of those before them."""
    return int(google_crc32c.extend(check, codes.astype("<i4", copy=False)))


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
