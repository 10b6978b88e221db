"""Steps of lattices: a share of the root mean square of a table's values, rounded to 8 significant bits.

The root mean square comes from the sum of the squares of the values in rows that are finite, as float64, of each
`SUM_ROWS` rows, and these sums are added in order: so it is the same however many threads or ranks compute them. A
block's sum is that of 64 sums, which are added in order, too: value j of the block belongs to sum j mod 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import array_dtype, round_to_bfloat16
from cnr_codecs.kernels.lattice import sum_squares
from cnr_codecs.payload.validate import MAX_STEP, MIN_STEP, STEP_BITS

SUM_ROWS = 1 << 16
# A sum of squares, and how many values are in it.
Sum: TypeAlias = tuple[float, int]


def block_sums(values: npt.NDArray[Any]) -> list[Sum]:
    """Return the sum of squares and the number of values of the finite rows of each `SUM_ROWS` rows of (n, dim) values.

    A row with a value that is not finite is stored as it is, so its other values, huge ones perhaps, do not count.

    `values`: floats. The first row is the first of such a block of rows.
    """
    sums = []
    for first in range(0, len(values), SUM_ROWS):
        block = np.ascontiguousarray(values[first : first + SUM_ROWS], np.float32)
        block = block.reshape(len(block), -1)
        flat = block.reshape(-1).view()
        flat.flags.writeable = False
        total, finite = float(sum_squares(flat)), flat.size
        if not math.isfinite(total):
            rows = np.asarray(np.isfinite(block).all(axis=1))
            held = np.where(rows[:, None], block, np.float32(0)).reshape(-1)
            held.flags.writeable = False
            total, finite = float(sum_squares(held)), int(rows.sum()) * block.shape[1]
        sums.append((total, finite))
    return sums


def add_sums(sums: Iterable[Sum]) -> Sum:
    """Return the sum of sums, added in order. (Python's own sum of floats compensates.)"""
    total, finite = 0.0, 0
    for squares, count in sums:
        total += squares
        finite += count
    return total, finite


def root_mean_square(sums: Iterable[Sum]) -> float:
    """Return the root mean square of a table from its `block_sums`, in order; 0 without finite values."""
    total, finite = add_sums(sums)
    return math.sqrt(total / finite) if finite else 0.0


def lattice_step(step: float) -> float:
    """Return the step of a lattice that is nearest: of 8 significant bits, from 2**-100 to 2**100.

    Parameters
    ----------
    step
        A number that is not negative, nor NaN.
    """
    mantissa, exponent = math.frexp(min(step, MAX_STEP))
    rounded = math.ldexp(round(math.ldexp(mantissa, STEP_BITS)), exponent - STEP_BITS)
    return min(max(rounded, MIN_STEP), MAX_STEP)


def values_of(codes: npt.NDArray[np.int32], step: float, element: str) -> npt.NDArray[Any]:
    """Return the values (n, dim) of codes: step * code, which is exact in float32, rounded to the element type."""
    exact = np.float32(step) * codes.astype(np.float32)
    return round_to_bfloat16(exact) if element == "bfloat16" else exact.astype(array_dtype(element))
