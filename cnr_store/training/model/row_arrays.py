"""The model's arrays that are stored by rows: tables, and what optimizers keep for their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.optim import Optimizer

from cnr_store.errors import UnsupportedModelError
from cnr_store.format.grid import MAX_CHUNK_DECODED_BYTES
from cnr_store.format.layout import decode_name, slot_path
from cnr_store.training.devices.support import failing_saves
from cnr_store.training.distributed.dtensors import check_follows, held_pieces, is_dtensor
from cnr_store.training.distributed.pieces import ColumnPart, column_parts
from cnr_store.training.model.optimizer_state import row_slots
from cnr_store.training.model.tables import SpreadTable, Table
from cnr_store.training.model.tensors import (
    AnyArray,
    array_dtype,
    copy_slice,
    dtype_name,
    dtype_named,
    gather,
    rows_view,
)

MOST_ROWS_KEPT = 1 << 15
"""Of a table whose arrays are kept from one save to the next."""


@dataclass(frozen=True)
class RowArray:
    """An array whose rows are a table's: its weight, or state of an optimizer that follows its rows.

    Attributes
    ----------
    table
        The table.
    path
        The array's path in a version: ``tables/NAME/SLOT``.
    shape
        ``(rows,)``, ``(rows, k)`` or the table's: that of the array on all ranks.
    element
        torch's name of its element type.
    parts
        The memory of the rows that this process holds; not a copy.
    is_weight
        Whether it is the table itself.
    boundaries
        Of state with a column for each column shard of the table: where in the table these begin. Else empty.
    """

    table: Table
    path: str
    shape: tuple[int, ...]
    element: str
    parts: tuple[ColumnPart, ...]
    is_weight: bool = False
    boundaries: tuple[int, ...] = ()

    @cached_property
    def slot(self) -> str:
        """The array's name in the table's group: ``weight``, or the optimizer's key."""
        return decode_name(self.path.rsplit("/", 1)[1])

    @cached_property
    def dtype(self) -> torch.dtype:
        """Its element type."""
        return dtype_named(self.element)

    @cached_property
    def row_bytes(self) -> int:
        """The size of a row in the array type."""
        return math.prod(self.shape[1:]) * array_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """The size of the array as it is in memory, on all ranks."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def memory(self) -> AnyArray | None:
        """(rows, columns), read-only: a view of what this process holds, if it is in one piece in the array type."""
        view = rows_view(self.parts[0].tensor) if len(self.parts) == 1 else None
        if view is not None:
            view.flags.writeable = False  # a caller's codec may change what it is given
        return view

    @cached_property
    def local_columns(self) -> int:
        """Columns that this process holds of its rows."""
        return sum(part.columns for part in self.parts)

    def copy_rows(self, ids: AnyArray | slice, out: AnyArray) -> None:
        """Copy rows that this process holds, by their numbers from the first one held, part beside part.

        Raises
        ------
        SaveError
            A device that holds them failed.
        """
        column = 0
        for part in self.parts:
            target = out[:, column : column + part.columns]
            if part.tensor.ndim == 1:
                target = target[:, 0]
            with failing_saves(part.tensor.device, self.path):
                if isinstance(ids, slice):
                    copy_slice(part.tensor, ids, target)
                elif target.flags.c_contiguous:
                    gather(part.tensor, ids, target)
                else:
                    target[...] = gather(part.tensor, ids)
            column += part.columns


_Place = tuple[str, int, int, tuple[int, ...], torch.dtype, bool]
"""Key, identity, address, shape, element type of a tensor, and whether it is contiguous."""


class RowArrays:
    """The arrays of a model that are stored by rows, from one save to the next.

    Those of small tables are made anew only where their tensors are others, or lie elsewhere. Of large ones nothing is
    kept, or memory that an optimizer has let go would stay until the next save.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[_Place], list[RowArray]]] = {}

    def now(
        self, tables: Sequence[Table], optimizers: Sequence[Optimizer], fused: bool = False
    ) -> list[RowArray]:
        """`row_arrays`."""
        return [array for table in tables for array in self._of_table(table, optimizers, fused)]

    def _of_table(self, table: Table, optimizers: Sequence[Optimizer], fused: bool) -> list[RowArray]:
        if type(table) is not Table or table.rows > MOST_ROWS_KEPT:
            return _table_arrays(table, optimizers, fused)
        places = [_place("", table.parameter)]
        for optimizer in optimizers:
            places += [_place(key, slot) for key, slot in row_slots(optimizer, table.parameter).items()]
        known = self._known.get(table.name)
        if known is None or known[0] != places:
            known = self._known[table.name] = places, _table_arrays(table, optimizers, fused)
        return known[1]


