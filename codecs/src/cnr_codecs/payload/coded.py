"""The codes of lattice segments as they are stored.

Codes of a floating grid of m bits are the upper bits of a float32: its sign, and as magnitude all but the lowest 23 - m
bits. Magnitudes of neighbouring values are near each other and far from 0, so lines are stored as differences from
their centers. Codes of a floating grid of 23 bits are all bits of a float32, as an integer that is the greater the
greater the number: any integer of 32 bits is one, and sums of them are taken modulo 2**32.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, array_dtype, round_to_bfloat16
from cnr_codecs.errors import PayloadError
from cnr_codecs.kernels.building.compiled import read_only
from cnr_codecs.kernels.lattice import center_lines, find_centers, place_rows, restore_lines
from cnr_codecs.payload.frames import Frame, claimed_size, compress, decompress
from cnr_codecs.payload.packed import Integers, Lines, PackedLines, in_lines

Codes = npt.NDArray[np.int16] | npt.NDArray[np.int32]

# Of up to so many columns, lines have as many rows as make this many codes: a class for each row would cost more than
# it gives.
NARROW_DIM, NARROW_LINE = 4, 32
# The greatest magnitudes of a lattice code, and of the difference of two.
MAX_CODE = (1 << 15) - 1
MAX_DIFFERENCE = 2 * MAX_CODE
# From what the magnitude of the least integer of 32 bits overflows to, up to that of the sum of two: refuses none.
_ANY = -(1 << 31), 1 << 32
# A grid as it is in checksums: its step, scale and shift, as in a payload, and the bits of the mantissa.
_GRID = struct.Struct("<ffhB")
# In place of a row that is none: more than a chunk may have.
NO_ROW = np.uint32((1 << 32) - 1)
MAX_MANTISSA = 7
MANTISSA_BITS = 23
# Exponents of a float32 that codes have. Those above leave room to round up, those below are subnormal.
_LEAST_EXPONENT, _END_EXPONENT = 1, 254
# The most octaves that codes of a floating grid are shifted by. Those of one bit have nothing left then.
MAX_SHIFT = MAX_CODE >> 1
# The exponent of 65,536, to which the largest values of float16 may be rounded.
_END_OF_FLOAT16 = 127 + 16


class Grid(NamedTuple):
    """What integers stand for: multiples of a step, or the upper bits of floating-point numbers.

    A floating grid of 1 to 7 bits may have moved, for float32: a value is then coded as it is times `scale`, and the
    magnitude of its code is raised by `shift` octaves. So numbers that decay together keep their codes as `scale` and
    `shift` grow. The least code stands for the least normal number on any such grid.
    """

    step: float = 0.0  # 0 of a floating grid
    mantissa: int = 0  # bits of the mantissa that codes keep on a floating grid, 1 to 7 or 23; else 0
    scale: float = 1.0  # a float32 from 1 to below 2
    shift: int = 0  # 0 to `MAX_SHIFT`

    @property
    def is_exact(self) -> bool:
        """Whether codes keep all bits of a float32."""
        return self.mantissa == MANTISSA_BITS

    @property
    def is_centered(self) -> bool:
        """Whether codes are stored as differences from the centers of their lines."""
        return 0 < self.mantissa <= MAX_MANTISSA

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of codes: int16, or int32 if they are exact."""
        return np.dtype(np.int32 if self.is_exact else np.int16)

    @property
    def code_range(self) -> tuple[int, int]:
        """The least and the greatest magnitude of codes other than 0."""
        if self.is_exact:
            return _ANY
        least, most = code_range(self.mantissa) if self.mantissa else (1, MAX_CODE)
        return least, min(most + self.raised, MAX_CODE)

    @property
    def is_moved(self) -> bool:
        """Whether it is a floating grid that has moved."""
        return (self.scale, self.shift) != (1, 0)

    @property
    def raised(self) -> int:
        """What the shift adds to the magnitudes of codes."""
        return self.shift << self.mantissa

    @property
    def lowest(self) -> int:
        """The least magnitude of a code other than the least one of all, before the shift; of one that moved not."""
        return _lowest(self.mantissa, self.scale) if self.is_moved else _LEAST_EXPONENT << self.mantissa

    @property
    def parameters(self) -> npt.NDArray[np.float32]:
        """The parameters of its segments: step, scale and shift, (1, 3)."""
        return np.array([[self.step, self.scale, self.shift]], np.float32)

    @property
    def terms(self) -> tuple[np.float32, int, np.float32, int, int]:
        """What `kernels.lattice.place_rows` goes by."""
        step, scale = np.float32(self.step), np.float32(self.scale)
        return step, MANTISSA_BITS - self.mantissa, scale, self.raised, self.lowest

    def at(self, scale: float, shift: int) -> Grid:
        """The same grid, moved there if it is one that may move."""
        return self._replace(scale=scale, shift=shift) if self.is_centered else self

    def __str__(self) -> str:
        if not self.mantissa:
            return f"the step {self.step!r}"
        moved = f" at {self.scale!r} * 2**{self.shift}" if self.is_moved else ""
        return f"the floating grid of {self.mantissa} bits{moved}"


