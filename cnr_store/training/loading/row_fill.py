"""Reads arrays of rows into the tensors that hold them, several at a time."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cnr_backends import BackendError, Transfer
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.chains.link import Strays
from cnr_store.chains.salvage import SalvageReader
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.record import Record
from cnr_store.training.devices.staging import DeviceRows, rows_there
from cnr_store.training.distributed.pieces import LocalPiece
from cnr_store.training.loading.selection import Ids
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import (
    AnyArray,
    assign_ids,
    assign_rows,
    copy_rows,
    note_change,
    overwriting,
    rows_view,
)
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.writing.row_codes import Known

log = logging.getLogger("cnr_store")


@dataclass(frozen=True)
class Target:
    """The memory to fill: `rows` rows of an array from `first_row` on, in one or several parts of its columns."""

    first_row: int
    rows: int
    parts: tuple[LocalPiece, ...]


class Fill(ABC):
    """Memory to fill with rows that `reader` reads in pieces."""

    def __init__(self, reader: ArrayReader, target: Target) -> None:
        self.reader = reader
        self.target = target

    def regions(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of the pieces to read: those of the array, as far as the target has their rows."""
        end = self.target.first_row + self.target.rows
        if not self.target.parts:
            return
        for first, rows in self.reader.regions():
            begin, stop = max(first, self.target.first_row), min(first + rows, end)
            if begin < stop:
                yield begin, stop - begin

    @abstractmethod
    def fill(self, first: int, rows: int) -> None:
        """Fill `rows` rows from row `first` of the array on; the target has them."""


class AllRows(Fill):
    """Takes every row that the target has; array and target have the same rows and element type."""

    def __init__(self, reader: ArrayReader, target: Target) -> None:
        super().__init__(reader, target)
        self._changed = np.zeros(target.rows, bool)
        self._memory = _plain_memory(reader, target)
        self.learned: Known | None = None  # what is noted of the rows as they are read

    def fill(self, first: int, rows: int) -> None:
        start = first - self.target.first_row
        out = (
            np.empty((rows, self.reader.columns), self.reader.dtype)
            if self._memory is None
            else self._memory[start : start + rows]
        )
        learned = self.learned
        strays = None
        if learned is not None and learned.grid is not None:
            strays = Strays(learned.grid, np.zeros(rows, np.uint8))
        changed = self._changed[start : start + rows] = self.reader.read(first, out, strays=strays)
        if learned is not None:
            learned.read(out, start, self.reader.element, changed, None if strays is None else strays.rows)
        if self._memory is None:
            for part in self.target.parts:
                assign_rows(part.tensor, start, _columns(part, out))

    def changed(self) -> Bitmap:
        """Packed: the rows, of those read, that some delta holds."""
        return np.packbits(self._changed, bitorder="little")


class RowsThere(AllRows):
    """The same, decoded on the target's device.

    `there`: the target's rows, which are in one part. Where the device can't decode them, the host does.
    """

    def __init__(self, reader: ArrayReader, target: Target, there: DeviceRows) -> None:
        super().__init__(reader, target)
        self._there: DeviceRows | None = there

    def fill(self, first: int, rows: int) -> None:
        if not self._fill_there(first, rows):
            self._there = None
            super().fill(first, rows)

    def _fill_there(self, first: int, rows: int) -> bool:
        there, start = self._there, first - self.target.first_row
        if there is None:
            return False
        try:
            segments, changed = self.reader.take(first, np.ones(rows, np.uint8))
        except FormatError:  # chunks split columns; of anything else the host's way tells
            return False
        tensor = self.target.parts[0].tensor
        try:
            with overwriting(tensor):
                if not there.write(segments, start):
                    return False
        except RuntimeError as error:
            # Whatever it was, memory that was short among others: if the device is lost, the host's way says so.
            if self._there is not None:  # no other thread has said so
                log.warning(
                    "%s: its rows could not be decoded on %s (%s: %s), so the host does",
                    *(self.reader.path, tensor.device, type(error).__name__, error),
                )
            return False
        self._changed[start : start + rows] = changed
        self.learned = None  # the rows are not here
        return True


