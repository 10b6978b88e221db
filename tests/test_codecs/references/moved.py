"""Floating grids of float32 that have moved, in readable numpy. The kernels compute the same bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST_NORMAL = np.float32(2.0**-126)
_MOST_CODE = (1 << 15) - 1


def moved_values(codes: npt.NDArray[Any], mantissa: int, scale: float, shift: int) -> npt.NDArray[np.float32]:
    """Return the values of codes.

    A magnitude c stands for (1 + f / 2**m) * 2**(e - 127 - shift) / scale, with e and f its upper and lowest m bits,
    rounded once to float32; for the least normal number, if that is not above it.
    """
    sizes = np.abs(codes.astype(np.int64))
    exponents, fractions = sizes >> mantissa, sizes & ((1 << mantissa) - 1)
    with np.errstate(all="ignore"):
        exact = np.ldexp(1 + fractions / 2.0**mantissa, (exponents - 127 - shift).astype(np.int32)) / scale
        found = exact.astype(np.float32)
    least = 1 << mantissa
    found = np.where((sizes == least) | (found <= _LEAST_NORMAL), _LEAST_NORMAL, found)
    return np.where(codes == 0, np.float32(0), np.where(codes < 0, -found, found)).astype(np.float32)


def moved_codes(
    values: npt.NDArray[np.float32], mantissa: int, scale: float, shift: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return the codes (n, dim) of rows, and which rows, bool (n,), have none: their codes are 0.

    A value times the scale, in float32, is rounded to m bits of mantissa. Its code is that number's upper bits, plus
    the shift. A value that would be decoded to the least normal number or less has the code of that, or 0 in rows with
    negative values.
    """
    with np.errstate(all="ignore"):
        sizes = np.abs(values)
        scaled = (sizes * np.float32(scale)).astype(np.float64)
        fractions, exponents = np.frexp(scaled)
        plain = ((exponents.astype(np.int64) + 126) << mantissa) + np.rint(
            (2 * fractions - 1) * 2.0**mantissa
        )
        fits = (
            np.isfinite(scaled)
            & (plain <= (254 << mantissa) - 1)
            & (plain + (shift << mantissa) <= _MOST_CODE)
        )
    plain = np.where(fits, plain, 1 << mantissa).astype(np.int64)
    decoded = moved_values(plain + (shift << mantissa), mantissa, scale, shift)
    small = (sizes <= _LEAST_NORMAL) | (fits & (decoded <= _LEAST_NORMAL))
    least = np.where((values < 0).any(axis=1, keepdims=True), 0, 1 << mantissa)
    codes = np.where(small, least, plain + (shift << mantissa)) * np.where(np.signbit(values), -1, 1)
    codes = np.where(values == 0, 0, codes)
    raw = ~(fits | small | (values == 0)).all(axis=1)
    return np.where(raw[:, None], 0, codes).astype(np.int32), raw
