"""How the stored state of an optimizer fits one that trains other tables, or more rows of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from cnr_store.errors import ModelMismatchError
from cnr_store.format.layout import slot_path
from cnr_store.format.record import ArrayEntry
from cnr_store.training.loading.selection import TableFit
from cnr_store.training.model.optimizer_state import Tree, check_groups, optimizer_tree, row_slots
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import dtype_named, may_overlap_itself

_BEGIN_AT_ZERO = (SGD, Adam, AdamW, RMSprop, SparseAdam)
"""Exact classes whose state of a row that was never trained is zero."""


@dataclass
class OptimizerFit:
    """What one optimizer is to get.

    Attributes
    ----------
    tree
        The stored state, see `optimizer_tree`.
    loaded
        Names of the parameters that are loaded and whose state, or that they had none, the tree tells.
    kept
        Names of the others that are loaded and have state now, which stays: the optimizer saved did not train them.
    slots
        By table and slot, the tensor to fill: the optimizer's own, or a new one.
    """

    optimizer: Optimizer
    tree: Tree
    tables: Sequence[Table]
    fits: Mapping[str, TableFit]
    loaded: Collection[str]
    kept: Collection[str]
    slots: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def takes_settings(self, names: Mapping[int, str]) -> bool:
        """Whether the optimizer has the groups of parameters whose settings are stored."""
        try:
            check_groups(self.optimizer, names, self.tree)
        except ModelMismatchError:
            return False
        return True

    def targets(self) -> Iterator[tuple[str, TableFit, torch.Tensor]]:
        """Path, table and tensor of all state that is read by rows."""
        for name, slots in self.slots.items():
            for slot, tensor in slots.items():
                yield slot_path(name, slot), self.fits[name], tensor

    def merged(
        self, names: Mapping[int, str], *, settings: bool
    ) -> tuple[Tree, dict[str, dict[str, torch.Tensor]]]:
        """The optimizer's present state with what is stored of the parameters loaded, as `load_optimizer` takes it.

        Of a table of which rows were chosen, what stands beside the rows is stored state only where there is none.
        """
        present = optimizer_tree(self.optimizer, names, self.tables)
        if settings and self.takes_settings(names):
            present |= {name: self.tree[name] for name in ("param_groups", "other")}
        slots = {
            table.name: row_slots(self.optimizer, table.parameter)
            for table in self.tables
            if table.name in present["slots"]
        }
        by_parameter = {fit.table.parameter_name: fit for fit in self.fits.values()}
        owned = {names[id(one)] for group in self.optimizer.param_groups for one in group["params"]}
        state = present["state"]
        for name in owned & {*self.loaded}:
            fit, stored = by_parameter.get(name), self.tree["state"].get(name)
            if fit is not None and fit.ids is not None:
                if beside := {**(stored or {}), **state.get(name, {})}:
                    state[name] = beside
                slots[fit.table.name] = {
                    **slots.get(fit.table.name, {}),
                    **self.slots.get(fit.table.name, {}),
                }
                continue
            state.pop(name, None)
            if stored is not None:  # empty state is not the same: some classes look for a step in each
                state[name] = stored
            if fit is not None:
                slots[fit.table.name] = self.slots.get(fit.table.name, {})
        return {**present, "slots": {name: sorted(found) for name, found in slots.items()}}, slots


def fit_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    tables: Sequence[Table],
    tree: Tree,
    fits: Sequence[TableFit],
    loaded: Collection[str],
    arrays: Mapping[str, ArrayEntry],
) -> OptimizerFit:
    """Compare the optimizer's state of the tables that are loaded with the version's `arrays`.

    Raises
    ------
    ModelMismatchError
        State has another shape, or new rows need some and nobody knows how it begins.
    """
    params = [one for group in optimizer.param_groups for one in group["params"]]
    owned = {names[id(one)]: one for one in params if id(one) in names}
    fitting = {fit.table.name: fit for fit in fits if fit.table.parameter_name in owned}
    told = {name for group in tree["param_groups"] for name in group["params"]}
    kept = [
        name
        for name, one in owned.items()
        if name in loaded and name not in told and optimizer.state.get(one)
    ]
    found = OptimizerFit(optimizer, tree, tables, fitting, told.intersection(loaded), kept)
    for name, fit in fitting.items():
        for slot in tree["slots"].get(name, ()):
            entry = arrays[slot_path(name, slot)]
            found.slots.setdefault(name, {})[slot] = _target(optimizer, fit, slot, entry)
    return found


def _target(optimizer: Optimizer, fit: TableFit, slot: str, entry: ArrayEntry) -> torch.Tensor:
    parameter, shape = fit.table.parameter, (fit.table.rows, *entry.shape[1:])
    there = row_slots(optimizer, parameter).get(slot)
    dtype = dtype_named(entry.element)
    if there is not None and may_overlap_itself(there):
        there = there.clone(memory_format=torch.contiguous_format)
    if there is not None and tuple(there.shape) == shape and there.dtype == dtype:
        return there
    if fit.ids is None and fit.stored_rows == fit.table.rows:
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    if there is not None:
        if tuple(there.shape) == shape and there.is_floating_point() and dtype.is_floating_point:
            return there
        raise ModelMismatchError(
            f"table {fit.table.name!r}: the optimizer's {slot!r} is {tuple(there.shape)} {there.dtype}, stored as "
            f"{entry.shape} {entry.element}; load without the optimizer"
        )
    if type(optimizer) not in _BEGIN_AT_ZERO:
        raise ModelMismatchError(
            f"table {fit.table.name!r} has rows that are not loaded, and {type(optimizer).__name__} has no {slot!r} of "
            "them: make a step before, or load without the optimizer"
        )
    return torch.zeros(shape, dtype=dtype, device=parameter.device)
