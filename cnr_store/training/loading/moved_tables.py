"""Tables that TorchRec's fused optimizers trained when a version was saved, and that an optimizer steps now; or back.

How a table is sharded decides which of the two trains it: one that every rank has whole is stepped as dense parameters
are. What one of them kept for its rows is not loaded into the other. Groups are compared as if the table had always
been where it is now. Settings, such as the learning rate, stay those of the optimizer that trains the table now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cnr_store.training.loading.match import Match
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.optimizer_state import Tree, row_slots
from cnr_store.training.model.tables import SpreadTable, Table
from cnr_store.training.model.trained_model import TrainedModel


@dataclass
class MovedTables:
    """What a version holds of optimizers, as if each table had been trained then by what trains it now."""

    trees: list[Tree]  # of the optimizers that step
    fused: Tree | None  # of TorchRec's; None if there is none
    # Names of the parameters whose state is of the other kind of optimizer
    without_state: set[str] = field(default_factory=set)


def move_tables(
    match: Match, trained: TrainedModel, trees: Sequence[Tree], fused: Tree | None, names: Mapping[int, str]
) -> MovedTables:
    """Find the tables that another kind of optimizer trained; state that is kept for their rows goes into `match`.

    `trees`, `fused`: the stored state of the optimizers that step, and of TorchRec's.
    `names`: ``id(parameter)`` to name.
    """
    moved = MovedTables([*trees], fused)
    was_fused = {name for group in fused["param_groups"] for name in group["params"]} if fused else set()
    for table in (fit.table for fit in match.tables):
        name, is_fused = table.parameter_name, isinstance(table, SpreadTable) and table.is_fused
        kept, now = list[str](), list[str]()
        if is_fused and trained.fused_position is not None and name not in was_fused:
            stepped = [tree for tree in moved.trees if name in _trained_by(tree)]
            moved.trees = [_without(tree, table) for tree in moved.trees]
            if stepped and moved.fused is None:
                moved.fused = {"class": "", "param_groups": [], "state": {}, "slots": {}, "other": {}}
            kept = [slot for tree in stepped for slot in tree["slots"].get(table.name, ())]
            now = [*table.sharded.slots] if stepped else []  # type: ignore[attr-defined]  # it is fused
        elif not is_fused and name in was_fused and moved.fused is not None:
            for position, optimizer in enumerate(trained.optimizers[: len(moved.trees)]):
                for group in optimizer.param_groups:
                    if any(one is table.parameter for one in group["params"]):
                        kept = [*moved.fused["slots"].get(table.name, ())]
                        mates = {names.get(id(one)) for one in group["params"]}
                        moved.trees[position] = _joined(moved.trees[position], name, mates, group)
                        moved.fused = _without(moved.fused, table)
                        now = [*row_slots(optimizer, table.parameter)]
        if kept or now:
            moved.without_state.add(name)
            match.lacks(
                [f"state of {name!r}"],
                f"table {table.name!r}: {'a fused optimizer trains' if is_fused else 'an optimizer steps'} it now, and "
                f"not when {match.where} was saved, as it is sharded otherwise: what the other kept for its rows "
                f"({', '.join(kept) or 'nothing'}) is not loaded. Shard the table as it was, or {IGNORE} the rest "
                "without that state",
            )
    if moved.fused is not None and not moved.fused["param_groups"] and trained.fused_position is None:
        moved.fused = None
    return moved


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
