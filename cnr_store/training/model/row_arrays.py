"""The model's arrays that are stored by rows: tables, and what optimizers keep for their rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch.optim import Optimizer

from cnr_codecs.lattice.steps import median_scale, scale_counts
from cnr_store.errors import UnsupportedModelError
from cnr_store.format.grid import MAX_CHUNK_DECODED_BYTES
from cnr_store.format.layout import decode_name, slot_path
from cnr_store.training.devices.support import failing_saves
from cnr_store.training.distributed.pieces import (
    LocalPiece,
    by_column,
    check_follows,
    held_pieces,
    is_dtensor,
)
from cnr_store.training.model.optimizer_state import row_slots
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import (
    AnyArray,
    array_dtype,
    copy_rows,
    dtype_name,
    dtype_named,
    rows_view,
)

MOST_ROWS_KEPT = 1 << 15
"""Of a table whose arrays are kept from one save to the next."""

_SAMPLED_ROWS = 4096


@dataclass(frozen=True)
class RowArray:
    """An array whose rows are a table's: its weight, or state of an optimizer that follows its rows."""

    table: Table  # the table
    path: str  # the array's path in a version: ``tables/NAME/SLOT``
    shape: tuple[int, ...]  # ``(rows,)``, ``(rows, k)`` or the table's: that of the array on all ranks
    element: str  # torch's name of its element type
    parts: tuple[LocalPiece, ...]  # the memory of the rows that this process holds; not a copy
    is_weight: bool = False  # whether it is the table itself
    # Of state with a column for each column shard of the table: where in the table these begin. Else empty.
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
        """(rows, columns), read-only: a view of what this process holds, if that lies in one piece."""
        view = rows_view(self.parts[0].tensor) if len(self.parts) == 1 else None
        if view is not None:
            view.flags.writeable = False  # a caller's codec may change what it is given
        return view

    @cached_property
    def local_columns(self) -> int:
        """Columns that this process holds of its rows."""
        return sum(part.columns for part in self.parts)

    @property
    def local_rows(self) -> int:
        """Rows that this process holds, or those of them that it was narrowed to."""
        return len(self.parts[0].tensor) if self.parts else 0

    def narrowed(self, rows: slice) -> RowArray:
        """The array with some of the rows that this process holds, in place of all."""
        if rows == slice(0, self.local_rows):
            return self
        parts = tuple(
            LocalPiece(part.first_row + rows.start, part.first_column, part.tensor.detach()[rows])
            for part in self.parts
        )
        return replace(self, parts=parts)

    def copy_rows(self, ids: AnyArray | slice, out: AnyArray) -> None:
        """Copy rows that this process holds, part beside part: by their numbers from the first one held."""
        copy_parts(self.path, self.parts, ids, out)

    def rows(self, ids: AnyArray | slice) -> AnyArray:
        """What `copy_rows` copies, in memory of its own. A slice has a beginning and an end."""
        count = ids.stop - ids.start if isinstance(ids, slice) else len(ids)
        out = np.empty((count, self.local_columns), array_dtype(self.dtype))
        self.copy_rows(ids, out)
        return out


def copy_parts(path: str, parts: Sequence[LocalPiece], ids: AnyArray | slice, out: AnyArray) -> None:
    """Copy rows of an array, part beside part: by their numbers from the first one held."""
    column = 0
    for part in parts:
        target = out[:, column : column + part.columns]
        if part.tensor.ndim == 1:
            target = target[:, 0]
        with failing_saves(part.tensor.device, path):
            copy_rows(part.tensor, ids, target)
        column += part.columns


def sampled_scale(array: RowArray, step: float) -> float:
    """The scale of a table, of which steps are shares, by some of the rows that this process holds; 0 of zeros.

    `step`: to which the values were rounded. They are spread over it: else their median would be one of few multiples.
    """
    rows = array.table.local_rows
    values = array.rows(np.linspace(0, rows - 1, min(rows, _SAMPLED_ROWS)).astype(np.int64))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is not counted
        values = values[values.any(axis=1)].astype(np.float32)
        spread = np.random.default_rng(0).uniform(-step / 2, step / 2, values.shape)
        return median_scale(scale_counts(values + spread))


