"""How the stored state of optimizers, of torch and of TorchRec, fits those that may train other tables or rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from cnr_store.errors import ModelMismatchError
from cnr_store.format.layout import slot_path
from cnr_store.format.record import ArrayEntry
from cnr_store.training.distributed.pieces import LocalPiece, is_dtensor
from cnr_store.training.loading.match import Match, TableFit
from cnr_store.training.loading.validate_state import settings_of, wrapper_of
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.optimizer_state import (
    FUSED,
    Tree,
    check_groups,
    has_unnamed,
    is_kept_whole,
    named_groups,
    optimizer_tree,
    row_slots,
)
from cnr_store.training.model.row_arrays import RowArray, key_of, slot_parts
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import dtype_named, may_overlap_itself
from cnr_store.training.model.trained_model import TrainedModel

Slots = dict[str, dict[str, torch.Tensor]]
Settings = Mapping[str, Mapping[str, float]]
Target = tuple[str, TableFit, tuple[LocalPiece, ...]]
"""Of an array to read by rows, the path in the version, the table, and the memory to fill."""

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

    def targets(self) -> Iterator[Target]:
        """All state that is read by rows."""
        for name, slots in self.slots.items():
            for slot in self.tree["slots"][name]:
                path, fit = slot_path(name, slot), self.fits[name]
                yield path, fit, slot_parts(fit.table, path, slots[key_of(slot)])

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
    trees: Sequence[Tree],
    names: Mapping[int, str],
    loaded: Collection[str],
) -> list[OptimizerFit]:
    """The optimizers whose state is loaded; what differs goes into `match`.

    `trees`: the stored state of each optimizer of the version.
    `names`: ``id(parameter)`` to name.
    `loaded`: names of the parameters that are loaded.
    """
    everything = match.selection.everything
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


def move_tables(
    match: Match, trained: TrainedModel, trees: Sequence[Tree], fused: Tree | None, names: Mapping[int, str]
) -> tuple[list[Tree], Tree | None, set[str]]:
    """Find the tables that another kind of optimizer trained; state that is kept for their rows goes into `match`.

    How a table is sharded decides whether TorchRec's fused optimizers train it: one that every rank has whole is
    stepped as dense parameters are. What one kind kept for its rows is not loaded into the other. Groups are compared
    as if the table had always been where it is now. Settings, such as the learning rate, stay those of the optimizer
    that trains the table now.

    `trees`, `fused`: the stored state of the optimizers that step, and of TorchRec's; None if there is none.
    `names`: ``id(parameter)`` to name.

    Returns: `trees` and `fused`, as if each table had been trained then by what trains it now; and the names of the
    parameters whose state is of the other kind of optimizer.
    """
    trees, without_state = [*trees], set[str]()
    was_fused = {name for group in fused["param_groups"] for name in group["params"]} if fused else set()
    for table in (fit.table for fit in match.tables):
        name, is_fused = table.parameter_name, table.is_fused
        kept, now = list[str](), list[str]()
        if is_fused and trained.fused_position is not None and name not in was_fused:
            stepped = [tree for tree in trees if name in _trained_by(tree)]
            trees = [_without(tree, table) for tree in trees]
            if stepped and fused is None:
                fused = {"class": "", "param_groups": [], "state": {}, "slots": {}, "other": {}}
            kept = [slot for tree in stepped for slot in tree["slots"].get(table.name, ())]
            now = [*table.sharded.slots] if stepped and table.sharded is not None else []
        elif not is_fused and name in was_fused and fused is not None:
            for position, optimizer in enumerate(trained.optimizers[: len(trees)]):
                for group in optimizer.param_groups:
                    if any(one is table.parameter for one in group["params"]):
                        kept = [*fused["slots"].get(table.name, ())]
                        mates = {names.get(id(one)) for one in group["params"]}
                        trees[position] = _joined(trees[position], name, mates, group)
                        fused = _without(fused, table)
                        now = [*row_slots(optimizer, table.parameter)]
        if kept or now:
            without_state.add(name)
            match.lacks(
                [f"state of {name!r}"],
                f"table {table.name!r}: {'a fused optimizer trains' if is_fused else 'an optimizer steps'} it now, and "
                f"not when {match.where} was saved, as it is sharded otherwise: what the other kept for its rows "
                f"({', '.join(kept) or 'nothing'}) is not loaded. Shard the table as it was, or {IGNORE} the rest "
                "without that state",
            )
    if fused is not None and not fused["param_groups"] and trained.fused_position is None:
        fused = None
    return trees, fused, without_state


def _trained_by(tree: Tree) -> set[str]:
    return {name for group in tree["param_groups"] for name in group["params"]}


def _without(tree: Tree, table: Table) -> Tree:
    """A stored state without a table's."""
    name = table.parameter_name
    groups = [
        {**group, "params": [one for one in group["params"] if one != name]} for group in tree["param_groups"]
    ]
    return {
        **tree,
        "param_groups": [group for group in groups if group["params"]],
        "state": {other: state for other, state in tree["state"].items() if other != name},
        "slots": {other: slots for other, slots in tree["slots"].items() if other != table.name},
    }


def _joined(tree: Tree, name: str, mates: set[str | None], now: Mapping[str, Any]) -> Tree:
    """A stored state, with a parameter in the group of its present mates; or in one of its own, as it is now."""
    groups = [dict(group) for group in tree["param_groups"]]
    own = next((group for group in groups if mates & {*group["params"]}), None)
    if own is None:
        groups.append({**now, "params": [name]})
    else:
        own["params"] = [*own["params"], name]
    return {**tree, "param_groups": groups}


