"""The state that TorchRec's optimizers keep for rows: what a version holds of it, and how it fits this job's sharding.

A row-wise optimizer keeps one number for each row and column shard, so that state's shape depends on how the table is
sharded. For other column shards than those that were saved, each gets the mean of what was saved for its columns,
weighted by width: where shards are joined, their mean; where one is split, its number for each part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cnr_store.errors import ModelMismatchError
from cnr_store.format.layout import slot_path
from cnr_store.format.record import ArrayEntry
from cnr_store.training.loading.match import Match, TableFit
from cnr_store.training.loading.moved_tables import FUSED_SLOT, STEPPED_SLOT, MovedTables
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.optimizer_state import FUSED, Tree
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.trained_model import TrainedModel

Settings = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class FusedSlot:
    """State to read: for the columns of `array`, from what is stored."""

    array: RowArray
    fit: TableFit
    # (stored columns, columns): how the numbers stored make those of each column; None where they are the same
    weights: npt.NDArray[np.float64] | None
    path: str  # where it is stored


@dataclass
class FusedFit:
    """What TorchRec's optimizers are to get."""

    slots: list[FusedSlot] = field(default_factory=list)  # what is read by rows
    # By ``TABLE/SLOT``, the column shards saved and those of now, where they differ
    resharded: dict[str, tuple[int, int]] = field(default_factory=dict)
    blended: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)  # by path, the weights of those
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
    for table in moved.to_stepped.values():
        stored = arrays[slot_path(table.name, FUSED_SLOT)].boundaries
        if stored:
            path = slot_path(table.name, FUSED_SLOT)
            fused.blended[path] = _shares(stored, (0, table.dim))
            fused.resharded[f"{table.name}/{STEPPED_SLOT}"] = len(stored) - 1, 1
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
    for array in trained.row_arrays():
        fit = fits.get(array.table.name)
        if fit is None or array.is_weight or array.table not in trained.fused_tables:
            continue
        if array.table.parameter_name in moved.without_state:
            continue
        if array.table.name in moved.to_fused:
            entry = arrays[slot_path(array.table.name, STEPPED_SLOT)]
            if len(array.shape) == 1 or array.boundaries:  # a number a row, which is stored as a column
                entry = replace(entry, shape=entry.shape[:1])
            path = slot_path(array.table.name, STEPPED_SLOT)
            fused.slots.append(FusedSlot(array, fit, _weights(fused, array, entry), path))
            continue
        if array.slot not in tree["slots"].get(array.table.name, ()):
            match.lacks(
                [f"{array.table.name}/{array.slot}"],
                f"{match.where} holds no {array.slot!r} of table {array.table.name!r}: another optimizer trained it; "
                f"load without dmp.fused_optimizer, or {IGNORE} the rest",
            )
            continue
        entry = arrays[slot_path(array.table.name, array.slot)]
        fused.slots.append(FusedSlot(array, fit, _weights(fused, array, entry), array.path))
    fused.blended |= {slot.path: slot.weights for slot in fused.slots if slot.weights is not None}
    return fused


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


def _weights(fused: FusedFit, array: RowArray, entry: ArrayEntry) -> npt.NDArray[np.float64] | None:
    width = array.table.dim
    stored, now = entry.boundaries, _edges(array.boundaries, width)
    if (stored or (0, width)) == now and entry.shape[1:] == array.shape[1:]:
        return None
    name = f"{array.table.name}/{array.slot}"
    is_row_wise = bool(stored) or len(entry.shape) == 1
    if not is_row_wise or (array.shape[1:] and not array.boundaries) or entry.element != array.element:
        raise ModelMismatchError(
            f"{name} is {array.shape} {array.element} in the model and stored as {entry.shape} {entry.element}: "
            "another optimizer trained it, or kept it in a type that can't be split among columns; load without "
            "dmp.fused_optimizer"
        )
    stored = stored or (0, width)
    fused.resharded[name] = len(stored) - 1, len(now) - 1
    return _shares(stored, now)


def _shares(stored: Sequence[int], now: Sequence[int]) -> npt.NDArray[np.float64]:
    """(stored columns, columns): how much of each column's width lies in each stored one."""
    overlap = np.minimum.outer(stored[1:], now[1:]) - np.maximum.outer(stored[:-1], now[:-1])
    shares = np.maximum(overlap, 0).astype(np.float64)
    return np.asarray(shares / shares.sum(axis=0))


def _edges(boundaries: Sequence[int], width: int) -> tuple[int, ...]:
    return (*boundaries, width) if boundaries else (0, width)
