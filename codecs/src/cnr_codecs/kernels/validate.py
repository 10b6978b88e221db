"""Validates the parameters of quantized rows in one pass. `payload.validate` says what is wrong where it fails."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import kernel
from cnr_codecs.kernels.building.instructions import float_of


@kernel
def valid_halves(bits: Any) -> Any:
    """Whether float16s, `bits` (uint16 (1 or 2, n)), are all finite, and none of the first row, of scales, negative."""
    worst = np.uint16(0)
    for k in range(bits.shape[1]):
        # As integers, negative and non-finite numbers are the greatest.
        worst = bits[0, k] if bits[0, k] > worst else worst
    for k in range(bits.shape[1] if len(bits) > 1 else 0):
        size = bits[1, k] & np.uint16(0x7FFF)
        worst = size if size > worst else worst
    return worst < np.uint16(0x7C00)


@kernel
def valid_floats(bits: Any, largest: float) -> Any:
    """Whether the same holds for float32s (uint32).

    Besides, scales must have at most 16 significant bits and be at most `largest`.
    """
    worst, used = np.uint32(0), np.uint32(0)
    for k in range(bits.shape[1]):
        worst = bits[0, k] if bits[0, k] > worst else worst
        used |= bits[0, k]
    top = float_of(np.uint32(worst))
    for k in range(bits.shape[1] if len(bits) > 1 else 0):
        size = bits[1, k] & np.uint32(0x7FFFFFFF)
        worst = size if size > worst else worst
    return (worst < np.uint32(0x7F800000)) & ((used & np.uint32(0xFF)) == 0) & (top <= largest)