def all_rows(reader: ArrayReader, target: Target) -> AllRows:
    """What fills a target that has the rows and the element type of the array, as they are decoded fastest."""
    if isinstance(reader, SalvageReader) or len(target.parts) != 1:
        return AllRows(reader, target)
    (part,) = target.parts
    codecs = [link.entry.codec for link in reader.links]
    there = rows_there(part.tensor, codecs) if part.columns == reader.columns else None
    return AllRows(reader, target) if there is None else RowsThere(reader, target, DeviceRows(there))


class ChosenRows(Fill):
    """Takes the rows `ids` of an array, or all (None), as far as the target has them; its other rows stay.

    The target may have other rows than the array, and another element type.
    """

    def __init__(self, reader: ArrayReader, target: Target, ids: Ids | None) -> None:
        super().__init__(reader, target)
        self._wanted = np.full(target.rows, ids is None, np.uint8)
        if ids is not None:
            held = ids - target.first_row
            self._wanted[held[(held >= 0) & (held < target.rows)]] = 1

    def fill(self, first: int, rows: int) -> None:
        start = first - self.target.first_row
        wanted = self._wanted[start : start + rows]
        offsets = np.flatnonzero(wanted)
        if not offsets.size:
            return
        out = np.empty((rows, self.reader.columns), self.reader.dtype)
        self.reader.read(first, out, wanted)
        chosen = out[offsets]
        for part in self.target.parts:
            values = _columns(part, chosen)
            if part.tensor.dtype is torch.bfloat16:
                values = values.astype(np.float32)  # the array type of bfloat16
            assign_ids(part.tensor, start + offsets, values)


def _plain_memory(reader: ArrayReader, target: Target) -> AnyArray | None:
    """The target's memory, (rows, columns), if it can be read into as it is."""
    if len(target.parts) != 1:
        return None
    memory = rows_view(target.parts[0].tensor)
    if memory is None or (memory.dtype, target.parts[0].columns) != (reader.dtype, reader.columns):
        return None
    return memory


def _columns(part: LocalPiece, values: AnyArray) -> AnyArray:
    """What a part takes of rows of the whole array, (n, columns), in its own shape."""
    taken = values[:, part.first_column : part.first_column + part.columns]
    return taken.reshape(len(values), *part.tensor.shape[1:])


def fill_all(fills: Sequence[Fill], transfer: Transfer) -> None:
    """Fill every target. Small tables are read beside each other, large ones in pieces."""
    pieces = ((fill, region) for fill in fills for region in fill.regions())
    try:
        for _ in transfer.map(lambda piece: piece[0].fill(*piece[1]), pieces):
            pass
    finally:
        # A read that fails half way has changed rows, too.
        for fill in fills:
            for part in fill.target.parts:
                note_change(part.tensor)


def differing_rows(catalog: Catalog, record: Record, table: Table) -> torch.Tensor | None:
    """The rows of a table that are not as stored: ``(n,)`` int64 from the first held. None if they can't be read."""
    differs = np.zeros(table.local_rows, bool)
    try:
        reader = ArrayReader(catalog, record, table.path)
        for first, rows in AllRows(reader, Target(table.first_row, table.local_rows, table.parts)).regions():
            stored = np.empty((rows, reader.columns), reader.dtype)
            reader.read(first, stored)
            place = slice(first - table.first_row, first - table.first_row + rows)
            for part in table.parts:
                own = np.empty((rows, *part.tensor.shape[1:]), stored.dtype)
                copy_rows(part.tensor, place, own)
                expected = np.ascontiguousarray(_columns(part, stored))
                differs[place] |= (own.view(np.uint8) != expected.view(np.uint8)).any(axis=1)
    except (BackendError, CorruptionError):  # as upkeep may have removed what was read
        return None
    return torch.from_numpy(np.flatnonzero(differs))
