"""Validates the parameters of quantized rows in one pass. `payload.validate` says what is wrong where it fails."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, error_model="numpy")
def sound_halves(bits: Any) -> bool:
    """Whether all of `bits` (uint16 (1 or 2, n): float16s) are finite, and the first row, of scales, not negative."""
    worst = np.uint16(0)
    for k in range(bits.shape[1]):
        # Negative and not finite ones are what lies above, as integers.
        worst = max(worst, bits[0, k])
    for k in range(bits.shape[1] if len(bits) > 1 else 0):
        worst = max(worst, bits[1, k] & np.uint16(0x7FFF))
    return bool(worst < np.uint16(0x7C00))


@njit(nogil=True, cache=True, error_model="numpy")
def sound_floats(bits: Any, most: float) -> bool:
    """The same of float32s (uint32); scales besides of at most 16 significant bits, and not above `most`."""
    worst, used = np.uint32(0), np.uint32(0)
    for k in range(bits.shape[1]):
        worst = max(worst, bits[0, k])
        used |= bits[0, k]
    largest = np.uint32(worst).view(np.float32)
    for k in range(bits.shape[1] if len(bits) > 1 else 0):
        worst = max(worst, bits[1, k] & np.uint32(0x7FFFFFFF))
    return bool((worst < np.uint32(0x7F800000)) & ((used & np.uint32(0xFF)) == 0) & (largest <= most))