@dataclass
class SlotNames:
    """What the store calls state by rows: as the optimizer does, or KEY@POSITION where another one's is called so.

    A name stays its optimizer's: rows that a delta leaves out are read from older versions, under the same name.
    """

    optimizers: Sequence[Optimizer] = ()  # all that are saved
    # Those whose ``state_dict`` is stored as it is, and nothing of it by rows
    kept_whole: Collection[Optimizer] = ()
    # By table and key, the optimizer whose state has the key as its name
    owners: dict[tuple[str, str], Optimizer] = field(default_factory=dict)

    def name(self, table: str, optimizer: Optimizer, key: str) -> str:
        """The name of an optimizer's state for a table; `UnsupportedModelError` if none can be told from the key."""
        if key in ("", "weight") or "@" in key:
            raise UnsupportedModelError(
                f"table {table!r}: {type(optimizer).__name__} keeps state called {key!r} for it, which the store needs "
                "for other arrays; give that state another name, without @"
            )
        is_own = self.owners.setdefault((table, key), optimizer) is optimizer
        return key if is_own else f"{key}@{self.optimizers.index(optimizer)}"

    def follow(self, optimizer: Optimizer, slots: Mapping[str, Sequence[str]]) -> None:
        """Take the names, by table, that a loaded version has for an optimizer's state: deltas go on under them."""
        self.owners.update({(table, slot): optimizer for table, each in slots.items() for slot in each})

    def slots(self, table: Table) -> Iterator[tuple[str, torch.Tensor]]:
        """All state that follows the rows of a table, with its names."""
        for optimizer in self.optimizers:
            found = {} if optimizer in self.kept_whole else row_slots(optimizer, table.parameter)
            yield from ((self.name(table.name, optimizer, key), slot) for key, slot in found.items())


def key_of(slot: str) -> str:
    """The optimizer's key for state of that name in the store."""
    return slot.partition("@")[0]


_Place = tuple[str, int, int, tuple[int, ...], torch.dtype, bool]
"""Name, identity, address, shape, element type of a tensor, and whether it is contiguous."""


class RowArrays:
    """The arrays of a model that are stored by rows, from one save to the next.

    Those of small tables are made anew only where their tensors are others, or lie elsewhere. Of large ones nothing is
    kept, or memory that an optimizer has let go would stay until the next save.
    """

    def __init__(self, names: SlotNames) -> None:
        self._names = names
        self._known: dict[str, tuple[list[_Place], list[RowArray]]] = {}

    def now(self, tables: Sequence[Table], fused: bool = False) -> list[RowArray]:
        """Every array that is stored by rows, those of a table next to each other.

        `fused`: whether state that TorchRec's modules keep is among them.
        """
        return [array for table in tables for array in self._of_table(table, fused)]

    def _of_table(self, table: Table, fused: bool) -> list[RowArray]:
        slots = list(self._names.slots(table))
        if not table.is_plain or table.rows > MOST_ROWS_KEPT:
            return _table_arrays(table, slots, fused)
        places = [_place("", table.parameter), *(_place(name, slot) for name, slot in slots)]
        known = self._known.get(table.name)
        if known is None or known[0] != places:
            known = self._known[table.name] = places, _table_arrays(table, slots, fused)
        return known[1]


def _place(key: str, tensor: torch.Tensor) -> _Place:
    is_plain = tensor.is_contiguous() and not tensor.is_neg()  # torch may negate values as they are read
    return key, id(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype, is_plain


def _table_arrays(table: Table, slots: Sequence[tuple[str, torch.Tensor]], fused: bool) -> list[RowArray]:
    shape, path = (table.rows, table.dim), table.path
    weight = RowArray(table, path, shape, table.element, table.parts, is_weight=True)
    arrays = {weight.path: weight}
    if table.sharded is not None and fused:
        for slot, kept in table.sharded.slots.items():
            path = slot_path(table.name, slot)
            parts = by_column(table.name, kept.pieces)
            # Where this process holds nothing of it, others tell the type.
            dtype = kept.pieces[0].tensor.dtype if kept.pieces else torch.float32
            arrays[path] = RowArray(table, path, kept.shape, dtype_name(dtype), parts, False, kept.boundaries)
    for slot, tensor in slots:
        if (path := slot_path(table.name, slot)) in arrays:
            raise UnsupportedModelError(
                f"table {table.name!r}: an optimizer keeps state called {slot!r} for it, as its rows or other state is "
                "called in the store; give that state another name"
            )
        parts = slot_parts(table, slot, tensor)
        arrays[path] = RowArray(table, path, tuple(tensor.shape), dtype_name(tensor.dtype), parts)
    return list(arrays.values())


def slot_parts(table: Table, slot: str, tensor: torch.Tensor) -> tuple[LocalPiece, ...]:
    """The memory that this process holds of what an optimizer keeps for a table's rows."""
    if not (is_dtensor(table.parameter) or is_dtensor(tensor)):
        return (LocalPiece(0, 0, tensor),)
    name = f"table {table.name!r}: the optimizer's {slot!r}"
    check_follows(tensor, table.parameter, name)
    return by_column(table.name, held_pieces(tensor, name))


def checked(arrays: Sequence[RowArray]) -> Sequence[RowArray]:
    """The arrays, if each of their rows fits into a chunk."""
    for array in arrays:
        if array.row_bytes > MAX_CHUNK_DECODED_BYTES:
            raise UnsupportedModelError(
                f"{array.path}: a row takes {array.row_bytes} bytes, and at most {MAX_CHUNK_DECODED_BYTES} can be "
                "stored by rows; split the table's columns"
            )
    return arrays