@dataclass(frozen=True, eq=False)
class Centers:
    """Centers of lines of codes on a floating grid, whose magnitudes are near each other and far from 0."""

    grid: Grid
    is_signed: bool  # whether codes may be negative. Then the lowest bit of what is coded is the sign.
    lines: npt.NDArray[np.bool_]  # (lines,): which lines are not of zeros: these have centers
    data: Frame  # of these lines, as they are stored

    @classmethod
    def encode(
        cls, centers: npt.NDArray[np.int64], classes: npt.NDArray[np.uint8], grid: Grid, is_signed: bool
    ) -> Centers:
        """Pack the centers of lines. `classes`: of the differences from these."""
        lines = classes != 0
        planes = centers[lines].astype("<u2").view(np.uint8).reshape(-1, 2).T
        data = compress(np.ascontiguousarray(planes).reshape(-1)) if planes.size else b""
        return cls(grid, is_signed, lines, data)

    @classmethod
    def parse(
        cls, data: Frame, classes: npt.NDArray[np.uint8], grid: Grid, is_signed: bool, where: str
    ) -> Centers:
        """Return the centers that are stored as `data`."""
        lines = classes != 0
        count = int(np.count_nonzero(lines))
        if (claimed_size(data) != 2 * count) if count else len(data):
            raise PayloadError(f"{where}: {len(data)} bytes are not the centers of {count} lines")
        return cls(grid, is_signed, lines, data)

    @cached_property
    def values(self) -> npt.NDArray[np.int64]:
        """Of each line, 0 of zeros."""
        values = np.zeros(len(self.lines), np.int64)
        if count := int(np.count_nonzero(self.lines)):
            try:
                low, high = decompress(self.data, 2 * count).reshape(2, count)
            except PayloadError as error:
                raise PayloadError(f"the centers of lines: {error}") from error
            values[self.lines] = low + (high.astype(np.int64) << 8)
        return values

    def restore(self, rests: Integers, line: int, lines: Lines) -> Codes:
        """Return the codes of differences from the centers of their lines."""
        codes = np.empty(rests.size, np.int16)
        if not restore_lines(
            rests, line, int(self.is_signed), self.values[lines], *self.grid.code_range, codes
        ):
            raise PayloadError(f"a code is none of {self.grid}")
        return codes


