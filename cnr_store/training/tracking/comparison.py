"""Compares the rows of arrays with what is stored of them: those that differ are what a delta has to hold."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tensors import AnyArray, array_dtype
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.writing.row_codes import Known

_BLOCK_BYTES = 4 << 20
"""Of rows that one thread compares at once: they are copied where the array does not lie in host memory as it is."""


class Comparison:
    """Compares on the threads that training does not need meanwhile."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self.blocks = 0  # compared so far

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def changed(self, array: RowArray, known: Known) -> Bitmap:
        """The rows that differ from what is known of them, as a packed bitmap."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="cnr-compare")

        def compare(block: slice) -> Bitmap:
            changed = known.changed(_values(array, block), block.start, array.element)
            return np.packbits(changed, bitorder="little")

        parts = []
        for part in self._pool.map(compare, _blocks(array)):
            parts.append(part)
            self.blocks += 1
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _blocks(array: RowArray) -> Iterator[slice]:
    """Rows of about `_BLOCK_BYTES`, each a multiple of 8, so that bitmaps of blocks follow one another."""
    row_bytes = max(1, array.local_columns * array_dtype(array.dtype).itemsize)
    rows, size = array.local_rows, 8 * max(1, _BLOCK_BYTES // row_bytes // 8)
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def _values(array: RowArray, block: slice) -> AnyArray:
    return array.rows(block) if array.memory is None else array.memory[block]
