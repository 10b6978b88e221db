"""How the stored state of an optimizer fits one that may train other tables, or more rows of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from cnr_store.errors import ModelMismatchError
from cnr_store.format.layout import slot_path
from cnr_store.format.record import ArrayEntry
from cnr_store.training.distributed.dtensors import is_dtensor
from cnr_store.training.loading.match import Match, TableFit
from cnr_store.training.loading.moved_tables import MovedTables
from cnr_store.training.loading.state_tree import settings_of, wrapper_of
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.optimizer_state import (
    Tree,
    check_groups,
    has_unnamed,
    is_kept_whole,
    named_groups,
    optimizer_tree,
    row_slots,
)
from cnr_store.training.model.row_arrays import key_of
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import dtype_named, may_overlap_itself

Slots = dict[str, dict[str, torch.Tensor]]
_BEGIN_AT_ZERO = (SGD, Adam, AdamW, RMSprop, SparseAdam)
"""Exact classes whose state of a row that was never trained is zero."""


@dataclass
class OptimizerFit:
    """What one optimizer is to get."""

    optimizer: Optimizer
    tree: Tree  # the stored state, see `optimizer_tree`
    fits: Mapping[str, TableFit]  # by name, the tables loaded that the optimizer trains
    # Names of the parameters whose state is loaded. One without any in `tree` had none.
    loaded: Collection[str]
    settings: bool  # whether the groups' settings are loaded, and state that has no parameter's name
    # By table and key, the tensor to fill: the optimizer's own, or a new one
    slots: Slots = field(default_factory=dict)

    def take_slots(self, arrays: Mapping[str, ArrayEntry]) -> None:
        """Find or make the tensors for the state that follows rows. `arrays` are the version's."""
        for name, fit in self.fits.items():
            for slot in self.tree["slots"].get(name, ()):
                key = key_of(slot)
                target = _target(self.optimizer, fit, key, arrays[slot_path(name, slot)])
                self.slots.setdefault(name, {})[key] = target
            if fit.ids is None and fit.stored_rows != fit.table.rows:
                self._check_rest(fit)

    def _check_rest(self, fit: TableFit) -> None:
        """Refuse state of a table of other rows that has an entry a row, but a type that is not stored by rows."""
        parameter, rows = fit.table.parameter, fit.stored_rows
        own = self.optimizer.state.get(parameter, {})
        for key, stored in self.tree["state"].get(fit.table.parameter_name, {}).items():
            if not isinstance(stored, torch.Tensor) or stored.shape[:1] != (rows,):
                continue
            present = own.get(key)
            if stored.shape == getattr(present, "shape", None) or (rows == 1 and present is None):
                continue
            raise ModelMismatchError(
                f"table {fit.table.name!r} has {fit.table.rows} rows, {rows} are stored, and the optimizer's {key!r} "
                f"of {stored.dtype} is stored whole, not by rows: load without the optimizer"
            )

    def targets(self) -> Iterator[tuple[str, TableFit, torch.Tensor]]:
        """Path, table and tensor of all state that is read by rows."""
        for name, slots in self.slots.items():
            for slot in self.tree["slots"][name]:
                yield slot_path(name, slot), self.fits[name], slots[key_of(slot)]

    def expected_slots(self) -> Slots:
        """By table, the state to which the next save compares the optimizer's.

        None of tables that do not become what the version holds: they are saved whole, and torch may cast their state.
        """
        return {name: self.slots.get(name, {}) if fit.exact else {} for name, fit in self.fits.items()}

    def merged(self, names: Mapping[int, str], tables: Sequence[Table]) -> tuple[Tree, Slots]:
        """The optimizer's present state with what is stored of the parameters loaded, as `load_optimizer` takes it.

        Of a table of which rows were chosen, the state that does not follow rows is loaded only where the optimizer
        has none.
        """
        owned = {names.get(id(one)) for group in self.optimizer.param_groups for one in group["params"]}
        if self.settings and owned <= {*self.loaded}:  # nothing of the present state stays
            return _with_slots(self.tree, self.slots), self.slots
        tree = optimizer_tree(self.optimizer, names, tables)
        if self.settings:
            tree |= {name: self.tree[name] for name in ("param_groups", "other", "more") if name in self.tree}
        tree["shared"] = self.tree.get("shared", ())
        slots = {
            table.name: row_slots(self.optimizer, table.parameter)
            for table in tables
            if table.name in tree["slots"]
        }
        by_parameter = {fit.table.parameter_name: fit for fit in self.fits.values()}
        state = tree["state"]
        for name in {*self.loaded} & owned:
            fit, stored = by_parameter.get(name), self.tree["state"].get(name)
            if fit is not None:
                kept = {} if fit.ids is None else slots.get(fit.table.name, {})
                slots[fit.table.name] = {**kept, **self.slots.get(fit.table.name, {})}
                if fit.ids is not None:
                    stored = {**(stored or {}), **state[name]} if name in state else stored or None
            state.pop(name, None)
            if stored is not None:  # empty state is not the same: some classes look for a step in each
                state[name] = stored
        return _with_slots(tree, slots), slots