def _place(key: str, tensor: torch.Tensor) -> _Place:
    if is_dtensor(tensor):  # which has no address
        return key, id(tensor), 0, tuple(tensor.shape), tensor.dtype, False
    is_plain = tensor.is_contiguous() and not tensor.is_neg()  # torch may negate values as they are read
    return key, id(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype, is_plain


def row_arrays(
    tables: Sequence[Table], optimizers: Sequence[Optimizer], fused: bool = False
) -> list[RowArray]:
    """Every array that is stored by rows, those of a table next to each other.

    Parameters
    ----------
    fused
        Whether state that TorchRec's modules keep is among them.

    Raises
    ------
    UnsupportedModelError
        Two optimizers keep state of one name for one table, or state has the name of the table's own rows.
    """
    return [array for table in tables for array in _table_arrays(table, optimizers, fused)]


def _table_arrays(table: Table, optimizers: Sequence[Optimizer], fused: bool) -> list[RowArray]:
    shape, path = (table.rows, table.dim), table.path
    weight = RowArray(table, path, shape, table.element, table.parts, is_weight=True)
    arrays = {weight.path: weight}
    if isinstance(table, SpreadTable) and fused:
        for slot, kept in table.sharded.slots.items():
            path = slot_path(table.name, slot)
            parts = column_parts(table.name, kept.pieces)
            # Where this process holds nothing of it, others tell the type.
            dtype = kept.pieces[0].tensor.dtype if kept.pieces else torch.float32
            arrays[path] = RowArray(table, path, kept.shape, dtype_name(dtype), parts, False, kept.boundaries)
    for optimizer in optimizers:
        for slot, tensor in row_slots(optimizer, table.parameter).items():
            if not slot:
                raise UnsupportedModelError(
                    f"table {table.name!r}: {type(optimizer).__name__} keeps state called '' for it, which can't "
                    "be stored; give that state a name"
                )
            path = slot_path(table.name, slot)
            if path == weight.path:
                raise UnsupportedModelError(
                    f"table {table.name!r}: {type(optimizer).__name__} keeps state called {slot!r} for it, as its "
                    "rows are called in the store; give that state another name"
                )
            if path in arrays:
                raise UnsupportedModelError(
                    f"table {table.name!r}: two optimizers keep {slot!r} for it; let one of them own the table"
                )
            parts = slot_parts(table, slot, tensor)
            arrays[path] = RowArray(table, path, tuple(tensor.shape), dtype_name(tensor.dtype), parts)
    return list(arrays.values())


def slot_parts(table: Table, slot: str, tensor: torch.Tensor) -> tuple[ColumnPart, ...]:
    """The memory that this process holds of what an optimizer keeps for a table's rows.

    Raises
    ------
    UnsupportedModelError
        The table is a DTensor, and the state is not spread like it; or the other way round.
    """
    if not (is_dtensor(table.parameter) or is_dtensor(tensor)):
        return (ColumnPart(0, tensor),)
    name = f"table {table.name!r}: the optimizer's {slot!r}"
    check_follows(tensor, table.parameter, name)
    return column_parts(table.name, held_pieces(tensor, name))


def checked(arrays: Sequence[RowArray]) -> Sequence[RowArray]:
    """The arrays, if each of their rows fits into a chunk.

    Raises
    ------
    UnsupportedModelError
        A row is too wide to be a chunk.
    """
    for array in arrays:
        if array.row_bytes > MAX_CHUNK_DECODED_BYTES:
            raise UnsupportedModelError(
                f"{array.path}: a row takes {array.row_bytes} bytes, and at most {MAX_CHUNK_DECODED_BYTES} can be "
                "stored by rows; split the table's columns"
            )
    return arrays