@dataclass(frozen=True, eq=False)
class CodedRows:
    """The codes of a lattice segment as they are stored, or the differences of a relative one."""

    count: int  # rows
    dim: int
    grid: Grid
    lines: PackedLines  # these integers; on a floating grid their differences from the centers of their lines
    # The checksum of all codes, in the order in which lines are stored, zeros that fill the last one included; of a
    # relative segment too: of the codes that its rows end up with. It begins with `begun`.
    check: int
    centers: Centers | None = None  # of codes on a floating grid

    @classmethod
    def encode(
        cls,
        codes: Codes,
        grid: Grid,
        differences: npt.NDArray[np.signedinteger[Any]] | None = None,
    ) -> CodedRows:
        """Code rows (count, dim), of at least one value, of the dtype of the grid.

        Their differences are coded in place of them, where these are given.
        """
        count, dim = codes.shape
        line, centers = rows_of_line(dim) * dim, None
        stored: npt.NDArray[np.signedinteger[Any]]
        if not grid.is_centered or differences is not None:
            stored = codes if differences is None else differences
            lines = PackedLines.encode(stored, line)
        else:
            flat = read_only(codes)
            is_signed = bool((flat < 0).any())
            found = np.empty(-(-flat.size // line), np.int64)
            find_centers(flat, line, int(is_signed), found)
            stored = np.empty(flat.size, np.int32)
            center_lines(flat, line, int(is_signed), found, stored)
            lines = PackedLines.encode(stored, line)
            centers = Centers.encode(found, lines.classes, grid, is_signed)
        table, check = in_lines(codes, line), begun(grid, lines)
        for _, begin, end in lines.blocks:
            check = checksum(check, np.take(table, lines.order[begin:end], axis=0))
        return cls(count, dim, grid, lines, check, centers)

    @property
    def data(self) -> bytes:
        """The rows as they are stored."""
        if self.centers is None:
            return self.lines.data
        centers = self.centers.data
        return b"".join([len(centers).to_bytes(4, "little"), centers, self.lines.data])

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in memory."""
        centers = 0 if self.centers is None else len(self.centers.data) + 9 * len(self.centers.lines)
        return self.lines.nbytes + centers

    @classmethod
    def parse(
        cls,
        data: Frame,
        shape: tuple[int, int],
        check: int,
        grid: Grid,
        where: str,
        *,
        is_centered: bool,
        is_signed: bool,
    ) -> CodedRows:
        """Return the rows (count, dim) that are stored as `data`. What blocks hold is proven when they are decoded."""
        line_rows = rows_of_line(shape[1])
        lines, centers = -(-shape[0] // line_rows), data[:0]
        if is_centered:
            nbytes = int.from_bytes(data[:4], "little")
            if len(data) < 4 + nbytes:
                raise PayloadError(f"{where}: the centers of its lines are cut off")
            centers, data = data[4 : 4 + nbytes], data[4 + nbytes :]
        packed = PackedLines.parse(data, lines, line_rows * shape[1], where)
        if not is_centered:
            return cls(*shape, grid, packed, check)
        held = Centers.parse(centers, packed.classes, grid, is_signed, where)
        return cls(*shape, grid, packed, check, held)

    def decode(self) -> Codes:
        """Return all codes, flat. `PayloadError` if they are damaged."""
        codes = np.empty((len(self.lines.order), self.lines.line), self.grid.dtype)
        check = begun(self.grid, self.lines)
        for number, (_, begin, end) in enumerate(self.lines.blocks):
            block = self.decode_block(number)
            check = checksum(check, block)
            codes[self.lines.order[begin:end]] = block.reshape(-1, self.lines.line)
        self.prove(check)
        return codes.reshape(-1)[: self.count * self.dim]

    def decode_block(self, number: int, most: int = MAX_CODE) -> Integers:
        """Return the codes of a block, line after line, of magnitudes up to `most` if they are not exact.

        They are of the dtype of the grid, but where `most` is that of differences.
        """
        most = self.grid.code_range[1] if self.grid.is_exact else most
        codes = self.lines.decode_block(number, most if self.centers is None else MAX_DIFFERENCE + 1)
        if self.centers is None:
            return codes if most == MAX_DIFFERENCE else codes.astype(self.grid.dtype, copy=False)
        _, begin, end = self.lines.blocks[number]
        return self.centers.restore(codes, self.lines.line, self.lines.order[begin:end])

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


def begun(grid: Grid, lines: PackedLines) -> int:
    """Return the checksum of what gives codes their values and their order: the grid, and the classes of lines."""
    check = google_crc32c.value(_GRID.pack(grid.step, grid.scale, grid.shift, grid.mantissa))
    return int(google_crc32c.extend(check, lines.classes))


def checksum(check: int, codes: Integers) -> int:
    """Return the crc32c of codes, of the dtype of their grid, given that of those before them."""
    return int(google_crc32c.extend(check, codes.astype(codes.dtype.newbyteorder("<"), copy=False)))


def code_range(mantissa: int, element: str = "float32") -> tuple[int, int]:
    """Return the least and the greatest magnitude of codes other than 0.

    `mantissa`: bits of the mantissa that codes keep, 1 to 7.
    `element`: the element type whose values they are.
    """
    end = _END_OF_FLOAT16 if element == "float16" else _END_EXPONENT
    return _LEAST_EXPONENT << mantissa, (end << mantissa) - 1


def valid_move(scale: Any, shift: Any) -> bool:
    """Whether a floating grid may have moved there."""
    is_typed = type(scale) is float and type(shift) is int
    return is_typed and 1 <= scale < 2 and float(np.float32(scale)) == scale and 0 <= shift <= MAX_SHIFT


@lru_cache(maxsize=1024)
def _lowest(mantissa: int, scale: float) -> int:
    """The least magnitude whose value over the scale is above the least normal number as a float32."""
    least = _LEAST_EXPONENT << mantissa
    ratios = np.arange(least, 2 * least + 1, dtype=np.float32) / np.float32(least) / np.float32(scale)
    return least + int(np.argmax(ratios > 1))


def grid_values(codes: npt.NDArray[np.integer[Any]], grid: Grid, element: str) -> npt.NDArray[Any]:
    """Return the values of codes, of the array dtype of an element type.

    Those on a step are exact in float32, and rounded to the element type. Those on a floating grid are exact; if it has
    moved, rounded once.

    `codes`: signed integers (n, dim). `PayloadError` if the type has no value of an exact code.
    """
    (count, dim), held = codes.shape, np.ascontiguousarray(codes, grid.dtype)
    wide, need = np.empty((count, dim), np.float32), np.ones(count, np.uint8)
    place = 0, need, wide.reshape(-1), dim
    place_rows(held.reshape(-1), dim, grid.terms, np.arange(count, dtype=np.uint32), place)
    if element == "bfloat16":
        values = round_to_bfloat16(wide)
    else:
        with np.errstate(all="ignore"):  # codes that no writer gives float16 rows
            values = wide.astype(array_dtype(element), copy=False)
    if grid.is_exact and element != "float32":  # of types whose NaN are not the same to all processors
        again = values.astype(np.float32)
        if ((again.view(np.int32) != wide.view(np.int32)) | np.isnan(wide)).any():
            raise PayloadError(f"a code is that of no {element} value")
    return values


def exact_codes(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the exact codes of numbers with these bits, or the bits of numbers with these codes."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def has_floating_codes(element: Element, mantissa: int = MAX_MANTISSA) -> bool:
    """Whether values of the type may have codes of a floating grid of so many bits: exact ones have 32 bits."""
    return element.array.kind == "f" and (mantissa != MANTISSA_BITS or element.quantizable)