def fit_optimizers(
    match: Match,
    optimizers: Sequence[Optimizer],
    moved: MovedTables,
    names: Mapping[int, str],
    loaded: Collection[str],
) -> list[OptimizerFit]:
    """The optimizers whose state is loaded; what differs goes into `match`.

    `moved`: the stored state of each optimizer of the version.
    `names`: ``id(parameter)`` to name.
    `loaded`: names of the parameters that are loaded.
    """
    everything, trees = match.selection.everything, moved.trees
    loaded = {*loaded} - moved.without_state
    if len(trees) < len(optimizers) or (everything and len(trees) > len(optimizers)):
        stored = f"holds the state of {len(trees)} optimizers" if trees else "was saved without an optimizer"
        match.differs(
            f"{match.where} {stored}, {len(optimizers)} were given; give those it was saved with, or none, or {IGNORE} "
            "those that fit"
        )
    fits = []
    held = {name for tree in trees for name in tree["state"]}
    for position, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        stored_kind = trees[position]["class"] if position < len(trees) else None
        if stored_kind == kind:
            fits.append(_fit_optimizer(match, position, optimizer, trees[position], names, loaded, held))
            continue
        match.missing.append(f"state of optimizer {position} ({kind})")
        if stored_kind is not None:
            match.differs(
                f"optimizer {position} is {kind}, in {match.where} it is {stored_kind}; give the one it was saved "
                f"with, or {IGNORE} the model without it"
            )
    return fits


def _fit_optimizer(
    match: Match,
    position: int,
    optimizer: Optimizer,
    tree: Tree,
    names: Mapping[int, str],
    loaded: Collection[str],
    held: Collection[str],
) -> OptimizerFit:
    owned = {
        names[id(one)]: one for group in optimizer.param_groups for one in group["params"] if id(one) in names
    }
    fits = {fit.table.name: fit for fit in match.tables if fit.table.parameter_name in owned}
    trained = {name for group in tree["param_groups"] for name in group["params"]}
    kept = [
        f"state of {name!r} in optimizer {position}"
        for name, one in owned.items()
        if name in loaded and name not in trained and (optimizer.state.get(one) or name in held)
    ]
    lost = sorted({*tree["state"]} & {*loaded} - owned.keys())
    match.unexpected += [f"state of {name!r} in optimizer {position}" for name in lost]
    settings = everything = match.selection.everything
    match.missing += kept
    if kept and not everything:
        match.differs(
            f"optimizer {position} does not fit {match.where}: only in the model: {', '.join(kept)}; load without the "
            f"optimizer, or {IGNORE} the parameters and keeps that state"
        )
    state = {
        name: {
            key: wrapper_of(one, f"{key!r} of {name!r} in optimizer {position}")
            for key, one in values.items()
        }
        for name, values in tree["state"].items()
        if name in loaded
    }
    tree = {**tree, "state": tree["state"] | state}
    stored_order = [group["params"] for group in tree["param_groups"]]
    if everything:
        try:
            groups = check_groups(optimizer, names, tree)
            groups = settings_of(groups, optimizer.param_groups, f"param_groups of optimizer {position}")
            tree = {**tree, "param_groups": groups}
        except ModelMismatchError as error:
            match.lacks([f"settings of optimizer {position}"], str(error))
            settings = False
    is_same = all(fit.exact for fit in fits.values()) and owned.keys() <= {*loaded}
    if has_unnamed(tree) and not (everything and is_same and stored_order == named_groups(optimizer, names)):
        settings = False
        match.missing.append(f"state of optimizer {position} that names no parameters")
        if everything:
            match.differs(
                f"the state_dict of optimizer {position} ({tree['class']}) in {match.where} has state that names no "
                f"parameters, so it fits only the tables and groups that were saved, in order; give those, or {IGNORE} "
                "the others"
            )
    if not settings and "whole" not in tree and is_kept_whole(optimizer):
        match.refusals.append(
            f"the state_dict of optimizer {position} ({tree['class']}) is in another form than in {match.where}, so no "
            "part of it can be loaded: load without the optimizer"
        )
    return OptimizerFit(optimizer, tree, fits, trained.intersection(loaded), settings)


def _with_slots(tree: Tree, slots: Slots) -> Tree:
    return {**tree, "slots": {name: sorted(by_slot) for name, by_slot in slots.items()}}


def _target(optimizer: Optimizer, fit: TableFit, slot: str, entry: ArrayEntry) -> torch.Tensor:
    parameter, shape = fit.table.parameter, (fit.table.rows, *entry.shape[1:])
    is_whole = fit.ids is None and fit.stored_rows == fit.table.rows
    # Fused kernels walk memory, not shapes.
    is_fused = shape == tuple(parameter.shape) and any(group.get("fused") for group in optimizer.param_groups)
    follows = is_dtensor(parameter) or is_fused
    own = row_slots(optimizer, parameter).get(slot)
    dtype = dtype_named(entry.element)
    if own is not None and may_overlap_itself(own):
        own = own.clone(memory_format=torch.contiguous_format)
    if own is not None and tuple(own.shape) == shape and own.dtype == dtype:
        return own
    if is_dtensor(parameter) and shape != tuple(parameter.shape):
        raise ModelMismatchError(
            f"table {fit.table.name!r} is a DTensor, and the optimizer's {slot!r} is stored as {entry.shape}: it "
            "is not known how to split it over the ranks; load without the optimizer"
        )
    if own is not None and not is_whole:
        if tuple(own.shape) == shape and own.is_floating_point() and dtype.is_floating_point:
            return own
        raise ModelMismatchError(
            f"table {fit.table.name!r}: the optimizer's {slot!r} is {tuple(own.shape)} {own.dtype}, stored as "
            f"{entry.shape} {entry.element}; load without the optimizer"
        )
    if type(optimizer) not in _BEGIN_AT_ZERO and not is_whole:
        raise ModelMismatchError(
            f"table {fit.table.name!r} has rows that are not loaded, and {type(optimizer).__name__} has no {slot!r} of "
            "them: make a step before, or load without the optimizer"
        )
    if follows or (not is_whole and shape == tuple(parameter.shape)):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)
