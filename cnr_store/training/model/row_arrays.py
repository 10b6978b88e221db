"""The model's tensors that are stored by rows: tables, and what optimizers keep for their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from cnr_store.errors import UnsupportedModelError
from cnr_store.format.layout import decode_name, slot_path
from cnr_store.training.model.optimizer_state import row_slots
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import array_dtype, dtype_name


@dataclass(frozen=True)
class RowArray:
    """A tensor of the model or an optimizer whose rows are a table's: its weight, or state that follows its rows.

    Attributes
    ----------
    table
        The table.
    path
        The array's path in a version: ``tables/NAME/SLOT``.
    tensor
        ``(rows,)``, ``(rows, k)`` or of the table's shape; not a copy.
    element
        torch's name of its element type.
    """

    table: Table
    path: str
    tensor: torch.Tensor
    element: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def slot(self) -> str:
        """The array's name in the table's group: ``weight``, or the optimizer's key."""
        return decode_name(self.path.rsplit("/", 1)[1])

    @property
    def row_bytes(self) -> int:
        """The size of a row in the array type."""
        return math.prod(self.shape[1:]) * array_dtype(self.tensor.dtype).itemsize


def row_arrays(tables: Sequence[Table], optimizers: Sequence[Optimizer]) -> list[RowArray]:
    """Every array that is stored by rows, those of a table next to each other.

    Raises
    ------
    UnsupportedModelError
        Two optimizers keep state of one name for one table, or state has the name of the table's own rows.
    """
    arrays: dict[str, RowArray] = {}
    for table in tables:
        weight = RowArray(table, slot_path(table.name, "weight"), table.parameter, table.element)
        arrays[weight.path] = weight
        for optimizer in optimizers:
            for slot, tensor in row_slots(optimizer, table.parameter).items():
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
                arrays[path] = RowArray(table, path, tensor, dtype_name(tensor.dtype))
    return list(arrays.values())
