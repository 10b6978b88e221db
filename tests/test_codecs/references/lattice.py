"""Rows as integers on one step, in readable numpy. The kernels compute the same bit for bit, which tests check."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import array_dtype, round_to_bfloat16


def codes_of(
    values: npt.NDArray[Any], step: float, limit: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return the codes (n, dim) of rows, and which rows, bool (n,), have none: their codes are 0.

    A code is the value times the reciprocal of the step, both float64, rounded half even. A row has none if it is not
    finite, if one would be beyond `limit`, or if it is not zero and all of them would be.
    """
    with np.errstate(invalid="ignore"):
        exact = np.rint(values.astype(np.float32).astype(np.float64) * (1 / step))
        raw = np.logical_not((np.abs(exact) <= limit).all(axis=1))
        raw |= (exact == 0).all(axis=1) & (values != 0).any(axis=1)
    return np.where(raw[:, None], 0, exact).astype(np.int32), raw


def values_of(codes: npt.NDArray[Any], step: float, element: str) -> npt.NDArray[Any]:
    """Return the values (n, dim) of codes: step * code, which is exact in float32, rounded to the element type."""
    exact = np.float32(step) * codes.astype(np.float32)
    return round_to_bfloat16(exact) if element == "bfloat16" else exact.astype(array_dtype(element))
