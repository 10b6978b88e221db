"""Reads arrays of rows into tensors, all of them beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cnr_backends import Transfer
from cnr_store.chain import ArrayReader
from cnr_store.training.bitmap import Bitmap
from cnr_store.training.tensors import assign_rows, dtype_name, note_change, numpy_view

Array = np.ndarray[Any, Any]


class RowsRead:
    """A tensor, (rows,) or (rows, k), to fill with the rows that a reader reads."""

    def __init__(self, reader: ArrayReader, tensor: torch.Tensor) -> None:
        self._reader = reader
        self._tensor = tensor
        self._changed = np.zeros(reader.shape[0], bool)
        direct = (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and dtype_name(tensor.dtype) == reader.dtype.name
        )
        self._target: Array | None = numpy_view(tensor).reshape(reader.shape[0], -1) if direct else None

    def _read(self, first: int, rows: int) -> None:
        """Fill `rows` rows from row `first` on."""
        out = (
            np.empty((rows, self._reader.columns), self._reader.dtype)
            if self._target is None
            else self._target[first : first + rows]
        )
        self._changed[first : first + rows] = self._reader.read(first, out)
        if self._target is None:
            assign_rows(self._tensor, first, out.reshape(rows, *self._tensor.shape[1:]))

    def changed(self) -> Bitmap:
        """Packed: the rows, of those read, that some delta holds."""
        return np.packbits(self._changed, bitorder="little")

    @staticmethod
    def run(reads: Sequence[RowsRead], transfer: Transfer) -> None:
        """Fill every tensor. Small tables are read beside each other, large ones in pieces.

        Raises
        ------
        CorruptionError
            The tensors are then partly overwritten.
        """
        pieces = ((read, region) for read in reads for region in read._reader.regions())
        try:
            for _ in transfer.map(lambda piece: piece[0]._read(*piece[1]), pieces):
                pass
        finally:
            # A read that fails half way has changed rows, too.
            for read in reads:
                note_change(read._tensor)
