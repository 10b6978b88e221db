"""The codec of floating grids: a value as the upper bits of a floating-point number.

A value's code depends on that value alone. The bytes of a row depend on the rows that it is encoded with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cnr_codecs.elements import Element, element_named
from cnr_codecs.errors import CodecConfigError, RowsError
from cnr_codecs.kernels.building.compiled import read_only
from cnr_codecs.kernels.lattice import quantize_floating, scale_floats
from cnr_codecs.lattice.segments import GridRows, Mask
from cnr_codecs.payload.coded import (
    MANTISSA_BITS,
    MAX_CODE,
    MAX_MANTISSA,
    MAX_SHIFT,
    Codes,
    Grid,
    code_range,
    exact_codes,
    has_floating_codes,
    valid_move,
)
from cnr_codecs.protocol import Rows

DEFAULT_MANTISSA_BITS = 3
MANTISSAS = frozenset({*range(1, MAX_MANTISSA + 1), MANTISSA_BITS})
# What signs, exponents and models were measured to take beside the mantissa, in rows of a trained accumulator.
_OTHER_BITS = 4.0
# Of float64: bits of the mantissa, and how much larger its exponents are than those of the same float32.
_MANTISSA_BITS_64, _BIAS_64 = 52, 1023 - 127


@dataclass(frozen=True)
class FloatingRows(GridRows):
    """Stores each value with fewer bits of its mantissa, rounded to nearest, or with all, and compresses these bits.

    Each value keeps its sign and is off by at most a share of 2**-(mantissa_bits + 1) of its magnitude: so quotients by
    sums and means of squares stay what they are within twice that share. -0 decodes to 0. Rows with NaN, infinities, or
    values of 2**127 or more are stored as they are. Subnormal values decode to 2**-126, so that nothing is divided by
    0; in rows with negative values to 0. Rows of float64 with a value that no normal float32 is near are stored as they
    are.

    With 23 bits each value of float32, float16 or bfloat16 is stored bit for bit.

    Parameters
    ----------
    mantissa_bits
        Bits of the mantissa that are kept: 1 to 7, or 23.
    relative
        As of `LatticeRows`.
    scale, shift
        Where the grid has moved to: values of float32 are coded as they are times `scale`, a float32 from 1 to below 2,
        and `shift` octaves larger, 0 to 16,383. With 23 bits they must be 1 and 0.

    Raises
    ------
    CodecConfigError
        An option is out of range.
    """

    _name: ClassVar[str] = "floating"

    mantissa_bits: int = DEFAULT_MANTISSA_BITS
    relative: bool = False
    scale: float = 1.0
    shift: int = 0

    def __post_init__(self) -> None:
        if type(self.relative) is not bool:
            raise CodecConfigError(f"relative must be true or false, got {self.relative!r}")
        if type(self.mantissa_bits) is not int or self.mantissa_bits not in MANTISSAS:
            raise CodecConfigError(
                f"mantissa_bits must be an integer from 1 to {MAX_MANTISSA}, or {MANTISSA_BITS}, got "
                f"{self.mantissa_bits!r}"
            )
        if not valid_move(self.scale, self.shift) or (self.grid.is_moved and not self.grid.is_centered):
            raise CodecConfigError(
                f"scale and shift must be a float32 from 1 to below 2, and an integer from 0 to {MAX_SHIFT}, with "
                f"{MANTISSA_BITS} bits 1.0 and 0; got {(self.scale, self.shift)!r}"
            )

    @property
    def grid(self) -> Grid:
        """The grid of its codes."""
        return Grid(0.0, self.mantissa_bits, self.scale, self.shift)

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Return the encoded bytes of a row of `dim` values, as an estimate. Its share of the row set is left out."""
        kind = self._element(element)
        return min(dim * (self.mantissa_bits + _OTHER_BITS) / 8, float(dim * kind.stored.itemsize))

    def _options(self) -> dict[str, Any]:
        return {"mantissa_bits": self.mantissa_bits}

    def _own_options(self) -> dict[str, Any]:
        moved = {"scale": self.scale, "shift": self.shift} if self.grid.is_moved else {}
        return super()._own_options() | moved

    def _element(self, name: str) -> Element:
        kind = element_named(name)
        if not has_floating_codes(kind, self.mantissa_bits):
            if name == "float64":
                raise RowsError(
                    f"{self.mantissa_bits} bits of mantissa are not all of float64; cnr_rows stores such rows bit for "
                    "bit"
                )
            raise RowsError(f"{name} rows can't be quantized; cast them to float32, or use cnr_rows")
        if self.grid.is_moved and name != "float32":
            raise RowsError(f"{name} rows have no codes on a grid that has moved; only float32 rows do")
        return kind

    def _grid_of(self, values: Rows, is_known: bool) -> Grid:
        return self.grid

    def _codes(self, values: Rows, grid: Grid, element: Element) -> tuple[Codes, Mask]:
        return floating_codes(values, grid, element.name)


def floating_codes(values: Rows, grid: Grid, element: str) -> tuple[Codes, Mask]:
    """Return the codes (m, dim) of the rows that have any, and which rows, bool (n,), have none.

    `payload.coded.grid_values` is the inverse.

    `values`: (n, dim) of the array dtype of the element type.
    """
    (count, dim), mantissa = values.shape, grid.mantissa
    if grid.is_exact:
        return _exact_codes(values, element)
    if values.dtype == np.float64:
        kinds = 63, _MANTISSA_BITS_64 - mantissa, _BIAS_64 << mantissa
        bits = np.ascontiguousarray(values).view(np.uint64)
    else:
        kinds = 31, MANTISSA_BITS - mantissa, 0
        with np.errstate(invalid="ignore"):  # signaling NaN of float16
            bits = scaled(np.ascontiguousarray(values, np.float32), grid).view(np.uint32)
    codes, raw = np.empty((count, dim), np.int16), np.empty(count, np.uint8)
    limits = floating_limits(grid, element)
    held = quantize_floating(read_only(bits), dim, *kinds, limits, codes.reshape(-1), raw)
    return codes[:held], raw.view(np.bool_)


def floating_limits(grid: Grid, element: str) -> tuple[int, int, int, int]:
    """Return what kernels go by: the least code; from and to which magnitude others have one; what is then added."""
    least, most = code_range(grid.mantissa, element)
    return least, grid.lowest, max(min(most, MAX_CODE - grid.raised), grid.lowest - 1), grid.raised


def scaled(values: Rows, grid: Grid) -> Rows:
    """Return float32 as they are coded, C-contiguous: those up to the least normal number as they are."""
    if grid.scale == 1:
        return values
    out = np.empty(values.shape, np.float32)
    scale_floats(read_only(values), np.float32(grid.scale), out.reshape(-1))
    return out


def _exact_codes(values: Rows, element: str) -> tuple[Codes, Mask]:
    raw = np.zeros(len(values), np.bool_)
    if element != "float32":  # whose NaN conversions may change
        raw[np.isnan(values).any(axis=1)] = True
        values = values[~raw]
    return exact_codes(np.ascontiguousarray(values, np.float32).view(np.int32)), raw
