"""The state that TorchRec's optimizers keep for rows: what a version holds of it, and how it fits this job's sharding.

A row-wise optimizer keeps one number for each row and column shard. What it would be for other columns can't be told
from it, so this state fits the column shards alone that were saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cnr_store.errors import ModelMismatchError
from cnr_store.format.layout import slot_path
from cnr_store.format.record import ArrayEntry
from cnr_store.training.distributed.pieces import ColumnPart
from cnr_store.training.loading.match import Match, TableFit
from cnr_store.training.loading.moved_tables import MovedTables
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.optimizer_state import FUSED, Tree
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tables import Table
from cnr_store.training.model.trained_model import TrainedModel

Settings = Mapping[str, Mapping[str, float]]


@dataclass
class FusedFit:
    """What TorchRec's optimizers are to get."""

    # Of what is read by rows, the path in the version, the table, and the memory to fill
    targets: list[tuple[str, TableFit, tuple[ColumnPart, ...]]] = field(default_factory=list)
    _settings: Settings = field(default_factory=dict)

    def assign_settings(self, trained: TrainedModel) -> None:
        """Give the optimizers their learning rates, and what else they count."""
        for table in trained.fused_tables:
            if table.parameter_name in self._settings:
                table.sharded.assign_settings(self._settings[table.parameter_name])


def split_trees(trees: Sequence[Tree]) -> tuple[list[Tree], Tree | None]:
    """The stored trees of optimizers that step, and that of TorchRec's."""
    fused = next((tree for tree in trees if tree["class"] == FUSED), None)
    return [tree for tree in trees if tree["class"] != FUSED], fused


def fit_fused(
    match: Match, trained: TrainedModel, moved: MovedTables, arrays: Mapping[str, ArrayEntry]
) -> FusedFit:
    """Compare what TorchRec's optimizers keep with what is stored; what differs goes into `match`.

    `moved`: the stored state, and the tables that were stepped when it was saved.
    `arrays`: the version's.
    """
    fused, everything, tree = FusedFit(), match.selection.everything, moved.fused
    if trained.fused_position is None:
        if tree is not None and everything:
            match.unexpected.append("state of TorchRec's optimizer")
        return fused
    if tree is None:
        match.lacks(
            ["state of TorchRec's optimizer"],
            f"{match.where} holds no state of TorchRec's optimizer; load without dmp.fused_optimizer, or {IGNORE} the "
            "model without it",
        )
        return fused
    if everything:
        settings = {
            name: {key: value for key, value in group.items() if key != "params"}
            for group in tree["param_groups"]
            for name in group["params"]
        }
        fused._settings = _settings_of_kernels(settings, trained, match.where)
    fits = {fit.table.name: fit for fit in match.tables}
    by_path = {array.path: array for array in trained.row_arrays()}
    for table in trained.fused_tables:
        fit = fits.get(table.name)
        if fit is None or table.parameter_name in moved.without_state:
            continue
        kept = {slot: by_path[slot_path(table.name, slot)] for slot in table.sharded.slots}
        paths = {slot: slot_path(table.name, slot) for slot in tree["slots"].get(table.name, ())}
        if _state_fits(match, table, kept, {slot: arrays[path] for slot, path in paths.items()}):
            fused.targets += [(paths[slot], fit, array.parts) for slot, array in kept.items()]
    return fused


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


def _settings_of_kernels(stored: Settings, trained: TrainedModel, where: str) -> Settings:
    """What each table's kernels get. TorchRec may have joined tables in a kernel that were in several.

    What is counted takes its greatest value: a new table's kernel began to count later.
    """
    settings = {name: dict(group) for name, group in stored.items()}
    tables = [each for each in trained.fused_tables if each.parameter_name in settings]
    kernels = {id(kernel): kernel for each in tables for kernel in each.sharded.kernels}
    for kernel in kernels.values():
        joined = {
            each.name: settings[each.parameter_name]
            for each in tables
            if any(kernel is own for own in each.sharded.kernels)
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
