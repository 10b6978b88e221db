"""Tables that TorchRec's fused optimizers trained when a version was saved, and that an optimizer steps now; or back.

How a table is sharded decides which of the two trains it: one that every rank has whole is stepped as dense parameters
are. What both keep for a row is the same number where both are Adagrad, or Adagrad with one number a row, and nothing
where both are plain gradient descent. So it is carried over there, and groups are compared as if the table had always
been where it is now. Settings, such as the learning rate, stay those of the optimizer that trains the table now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from cnr_store.format.layout import slot_path
from cnr_store.format.record import ArrayEntry
from cnr_store.training.loading.match import Match
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.optimizer_state import Group, Tree, row_slots
from cnr_store.training.model.tables import SpreadTable, Table
from cnr_store.training.model.tensors import dtype_named
from cnr_store.training.model.trained_model import TrainedModel

FUSED_SLOT, STEPPED_SLOT = "momentum1", "sum"
_KINDS = {
    "SGD": ("sgd", "exact_sgd"),
    "Adagrad": ("exact_adagrad",),
    "RowWiseAdagrad": ("row_wise_adagrad", "exact_row_wise_adagrad"),
}
"""By the class of an optimizer, the fused ones of the same mathematics."""


@dataclass
class MovedTables:
    """What a version holds of optimizers, as if each table had been trained then by what trains it now."""

    trees: list[Tree]  # of the optimizers that step
    fused: Tree | None  # of TorchRec's; None if there is none
    carried: set[str] = field(default_factory=set)  # names of the tables whose state is carried over
    # Names of the parameters whose state can't be carried over
    without_state: set[str] = field(default_factory=set)


def move_tables(
    match: Match,
    trained: TrainedModel,
    trees: Sequence[Tree],
    fused: Tree | None,
    names: Mapping[int, str],
    arrays: Mapping[str, ArrayEntry],
) -> MovedTables:
    """Find the tables that another kind of optimizer trained; what can't be carried over goes into `match`.

    `trees`, `fused`: the stored state of the optimizers that step, and of TorchRec's.
    `names`: ``id(parameter)`` to name.
    `arrays`: the version's.
    """
    moved = MovedTables([*trees], fused)
    was_fused = {name for group in fused["param_groups"] for name in group["params"]} if fused else set()
    for table in (fit.table for fit in match.tables):
        is_fused = isinstance(table, SpreadTable) and table.is_fused
        if is_fused and trained.fused_position is not None and table.parameter_name not in was_fused:
            _leave(moved, match, table, arrays)
        elif not is_fused and table.parameter_name in was_fused:
            _join(moved, match, table, trained.optimizers, names, arrays)
    if moved.fused is not None and not moved.fused["param_groups"] and trained.fused_position is None:
        moved.fused = None
    return moved


def _leave(moved: MovedTables, match: Match, table: Table, arrays: Mapping[str, ArrayEntry]) -> None:
    """Take a table out of the stored optimizer that stepped it."""
    assert isinstance(table, SpreadTable)
    name, kind = table.parameter_name, table.sharded.optimizer.kind if table.sharded.optimizer else ""
    for position, tree in enumerate(moved.trees):
        group = next((group for group in tree["param_groups"] if name in group["params"]), None)
        if group is None:
            continue
        slots = tree["slots"].get(table.name, [])
        entry = arrays.get(slot_path(table.name, STEPPED_SLOT)) if slots == [STEPPED_SLOT] else None
        if _are_alike(tree["class"], group, kind, slots, entry, table):
            moved.carried |= {table.name} if slots else set()
        else:
            moved.without_state.add(name)
            _refuse(
                match, table, f"{tree['class']} stepped it", f"the fused optimizer {kind!r} trains it now"
            )
        moved.trees[position] = _without(tree, table)
        if moved.fused is None:
            moved.fused = {"class": "", "param_groups": [], "state": {}, "slots": {}, "other": {}}
        return


def _join(
    moved: MovedTables,
    match: Match,
    table: Table,
    optimizers: Sequence[Optimizer],
    names: Mapping[int, str],
    arrays: Mapping[str, ArrayEntry],
) -> None:
    """Put a table into the stored state of the optimizer that steps it now."""
    assert moved.fused is not None
    name, slots = table.parameter_name, moved.fused["slots"].get(table.name, [])
    for position, (optimizer, tree) in enumerate(zip(optimizers, moved.trees, strict=False)):
        group = next(
            (g for g in optimizer.param_groups if any(p is table.parameter for p in g["params"])), None
        )
        if group is None:
            continue
        entry = arrays.get(slot_path(table.name, FUSED_SLOT)) if slots == [FUSED_SLOT] else None
        kind, own = type(optimizer).__name__, optimizer.state.get(table.parameter, {})
        slot = row_slots(optimizer, table.parameter).get(STEPPED_SLOT)
        state, kept = dict(tree["state"]), dict(tree["slots"])
        has_slot = not slots or (slot is not None and entry is not None and _holds(slot, entry))
        if not has_slot or not _are_alike(kind, group, _KINDS.get(kind, ("",))[0], slots, entry, table):
            moved.without_state.add(name)
            before = f"{slots} in {entry.element}" if entry else f"{slots}"
            now = f", with {STEPPED_SLOT!r} in {slot.dtype}" if slot is not None else ""
            trained = f"a fused optimizer with the state {before} trained it"
            _refuse(match, table, trained, f"{kind} steps it now{now}")
        elif entry is not None and entry.boundaries:
            moved.without_state.add(name)
            refuse_shards(match, table, [f"state of {name!r}"], entry.boundaries[:-1], (0,))
        elif slots:
            moved.carried.add(table.name)
            kept[table.name] = [STEPPED_SLOT]
            state[name] = {key: value for key, value in own.items() if key != STEPPED_SLOT}
        groups = _joined(tree["param_groups"], name, [names.get(id(one)) for one in group["params"]], group)
        moved.trees[position] = {**tree, "param_groups": groups, "state": state, "slots": kept}
        moved.fused = _without(moved.fused, table)
        return


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


def _joined(groups: Sequence[Group], name: str, mates: Sequence[str | None], now: Group) -> list[Group]:
    """The stored groups, with a parameter in that of its present mates; or in one of its own, as it is now."""
    for position, group in enumerate(groups):
        if set(group["params"]) & set(mates):
            return [
                *groups[:position],
                {**group, "params": [*group["params"], name]},
                *groups[position + 1 :],
            ]
    return [*groups, {**now, "params": [name]}]


def _holds(slot: torch.Tensor, entry: ArrayEntry) -> bool:
    """Whether state can hold what is stored without rounding: that of fused optimizers is float32 for any table."""
    return torch.promote_types(slot.dtype, dtype_named(entry.element)) == slot.dtype


def _are_alike(
    kind: str,
    group: Mapping[str, Any],
    fused_kind: str,
    slots: Sequence[str],
    entry: ArrayEntry | None,
    table: Table,
) -> bool:
    """Whether an optimizer with this group and a fused one keep the same, and it is what is stored.

    `entry`: of the only one of `slots`, if it is the one that they keep.
    """
    if fused_kind not in _KINDS.get(kind, ()):
        return False
    if any(group.get(setting) for setting in ("momentum", "lr_decay")):
        return False
    if kind == "SGD":
        return not slots
    if entry is None:
        return False
    if kind == "Adagrad":
        return entry.shape == (entry.shape[0], table.dim) and not entry.boundaries
    return bool(entry.boundaries) or entry.shape[1:] in ((), (1,))


def _refuse(match: Match, table: Table, before: str, now: str) -> None:
    match.lacks(
        [f"state of {table.parameter_name!r}"],
        f"table {table.name!r}: when {match.where} was saved, {before}, and {now}, as it is sharded otherwise: what "
        "the first kept for its rows is not what the other keeps. Shard the table as it was, or give it an optimizer "
        f"of the same mathematics (Adagrad, row-wise Adagrad, plain SGD), or {IGNORE} the rest without that state",
    )


def refuse_shards(
    match: Match, table: Table, names: Sequence[str], stored: Sequence[int], now: Sequence[int]
) -> None:
    """Note that a table has other column shards than those that its state has numbers for.

    `names`: of that state.
    `stored`, `now`: the first columns of the column shards saved, and of the model's.
    """
    match.lacks(
        names,
        f"table {table.name!r} has column shards that begin at {[*now]}, and had some that began at {[*stored]} in "
        f"{match.where}. {', '.join(names)} holds one number for each row and column shard, and none for other shards "
        "follows from them. Shard the table's columns as they were, on any ranks (column_wise may name one twice), or "
        f"{IGNORE} the rest and leaves this state as it is in the model",
    )
