"""The codec of the lattice: a row as integers on one step, which all rows of a table share.

A row's codes depend on that row and the step alone. Its bytes depend on the rows that it is encoded with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from cnr_codecs.elements import Element
from cnr_codecs.errors import CodecConfigError, RowsError
from cnr_codecs.kernels.building.compiled import read_only
from cnr_codecs.kernels.lattice import quantize
from cnr_codecs.lattice.segments import GridRows, Mask
from cnr_codecs.lattice.steps import lattice_step, median_scale, scale_counts
from cnr_codecs.payload.coded import MAX_CODE, Codes, Grid
from cnr_codecs.payload.validate import valid_step
from cnr_codecs.protocol import Rows

DEFAULT_RMS_STEP = 0.35
MIN_RMS_STEP, MAX_RMS_STEP = 1e-3, 16.0
# With codes up to this, a value that is rounded to a type of 16 bits still has its code.
_MAX_CODE_OF_16_BITS = 127
# A normal variable has the entropy of a uniform one of so many standard deviations.
_NORMAL_WIDTH = math.sqrt(2 * math.pi * math.e)
# What rows that differ in size add to that.
_CLASSES_BITS = 0.4


@dataclass(frozen=True)
class LatticeRows(GridRows):
    """Stores each value as the nearest multiple of one step, and compresses the multiples.

    Parameters
    ----------
    rms_step
        The step as a share of the scale of the rows that are encoded together, 0.001 to 16; 0.35 if neither this nor
        `step` is given. The scale is 1.4826 times the median of the magnitudes other than 0, which is the root mean
        square of normal values. The smaller the share, the smaller the errors and the more bytes.
    step
        The step itself, which must have 8 significant bits and be from 2**-100 to 2**100; `lattice_step` rounds others.
        With both, `rms_step` only says where the step is from.
    relative
        Whether a store may write rows that changed as differences from their integers in the version before. Payloads
        by themselves are not relative: `encode_over` makes such.

    Raises
    ------
    CodecConfigError
        An option is out of range.
    """

    _name: ClassVar[str] = "lattice"

    rms_step: float | None = None
    step: float | None = None
    relative: bool = False

    def __post_init__(self) -> None:
        if type(self.relative) is not bool:
            raise CodecConfigError(f"relative must be true or false, got {self.relative!r}")
        if self.rms_step is None and self.step is None:
            object.__setattr__(self, "rms_step", DEFAULT_RMS_STEP)
        if self.rms_step is not None:
            object.__setattr__(self, "rms_step", _number("rms_step", self.rms_step))
            if not MIN_RMS_STEP <= self.rms_step <= MAX_RMS_STEP:
                raise CodecConfigError(
                    f"rms_step must be a number from {MIN_RMS_STEP} to {MAX_RMS_STEP}, got {self.rms_step!r}"
                )
        if self.step is not None:
            object.__setattr__(self, "step", _number("step", self.step))
            if not valid_step(self.step):
                raise CodecConfigError(
                    f"step must have 8 significant bits and be from 2**-100 to 2**100, got {self.step!r}; "
                    "lattice_step rounds a number to one"
                )

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Return the encoded bytes of a row of `dim` values that are distributed normally, as an estimate.

        The row's share of the row set is left out. Where only `step` is known, a value counts as a byte.
        """
        kind = self._element(element)
        entropy = math.log2(_NORMAL_WIDTH / self.rms_step) if self.rms_step else 8.0
        bits = max(entropy, 0.0) + _CLASSES_BITS
        return min(dim * bits / 8, float(dim * kind.stored.itemsize))

    def with_step(self, step: float) -> LatticeRows:
        """Return the same codec with the step of a table.

        Parameters
        ----------
        step
            As the option of that name.
        """
        return replace(self, step=step)

    def step_of(self, scale: float) -> float:
        """Return the step of rows.

        Parameters
        ----------
        scale
            That of the option `rms_step`.
        """
        if self.step is not None:
            return self.step
        assert self.rms_step is not None
        return lattice_step(self.rms_step * scale)

    def _options(self) -> dict[str, Any]:
        values = {"rms_step": self.rms_step, "step": self.step}
        return {name: value for name, value in values.items() if value is not None}

    def _grid_of(self, values: Rows, is_known: bool) -> Grid:
        if self.step is None and is_known:
            raise RowsError(
                "rows can be relative, or have codes from elsewhere, on a known step only: give one by with_step"
            )
        return Grid(self.step or self.step_of(median_scale(scale_counts(values))))

    def _codes(self, values: Rows, grid: Grid, element: Element) -> tuple[Codes, Mask]:
        return lattice_codes(values, grid.step, element)


def lattice_codes(values: Rows, step: float, element: Element) -> tuple[Codes, Mask]:
    """Return the codes (m, dim) of the rows that have any, and which rows, bool (n,), have none."""
    count, dim = values.shape
    codes, raw = np.empty((count, dim), np.int16), np.empty(count, np.uint8)
    flat, most = read_only(np.ascontiguousarray(values, np.float32)), most_code(step, element)
    held = quantize(flat, dim, 1 / step, most, codes.reshape(-1), raw)
    return codes[:held], raw.view(np.bool_)


def most_code(step: float, element: Element) -> int:
    """Return the greatest magnitude of a code: such that a code is found again in the value that it decodes to."""
    if element.name == "float32":
        return MAX_CODE
    return min(_MAX_CODE_OF_16_BITS, math.ceil(element.overflow / step) - 1)


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise CodecConfigError(f"{name} must be a number, got {value!r}")
    return float(value)
