"""The model that training checkpoints, with its tables and optimizers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from cnr_store.errors import OptionError, StateError, UnsupportedModelError, listed
from cnr_store.format.layout import dense_path, place, table_name
from cnr_store.training.devices.support import failing_saves
from cnr_store.training.distributed.pieces import check_no_flat_parameters, reshard
from cnr_store.training.distributed.sharded import (
    ShardedModule,
    ShardedTable,
    bare_lookups,
    check_dense_kernels,
)
from cnr_store.training.distributed.torchrec_door import torchrec
from cnr_store.training.model.dense_state import absent_parameters, named_state
from cnr_store.training.model.names import named_modules, parameter_names
from cnr_store.training.model.optimizer_state import (
    Tree,
    as_list,
    has_unnamed,
    is_kept_whole,
    named_groups,
    optimizer_tree,
)
from cnr_store.training.model.patterns import NOTHING, Exclusion, check_patterns
from cnr_store.training.model.row_arrays import RowArray, RowArrays, SlotNames
from cnr_store.training.model.tables import Table, find_tables, note_sharing, table_weights

log = logging.getLogger("cnr_store")


@dataclass
class TrainedModel:
    """A model, the tables in it, and the optimizers that train it; all of them live."""

    model: nn.Module
    tables: Sequence[Table]
    optimizers: Sequence[Optimizer]  # those that step, without TorchRec's
    sharded: Sequence[ShardedModule] = ()  # TorchRec's modules
    # Where among the optimizers given TorchRec's stood, which changes rows in the backward pass; None without it. A
    # rank that holds no table of it can't tell, so ranks agree on it.
    fused_position: int | None = None
    given: Sequence[Optimizer] = ()  # the optimizers as a caller gave them, with TorchRec's wrappers
    excluded: Exclusion = NOTHING  # what versions are without
    # What their state by rows is called in the store
    slot_names: SlotNames = field(default_factory=SlotNames)
    # Pairs of `optimizers` with the same groups, as of a wrapper and what it wraps
    sharing: Sequence[tuple[Optimizer, Optimizer]] = ()

    def __post_init__(self) -> None:
        self._arrays = RowArrays(self.slot_names)

    @classmethod
    def from_arguments(
        cls, model: object, optimizer: Optimizer | Sequence[Optimizer] | None, exclude: Sequence[str] = ()
    ) -> Self:
        """Check what a caller passed, and find the tables."""
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(
                f"the model is of type {type(model).__name__}; give a torch.nn.Module"
            )
        given = as_list(optimizer)
        optimizers, fused_position, sharded = list(given), None, list[ShardedModule]()
        check_no_flat_parameters(model)
        reshard(model)
        if (door := torchrec()) is not None:
            optimizers, fused_position = door.take_fused(given)
            sharded = door.find_sharded(named_modules(model))
            door.check_kept(given, sharded)
        check_dense_kernels(optimizers, sharded)
        weights = [name for _, name, _, _ in table_weights(model)]
        weights += [table.name for module in sharded for table in module.tables]
        excluded = Exclusion(check_patterns("exclude", exclude), absent_parameters(model), {*weights})
        state = named_state(model)
        owners = {name: id(one) for name, (_, one) in state.items() if isinstance(one, torch.Tensor)}
        excluded.check([*state, *excluded.absent, *map(table_name, weights)], owners)
        tables = find_tables(model, sharded, excluded)
        tensors = [name for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())]
        # Raises for names that can't be stored.
        stored = (dense_path("model", name) for name in tensors if not excluded.has(name))
        place([*(table.path for table in tables), *stored], {})
        names, sharing = parameter_names(model), []
        for each in optimizers:
            named_groups(each, names)
        for one, other in itertools.combinations(optimizers, 2):
            if one.state is other.state:
                raise StateError(
                    f"two optimizers given have one state, of {type(one).__name__}; give one of them"
                )
            if [*map(id, one.param_groups)] == [*map(id, other.param_groups)]:
                sharing.append((one, other))
        slots = SlotNames(optimizers, [each for each in optimizers if is_kept_whole(each)])
        made = cls(model, tables, optimizers, sharded, fused_position, given, excluded, slots, sharing)
        if excluded.patterns:
            with suppress(StateError):  # of one that is to be consolidated before each save, say
                made.optimizer_trees(names)
        return made

    @property
    def fused_tables(self) -> list[tuple[Table, ShardedTable]]:
        """The tables whose optimizer state TorchRec keeps, if that is to be saved, with what it says of them."""
        return [] if self.fused_position is None else self._fused()

    def _fused(self) -> list[tuple[Table, ShardedTable]]:
        return [(each, each.sharded) for each in self.tables if each.sharded is not None and each.is_fused]

    def warn_left_out(self) -> None:
        """Log what is not saved: tables that the model leaves out, or state of fused optimizers that were not given."""
        absent = [name for name in self.excluded.absent if not self.excluded.has(name)]
        stepped = (
            (one, each) for each in self.optimizers for group in each.param_groups for one in group["params"]
        )
        stateful = {id(one) for one, each in stepped if one.requires_grad or one in each.state}
        of_all = parameter_names(self.model) if absent else {}
        kept = [name for key, name in of_all.items() if key in stateful and name in absent]
        if absent:
            log.warning(
                "the model leaves %s out of its state dict, so versions are without it and a load leaves it as it is%s",
                ", ".join(absent),
                f"; leave out its optimizer state, too, with tracking=cnr_store.Tracking(exclude={kept})"
                if kept
                else "",
            )
        names = [table.name for table, sharded in self._fused() if sharded.slots]
        if names and self.optimizers and self.fused_position is None:
            log.warning(
                "the fused optimizer of table %s was not given, so its state is not saved; give "
                "[model.fused_optimizer, ...] as optimizer",
                listed(map(repr, names), 1),
            )

    def saved_parameters(self) -> set[int]:
        """The ids of the parameters that are not excluded."""
        return {key for key, name in parameter_names(self.model).items() if not self.excluded.has(name)}

    def reshard(self) -> None:
        """Have FSDP2 give parameters their place back, where it holds whole ones for a forward."""
        reshard(self.model)

    def follow_loaded(self) -> None:
        """Have wrappers of optimizers follow those, and optimizers share groups as before, once these were loaded."""
        if (door := torchrec()) is not None:
            door.follow_inner(self.given)
        for one, other in self.sharing:
            other.param_groups = one.param_groups

    def flush_caches(self) -> None:
        """Write rows that are newer in a cache back to the tables, before these are read."""
        with failing_saves(torch.device("cuda"), "caches of tables"):
            for lookup in self._cached():
                lookup.flush()

    def purge_caches(self) -> None:
        """Forget what caches hold, after the tables were written: rows that are looked up are then those."""
        for lookup in self._cached():
            lookup.purge()

    def _cached(self) -> list[Any]:
        cached = [module for module in self.sharded if any(table.cached for table in module.tables)]
        return [lookup for each in cached for lookup in bare_lookups(each.module)]

    def note_sharing(self) -> None:
        """Note what has come to share the memory of tables."""
        note_sharing(self.model, self.tables)

    def row_arrays(self) -> list[RowArray]:
        """Every array that is stored by rows, as it is now: see `RowArrays.now`."""
        # Each time, as optimizers make most of their state in their first step.
        check_dense_kernels(self.optimizers, self.sharded)
        return self._arrays.now(self.tables, self.fused_position is not None)

    def optimizer_trees(self, names: Mapping[int, str]) -> list[Tree]:
        """What is stored of the optimizers beside rows: see `optimizer_tree`. `names` are from `parameter_names`.

        `OptionError` if state of what is excluded may be in what names no parameters.
        """
        trees = []
        for position, each in enumerate(self.optimizers):
            tree = optimizer_tree(each, names, () if each in self.slot_names.kept_whole else self.tables)
            left_out = [
                one for group in tree["param_groups"] for one in filter(self.excluded.has, group["params"])
            ]
            # LBFGS keeps what it knows of all parameters as state of the first one.
            if left_out and (has_unnamed(tree) or isinstance(each, torch.optim.LBFGS)):
                raise OptionError(
                    f"exclude leaves {listed(map(repr, left_out), 3)} out, but state of optimizer {position} "
                    f"({tree['class']}) that names no parameters may hold theirs: make it without them, or keep them"
                )
            for table, keys in tree["slots"].items():
                tree["slots"][table] = sorted(self.slot_names.name(table, each, key) for key in keys)
            trees.append(tree)
        return trees

    def table_slots(self) -> dict[str, set[str]]:
        """By table, the names of the state that optimizers have made for its rows so far."""
        slots = {table.name: {slot for slot, _ in self.slot_names.slots(table)} for table in self.tables}
        for table, sharded in self.fused_tables:
            slots[table.name] |= sharded.slots.keys()
        return slots