def split_trees(trees: Sequence[Tree]) -> tuple[list[Tree], Tree | None]:
    """The stored trees of optimizers that step, and that of TorchRec's."""
    fused = next((tree for tree in trees if tree["class"] == FUSED), None)
    return [tree for tree in trees if tree["class"] != FUSED], fused


def fit_fused(
    match: Match,
    trained: TrainedModel,
    tree: Tree | None,
    without_state: Collection[str],
    arrays: Mapping[str, ArrayEntry],
) -> tuple[list[Target], Settings]:
    """Compare what TorchRec's optimizers keep with what is stored; what differs goes into `match`.

    A row-wise optimizer keeps one number for each row and column shard. What it would be for other columns can't be
    told from it, so this state fits the column shards alone that were saved.

    `tree`, `without_state`: from `move_tables`.
    `arrays`: the version's.

    Returns: The state to read, and by name of the parameter what to give the optimizers: rates, and what they count.
    """
    targets, settings, everything = list[Target](), dict[str, Any](), match.selection.everything
    if trained.fused_position is None:
        if tree is not None and everything:
            match.unexpected.append("state of TorchRec's optimizer")
        return targets, settings
    if tree is None:
        match.lacks(
            ["state of TorchRec's optimizer"],
            f"{match.where} holds no state of TorchRec's optimizer; load without dmp.fused_optimizer, or {IGNORE} the "
            "model without it",
        )
        return targets, settings
    if everything:
        settings = {
            name: {key: value for key, value in group.items() if key != "params"}
            for group in tree["param_groups"]
            for name in group["params"]
        }
        settings = _settings_of_kernels(settings, trained, match.where)
    fits = {fit.table.name: fit for fit in match.tables}
    by_path = {array.path: array for array in trained.row_arrays()}
    for table, sharded in trained.fused_tables:
        fit = fits.get(table.name)
        if fit is None or table.parameter_name in without_state:
            continue
        kept = {slot: by_path[slot_path(table.name, slot)] for slot in sharded.slots}
        paths = {slot: slot_path(table.name, slot) for slot in tree["slots"].get(table.name, ())}
        if _state_fits(match, table, kept, {slot: arrays[path] for slot, path in paths.items()}):
            targets += [(paths[slot], fit, array.parts) for slot, array in kept.items()]
    return targets, settings


def _state_fits(
    match: Match, table: Table, kept: Mapping[str, RowArray], stored: Mapping[str, ArrayEntry]
) -> bool:
    """Whether a table's state by slot is stored as it is kept now. If not, none of it is loaded: `match` tells why."""
    now = {slot: _shards(array.shape, array.boundaries) for slot, array in kept.items()}
    then = {slot: _shards(entry.shape, entry.boundaries[:-1]) for slot, entry in stored.items()}
    if then == now:
        return True
    names = [f"{table.name}/{slot}" for slot in kept]
    if then.keys() == now.keys() and all(bool(then[slot]) == bool(now[slot]) for slot in now):
        match.lacks(
            names,
            f"table {table.name!r} has column shards that begin at {[*max(now.values())]}, and had some that began at "
            f"{[*max(then.values())]} in {match.where}. {', '.join(names)} holds one number for each row and column "
            "shard, and none for other shards follows from them. Shard the table's columns as they were, on any ranks "
            f"(column_wise may name one twice), or {IGNORE} the rest and leaves this state as it is in the model",
        )
    else:
        before, after = ({slot: each.shape for slot, each in slots.items()} for slots in (stored, kept))
        match.unexpected += [f"{table.name}/{slot}" for slot in stored if slot not in kept]
        match.lacks(
            names,
            f"table {table.name!r}: {match.where} holds {before} as its state, and the model's fused optimizer keeps "
            f"{after}: another optimizer trained it; give it that one, load without dmp.fused_optimizer, or {IGNORE} "
            "the rest",
        )
    return False


def _shards(shape: Sequence[int], boundaries: tuple[int, ...]) -> tuple[int, ...]:
    """The first columns of the column shards that have a number each in every row; none if every value has one."""
    return boundaries or (() if shape[1:] not in ((), (1,)) else (0,))


def _settings_of_kernels(stored: Settings, trained: TrainedModel, where: str) -> dict[str, Any]:
    """What each table's kernels get. TorchRec may have joined tables in a kernel that were in several.

    What is counted takes its greatest value: a new table's kernel began to count later.
    """
    settings = {name: dict(group) for name, group in stored.items()}
    tables = [each for each in trained.fused_tables if each[0].parameter_name in settings]
    kernels = {id(kernel): kernel for _, sharded in tables for kernel in sharded.kernels}
    for kernel in kernels.values():
        joined = {
            each.name: settings[each.parameter_name]
            for each, sharded in tables
            if any(kernel is own for own in sharded.kernels)
        }
        rates = {name: group["lr"] for name, group in joined.items() if "lr" in group}
        if len({*rates.values()}) > 1:
            named = " and ".join(f"{name!r} with {rate:g}" for name, rate in rates.items())
            raise ModelMismatchError(
                f"in {where} tables have learning rates of their own ({named}), and in the model TorchRec gives them "
                "one; build the model with these rates (apply_optimizer_in_backward for each table), or load without "
                "dmp.fused_optimizer"
            )
        counts = {key for group in joined.values() for key in group} - {"lr"}
        greatest = {key: max(group.get(key, 0) for group in joined.values()) for key in counts}
        for group in joined.values():
            group.update(greatest)
    return settings
