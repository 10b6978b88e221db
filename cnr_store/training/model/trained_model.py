"""The model that training checkpoints, with its tables and optimizers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer

from cnr_store.errors import UnsupportedModelError
from cnr_store.format.layout import dense_path, table_name
from cnr_store.format.stored_paths import place
from cnr_store.training.devices.support import failing_saves
from cnr_store.training.distributed.dtensors import check_no_flat_parameters, reshard
from cnr_store.training.distributed.torchrec import ShardedModule, find_sharded
from cnr_store.training.distributed.torchrec_optimizers import (
    check_dense_kernels,
    check_kept,
    follow_inner,
    take_fused,
)
from cnr_store.training.model.dense_state import absent_parameters, named_state
from cnr_store.training.model.optimizer_state import as_list, row_slots
from cnr_store.training.model.patterns import NOTHING, Exclusion, check_patterns
from cnr_store.training.model.row_arrays import RowArray, RowArrays
from cnr_store.training.model.tables import SpreadTable, Table, find_tables, note_sharing, table_weights

log = logging.getLogger("cnr_store")


@dataclass
class TrainedModel:
    """A model, the tables in it, and the optimizers that train it; all of them live.

    Attributes
    ----------
    optimizers
        Those that step, without TorchRec's.
    sharded
        TorchRec's modules.
    fused_position
        Where among the optimizers given TorchRec's stood, which changes rows in the backward pass; None without it. A
        rank that holds no table of it can't tell, so ranks agree on it.
    given
        The optimizers as a caller gave them, with TorchRec's wrappers.
    excluded
        What versions are without.
    """

    model: nn.Module
    tables: Sequence[Table]
    optimizers: Sequence[Optimizer]
    sharded: Sequence[ShardedModule] = ()
    fused_position: int | None = None
    given: Sequence[Optimizer] = ()
    excluded: Exclusion = NOTHING
    _arrays: RowArrays = field(default_factory=RowArrays, init=False, repr=False)

    @classmethod
    def from_arguments(
        cls, model: object, optimizer: Optimizer | Sequence[Optimizer] | None, exclude: Sequence[str] = ()
    ) -> Self:
        """Check what a caller passed, and find the tables.

        Raises
        ------
        UnsupportedModelError
            `model` is not an `nn.Module`, or is wrapped by FSDP1, or one of its tables can't be stored, or what an
            optimizer keeps for it; or a name can't be stored, or two names have one key.
        OptionError
            A pattern of `exclude` fits nothing.
        StateError
            `optimizer` is neither None, an optimizer, nor several.
        """
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(
                f"the model is of type {type(model).__name__}; give a torch.nn.Module"
            )
        given = as_list(optimizer)
        optimizers, fused_position = take_fused(given)
        check_no_flat_parameters(model)
        reshard(model)
        sharded = find_sharded(model)
        check_kept(given, sharded)
        check_dense_kernels(optimizers, sharded)
        weights = [name for _, name, _, _ in table_weights(model)]
        weights += [table.name for module in sharded for table in module.tables]
        excluded = Exclusion(check_patterns("exclude", exclude), absent_parameters(model), {*weights})
        excluded.check([*named_state(model), *map(table_name, weights)])
        tables = find_tables(model, sharded, excluded)
        tensors = [name for name, _ in chain(model.named_parameters(), model.named_buffers())]
        # Raises for names that can't be stored.
        stored = (dense_path("model", name) for name in tensors if not excluded.has(name))
        place([*(table.path for table in tables), *stored], {})
        return cls(model, tables, optimizers, sharded, fused_position, given, excluded)

    @property
    def fused_tables(self) -> list[SpreadTable]:
        """The tables whose optimizer state TorchRec keeps, if that is to be saved."""
        if self.fused_position is None:
            return []
        return [table for table in self.tables if isinstance(table, SpreadTable) and table.is_fused]

    def warn_left_out(self) -> None:
        """Log what is not saved: tables that the model leaves out, or state of fused optimizers that were not given."""
        if self.excluded.absent:
            log.warning(
                "the model leaves %s out of its state dict, so versions are without it and a load leaves it as it is",
                ", ".join(self.excluded.absent),
            )
        names = [
            table.name
            for table in self.tables
            if isinstance(table, SpreadTable) and table.is_fused and table.sharded.slots
        ]
        if names and self.optimizers and self.fused_position is None:
            log.warning(
                "the fused optimizer of table %r%s was not given, so its state is not saved; give "
                "[model.fused_optimizer, ...] as optimizer",
                names[0],
                f" and {len(names) - 1} more" if names[1:] else "",
            )

    def reshard(self) -> None:
        """Have FSDP2 give parameters their place back, where it holds whole ones for a forward."""
        reshard(self.model)

    def follow_loaded(self) -> None:
        """Have wrappers of optimizers follow those, once these were loaded."""
        follow_inner(self.given)

    def flush_caches(self) -> None:
        """Write rows that are newer in a cache back to the tables, before these are read."""
        with failing_saves(torch.device("cuda"), "caches of tables"):
            for module in self._cached():
                module.flush()

    def purge_caches(self) -> None:
        """Forget what caches hold, after the tables were written."""
        for module in self._cached():
            module.purge()

    def _cached(self) -> list[ShardedModule]:
        return [module for module in self.sharded if any(table.cached for table in module.tables)]

    def note_sharing(self) -> None:
        """Note what has come to share the memory of tables."""
        note_sharing(self.model, self.tables)

    def row_arrays(self) -> list[RowArray]:
        """Every array that is stored by rows, as it is now: see `row_arrays`."""
        check_dense_kernels(
            self.optimizers, self.sharded
        )  # which make most of their state in their first step
        return self._arrays.now(self.tables, self.optimizers, self.fused_position is not None)

    def table_slots(self) -> dict[str, set[str]]:
        """By table, the keys of the state that optimizers have made for its rows so far."""
        slots = {
            table.name: {slot for each in self.optimizers for slot in row_slots(each, table.parameter)}
            for table in self.tables
        }
        for table in self.fused_tables:
            slots[table.name] |= table.sharded.slots.keys()
        return slots
