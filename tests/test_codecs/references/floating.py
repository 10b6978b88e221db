"""Floating grids in readable numpy. The kernels compute the same bit for bit, which tests check."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import array_dtype
from cnr_codecs.payload.coded import code_range

_LEAST_NORMAL = 2.0**-126
"""The least magnitude of a normal float32."""


def codes_of(
    values: npt.NDArray[Any], mantissa: int, element: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return the codes (n, dim) of rows, and which rows, bool (n,), have none: their codes are 0.

    With |x| = f * 2**e, f in [1, 2), the magnitude of a code is (e + 127) * 2**m + rint((f - 1) * 2**m), and 0 for 0. A
    row has none if that is the magnitude of no normal number below 2**127, or is beyond the element type. Numbers of
    other types than float64 that are smaller than any normal float32 count as the least of them, in rows with negative
    values as 0.

    With 23 bits, a code is all bits of the float32 as an integer; of a negative one -1 less the others. Rows of float16
    and bfloat16 with NaN have none.
    """
    if mantissa == 23:
        with np.errstate(invalid="ignore"):
            bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
        codes = np.where(bits >= 1 << 31, (1 << 31) - 1 - bits, bits)
        raw = np.isnan(values).any(axis=1) & (element != "float32")
        return np.where(raw[:, None], 0, codes).astype(np.int32), raw
    with np.errstate(invalid="ignore"):
        exact = np.abs(values.astype(np.float64))
        fractions, exponents = np.frexp(exact)
        codes = (exponents.astype(np.int64) + 126 << mantissa) + np.rint((2 * fractions - 1) * 2.0**mantissa)
        if values.dtype != np.float64:
            codes = np.where(exact < _LEAST_NORMAL, np.rint(exact / _LEAST_NORMAL * 2.0**mantissa), codes)
    least, most = code_range(mantissa, element)
    if values.dtype != np.float64:
        small = np.where((values < 0).any(axis=1, keepdims=True), 0, least)
        codes = np.where((exact > 0) & (codes < least), small, codes)
        least = 0
    has_code = np.isfinite(exact) & (codes >= least) & (codes <= most)
    raw = ~((exact == 0) | has_code).all(axis=1)
    kept = np.where(raw[:, None] | (exact == 0), 0, codes * np.where(values < 0, -1, 1))
    return kept.astype(np.int32), raw


def floating_values(codes: npt.NDArray[Any], mantissa: int, element: str) -> npt.NDArray[Any]:
    """Return the values of codes, as they are stored in the array dtype of an element type."""
    wide = codes.astype(np.int64)
    if mantissa == 23:  # all bits of a float32: negative codes have those of -1 - code
        bits = np.where(wide < 0, (1 << 31) - 1 - wide, wide)
    else:
        bits = (np.abs(wide) << (23 - mantissa)) | ((wide < 0).astype(np.int64) << 31)
    with np.errstate(all="ignore"):  # codes that no writer gives float16 rows
        return bits.astype(np.uint32).view(np.float32).astype(array_dtype(element), copy=False)
