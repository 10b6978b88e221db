"""Runs of rows, one after the other and all asked for, decoded block by block. `kernels.decode` takes any rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cnr_codecs.kernels.pack import unpack_rows

# Rows whose codes are unpacked before any of them is decoded: some kilobytes, which stay in the cache.
BLOCK = 32


@njit(nogil=True, cache=True, error_model="numpy")
def decode_run(packed: Any, scale: Any, offset: Any, bits: int, dim: int, flat: Any, stride: int) -> None:
    """Rows of `packed` (uint8 (n, bytes a row)) into `flat` (float32), each `stride` values after the one before."""
    codes = np.empty(BLOCK * dim if bits < 8 else 0, np.uint8)
    for first in range(0, len(packed), BLOCK):
        stop = min(first + BLOCK, len(packed))
        if bits < 8:
            unpack_rows(packed[first:stop], dim, bits, codes)
            _spread(codes, first, stop, scale, offset, dim, flat, stride)
        else:
            _spread(packed[first:stop].reshape(-1), first, stop, scale, offset, dim, flat, stride)


@njit(nogil=True, cache=True, error_model="numpy")
def _spread(
    codes: Any, first: int, stop: int, scale: Any, offset: Any, dim: int, flat: Any, stride: int
) -> None:
    """scale * code + offset: of codes of dim a row, the rows `first` to `stop`."""
    for i in range(first, stop):
        line = flat[i * stride : i * stride + dim]
        row = codes[(i - first) * dim : (i - first + 1) * dim]
        step = scale[i]
        start = offset[i]
        for j in range(dim):
            line[j] = step * np.float32(np.int32(row[j])) + start
