"""The model that training checkpoints, with its tables and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.model.optimizer_state import as_list, row_slots
from cnr_store.training.model.row_arrays import RowArray, row_arrays
from cnr_store.training.model.tables import Table, find_tables, note_sharing


@dataclass(frozen=True)
class TrainedModel:
    """A model, the tables in it, and the optimizers that train it; all of them live."""

    model: nn.Module
    tables: Sequence[Table]
    optimizers: Sequence[Optimizer]

    @classmethod
    def from_arguments(cls, model: object, optimizer: Optimizer | Sequence[Optimizer] | None) -> Self:
        """Check what a caller passed, and find the tables.

        Raises
        ------
        UnsupportedModelError
            `model` is not an `nn.Module`, one of its tables can't be stored, or this process is one of several ranks.
        StateError
            `optimizer` is neither None, an optimizer, nor several.
        """
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(
                f"the model is of type {type(model).__name__}; give a torch.nn.Module"
            )
        _check_one_rank()
        optimizers = as_list(optimizer)
        return cls(model, find_tables(model), optimizers)

    def note_sharing(self) -> None:
        """Note what has come to share the memory of tables."""
        note_sharing(self.model, self.tables)

    def row_arrays(self) -> list[RowArray]:
        """Every array that is stored by rows, as it is now: see `row_arrays`."""
        return row_arrays(self.tables, self.optimizers)

    def table_slots(self) -> dict[str, set[str]]:
        """By table, the keys of the state that optimizers have made for its rows so far."""
        return {
            table.name: {slot for each in self.optimizers for slot in row_slots(each, table.parameter)}
            for table in self.tables
        }


def _check_one_rank() -> None:
    """Check that this process trains alone, or has a process group of its own."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if (ranks := distributed.get_world_size()) > 1:
        raise UnsupportedModelError(
            f"this process is rank {distributed.get_rank()} of {ranks} in a process group, as under "
            "DistributedDataParallel, and checkpoints of several ranks are not built yet: train in one process for "
            "each URL, or in a process group of one rank"
        )
