"""Reads arrays of rows into tensors, several at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from cnr_backends import Transfer
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.chains.salvage import SalvageReader
from cnr_store.training.loading.selection import Ids
from cnr_store.training.model.tensors import (
    AnyArray,
    assign_ids,
    assign_rows,
    dtype_name,
    note_change,
    numpy_view,
)
from cnr_store.training.tracking.bitmap import Bitmap

Reader = ArrayReader | SalvageReader


class Fill(ABC):
    """A tensor, (rows,) or (rows, k), to fill with rows that `reader` reads in pieces."""

    def __init__(self, reader: Reader, tensor: torch.Tensor) -> None:
        self.reader = reader
        self.tensor = tensor

    @abstractmethod
    def fill(self, first: int, rows: int) -> None:
        """Fill `rows` rows from row `first` on."""


class AllRows(Fill):
    """Takes every row of an array; tensor and array have the same rows and element type."""

    def __init__(self, reader: Reader, tensor: torch.Tensor) -> None:
        super().__init__(reader, tensor)
        self._changed = np.zeros(reader.shape[0], bool)
        direct = (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and dtype_name(tensor.dtype) == reader.dtype.name
        )
        self._target: AnyArray | None = numpy_view(tensor).reshape(reader.shape[0], -1) if direct else None

    def fill(self, first: int, rows: int) -> None:
        out = (
            np.empty((rows, self.reader.columns), self.reader.dtype)
            if self._target is None
            else self._target[first : first + rows]
        )
        self._changed[first : first + rows] = self.reader.read(first, out)
        if self._target is None:
            assign_rows(self.tensor, first, out.reshape(rows, *self.tensor.shape[1:]))

    def changed(self) -> Bitmap:
        """Packed: the rows, of those read, that some delta holds."""
        return np.packbits(self._changed, bitorder="little")


class ChosenRows(Fill):
    """Takes the rows `ids` of an array, or all (None); the tensor's other rows stay.

    The tensor may have other rows than the array, and another element type.
    """

    def __init__(self, reader: Reader, tensor: torch.Tensor, ids: Ids | None) -> None:
        super().__init__(reader, tensor)
        self._wanted = np.full(reader.shape[0], ids is None, np.uint8)
        if ids is not None:
            self._wanted[ids] = 1

    def fill(self, first: int, rows: int) -> None:
        wanted = self._wanted[first : first + rows]
        offsets = np.flatnonzero(wanted)
        if not offsets.size:
            return
        out = np.empty((rows, self.reader.columns), self.reader.dtype)
        self.reader.read_rows(first, out, wanted.copy())
        values = out[offsets].reshape(offsets.size, *self.tensor.shape[1:])
        if self.tensor.dtype is torch.bfloat16:
            values = values.astype(np.float32)  # the array type of bfloat16
        assign_ids(self.tensor, first + offsets, values)


def fill_all(fills: Sequence[Fill], transfer: Transfer) -> None:
    """Fill every tensor. Small tables are read beside each other, large ones in pieces.

    Raises
    ------
    CorruptionError
        The tensors are then partly overwritten.
    """
    pieces = ((fill, region) for fill in fills for region in fill.reader.regions())
    try:
        for _ in transfer.map(lambda piece: piece[0].fill(*piece[1]), pieces):
            pass
    finally:
        # A read that fails half way has changed rows, too.
        for fill in fills:
            note_change(fill.tensor)
