"""Steps of lattices: a share of the scale of a table, rounded to 8 significant bits.

The scale is the median of the magnitudes of the values, without zeros and what is not finite, times what makes it the
root mean square of normal values: so a few huge rows do not move it far. It comes from counts of values, which are the
same however many threads or ranks count them, and whichever rows and columns each of them has.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cnr_codecs.kernels.building.compiled import read_only
from cnr_codecs.kernels.lattice import count_magnitudes
from cnr_codecs.payload.validate import MAX_STEP, MIN_STEP, STEP_BITS

# Rows that are counted together.
COUNTED_ROWS = 1 << 16
# A magnitude is counted by its exponent and the upper 4 bits of its mantissa.
_DROPPED_BITS, _BINS = 19, 1 << 12
# The standard deviation of a normal variable over the median of its magnitude.
OF_NORMAL = 1.4826
Counts: TypeAlias = npt.NDArray[np.int64]
"""(4096,): values by the bits of their magnitude."""


def no_counts() -> Counts:
    """Return the counts of no rows. Those of several tables' parts are added."""
    return np.zeros(_BINS, np.int64)


def scale_counts(values: npt.NDArray[Any]) -> Counts:
    """Return the counts of rows (n, dim) of floats."""
    counts = no_counts()
    for first in range(0, len(values), COUNTED_ROWS):
        block = np.ascontiguousarray(values[first : first + COUNTED_ROWS], np.float32)
        count_magnitudes(read_only(block), _DROPPED_BITS, counts)
    return counts


def median_scale(counts: Counts) -> float:
    """Return the scale of the values that were counted, to a thirty-second of it; 0 without any."""
    total = np.cumsum(counts)
    if not total[-1]:
        return 0.0
    found = int(np.searchsorted(total, (int(total[-1]) + 1) // 2))
    middle = np.array([(found << _DROPPED_BITS) + (1 << (_DROPPED_BITS - 1))], np.uint32)
    return float(middle.view(np.float32)[0]) * OF_NORMAL


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
