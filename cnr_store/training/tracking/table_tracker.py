"""What is known of one table's changes in the present interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from cnr_store.training.distributed.dtensors import local_of
from cnr_store.training.model.optimizer_state import row_slots
from cnr_store.training.model.tables import DTensorTable, SpreadTable, Table
from cnr_store.training.tracking.bitmap import Bitmap, empty_bitmap, full_bitmap
from cnr_store.training.tracking.device_bitmap import RowBits
from cnr_store.training.tracking.version_counter import (
    Counters,
    SlotCounters,
    VersionCounter,
    counter_of,
)

OUTSIDE = (
    "it was changed outside lookups and optimizer steps (call Checkpointer.touch after changing rows by hand)"
)
LOADED = "a state dict was loaded into it"
STATE_OUTSIDE = "what an optimizer keeps for its rows was changed outside steps"
_OUT_OF_RANGE = "an id out of range was looked up"
_RESIZED = "its number of rows changed"
_OTHER_PROCESSES = (
    "it, or what an optimizer keeps for its rows, is in memory shared with other processes, whose lookups and steps "
    "are not seen here"
)


Place = tuple[nn.Parameter, int, int, Bitmap]
"""A parameter, the address and rows of its bitmap for `mark_at`, and the bitmap, so that its memory is kept."""


class TableTracker:
    """The rows flagged of one table, and how many changes of it and of its slots the flags explain.

    A change is *acknowledged* once its rows are flagged, or the table is whole. Its slots are the state that optimizers
    keep for its rows.

    `table`: the table that is tracked.
    `optimizers`: those whose state is saved with the table.

    `bits`: rows flagged in this interval.
    `carried_over`: rows flagged before this interval: looked up in the last one, or given back by a failed save.
    `place`: what `find_place` found in this interval; None if it is to be called.
    `had_gradient`: whether the parameter had a gradient before the last step.
    `has_optimizer`: whether one of `optimizers` updates the table.
    `whole`: why the rows that changed in this interval are not known; None if they are.
    """

    # Read at each lookup, for each table: without a dictionary there is less memory to wait for.
    __slots__ = (
        "_carries",
        "_counter",
        "_optimizers",
        "_slot_counters",
        "_stepped_by_given",
        "_stepped_by_other",
        "bits",
        "carried_over",
        "had_gradient",
        "has_optimizer",
        "place",
        "table",
        "whole",
    )

    def __init__(self, table: Table, optimizers: Sequence[Optimizer] = ()) -> None:
        self.table = table
        self._optimizers = list(optimizers)
        self.has_optimizer = self.had_gradient = False
        self.place: Place | None = None
        self.bits = RowBits(table.local_rows, table.parameter.device)
        self._counter = counter_of(table.parameter)
        self._slot_counters = {
            id(each): SlotCounters(row_slots(each, table.parameter)) for each in optimizers
        }
        self.begin_interval()

    def flagged(self, whole: bool) -> Bitmap:
        """All rows, or those flagged in this interval or carried over into it; in memory of its own."""
        if whole:
            return full_bitmap(self.table.local_rows)
        return self.bits.read() | self.carried_over if self._carries else self.bits.read().copy()

    def begin_interval(self, carry_over: bool = False) -> None:
        """Begin a new interval; with `carry_over`, the rows flagged in the last one are flagged in this one too.

        The table may have got another size or device since.
        """
        rows, device = self.table.local_rows, self.table.parameter.device
        self.place = None  # before its memory is taken
        flagged = full_bitmap(rows) if self.resized else self.bits.take()
        # Before the bits: were this interrupted, the table would still count as resized.
        self._carries = True
        self.carried_over = flagged if carry_over else empty_bitmap(rows)
        if (self.bits.rows, self.bits.device) != (rows, device):
            self.bits = RowBits(rows, device)
        self.place = None  # again: a lookup on another thread may have found it meanwhile
        self._begin()
        self.acknowledge_all()

    def find_place(self) -> Place | None:
        """Where lookups by int64 ids in host memory flag rows; None if the table is no plain one there."""
        host = self.bits.host
        if host is None or isinstance(self.table, DTensorTable):
            return None
        found = self.place = self.table.parameter, host[1], self.bits.rows, host[0]
        if self.bits.host is not host:  # taken meanwhile, on another thread
            self.place = None
        return found

    def begin_next(self) -> None:
        """`begin_interval` of a table that has its size, its device and its counters, and no change to acknowledge."""
        self.bits.clear()
        if self._carries:
            self.carried_over, self._carries = np.zeros_like(self.carried_over), False
        self._begin()

    def _begin(self) -> None:
        self.whole: str | None = None
        self._stepped_by_given, self._stepped_by_other = False, ""

    @property
    def updates_unseen(self) -> bool:
        """Whether rows looked up in one interval may change in the next one without another sign."""
        is_fused = isinstance(self.table, SpreadTable) and self.table.is_fused
        return not self.has_optimizer and not is_fused

    @property
    def whole_reason(self) -> str | None:
        """Why the table is saved whole if the interval ends now; None if the rows that changed are flagged."""
        table = self.table
        return (
            self.whole
            or (table.shared_with and f"its memory is shared with {', '.join(table.shared_with)}")
            or (
                table.parameter.is_inference()
                and "it was made in inference mode, where torch counts no changes"
            )
            or (self.is_in_shared_memory and _OTHER_PROCESSES)
            or self._replaced_optimizer
            or self._moved_by_fused
            or (self.resized and _RESIZED)
            or (self.bits.saw_outside and _OUT_OF_RANGE)
            or (self.changes > 0 and OUTSIDE)
            or (self._most_slot_changes > 0 and STATE_OUTSIDE)
            or None
        )

    @property
    def is_declared_whole(self) -> bool:
        """Whether `whole_reason` has one that neither its memory nor its counters tell."""
        return self.whole is not None or bool(self.table.shared_with) or self._replaced_optimizer is not None

    @property
    def is_in_shared_memory(self) -> bool:
        """Whether other processes may hold the memory. It can't be told for devices, where torch says so of all."""
        parameter = self.table.parameter
        slots = (slot for each in self._optimizers for slot in row_slots(each, parameter).values())
        return any(
            tensor.device.type == "cpu" and local_of(tensor).untyped_storage().is_shared()
            for tensor in (parameter, *slots)
        )

    @property
    def _replaced_optimizer(self) -> str | None:
        """Why the state that is saved beside the rows is not that of the optimizer in use."""
        if not self.has_optimizer or self._stepped_by_given or not self._stepped_by_other:
            return None
        return (
            f"a step of another {self._stepped_by_other} than the optimizer given updated it, so the optimizer state "
            "that is saved may be out of use; make a new checkpointer with all optimizers that train"
        )

    @property
    def _moved_by_fused(self) -> str | None:
        if isinstance(self.table, SpreadTable) and self.table.is_fused:
            return self.table.sharded.moves_untouched_rows()
        return None

    @property
    def resized(self) -> bool:
        """Whether the table has another number of rows than flags."""
        return self.bits.rows != self.table.local_rows

    @property
    def changes(self) -> float:
        """Changes of the parameter that are not acknowledged; see `VersionCounter.count_changes`."""
        return self._counter.count_changes(self.table.parameter)

    def acknowledge(self) -> None:
        """Take every change of the parameter so far as flagged."""
        if not self._counter.catch_up(self.table.parameter):
            self._counter = counter_of(self.table.parameter)

    def explain_changes(self, find: Callable[[], torch.Tensor | None]) -> None:
        """Flag the rows that `find` says were changed, if it can, where the reason to be whole is that nothing does."""
        stays = self.changes == math.inf or self.whole_reason not in (OUTSIDE, LOADED)
        if not stays and (rows := find()) is not None:
            self.mark(rows)
            self.whole = None
            self.acknowledge()

    def slot_changes(self, optimizer: Optimizer, written: Collection[str] | None = None) -> float:
        """The most changes of one slot of `optimizer` that are not acknowledged.

        Infinity if a slot was replaced or is gone, or one not among `written` was changed, if these are given. New
        slots don't count: what was never saved is saved whole. 0 if the state of `optimizer` is not saved.
        """
        counters = self._slot_counters.get(id(optimizer))
        return (
            0
            if counters is None
            else counters.count_changes(optimizer.state.get(self.table.parameter, {}), written)
        )

    def plain_counters(self, optimizer: Optimizer) -> Counters | None:
        """The counters of the parameter and of the slots of `optimizer`; None if one is not a `VersionCounter`."""
        slots = self._slot_counters.get(id(optimizer))
        counters = {} if slots is None else slots.plain(optimizer.state.get(self.table.parameter, {}))
        of_parameter = self._counter
        if counters is None or not isinstance(of_parameter, VersionCounter) or of_parameter.storage is None:
            return None
        return of_parameter, counters

    def counters(self, optimizer: Optimizer) -> tuple[object, object]:
        """What counts the changes of the parameter and of the slots of `optimizer`: other objects, if replaced."""
        return self._counter, self._slot_counters.get(id(optimizer))

    def has_settled_counters(self, optimizer: Optimizer) -> bool:
        """Whether `acknowledge_all` would count no other tensors than those of `plain_counters`."""
        parameter, key = self.table.parameter, id(optimizer)
        return all(
            counters.knows(each.state.get(parameter, {}), parameter)
            and (id(each) == key or counters.is_empty)
            for each in self._optimizers
            for counters in (self._slot_counters[id(each)],)
        )

    @property
    def _most_slot_changes(self) -> float:
        return max(map(self.slot_changes, self._optimizers), default=0)

    def acknowledge_slots(self, optimizer: Optimizer) -> None:
        """Take every change of the slots of `optimizer` so far as flagged."""
        counters, parameter = self._slot_counters.get(id(optimizer)), self.table.parameter
        if counters is not None and not counters.catch_up(optimizer.state.get(parameter, {}), parameter):
            self._slot_counters[id(optimizer)] = SlotCounters(row_slots(optimizer, parameter))

    @property
    def replaced(self) -> bool:
        """Whether the parameter or a slot has other memory than when its changes were last acknowledged."""
        return math.isinf(max(self.changes, self._most_slot_changes))

    def acknowledge_all(self) -> None:
        """Take every change of the parameter and of all slots so far as flagged."""
        self.acknowledge()
        for optimizer in self._optimizers:
            self.acknowledge_slots(optimizer)

    def expect_slots(self, optimizer: Optimizer, slots: Mapping[str, torch.Tensor]) -> None:
        """Count changes from `slots` on, by key, which `optimizer` is about to get in place of its own."""
        self._slot_counters[id(optimizer)] = SlotCounters(slots)

    def mark(self, ids: torch.Tensor) -> None:
        """Flag the rows `ids`, integers of any shape that count from the first row held, in the table as it is now."""
        bits = self.bits
        if bits.rows != self.table.local_rows:
            self.make_whole(_RESIZED)
        elif not bits.mark(ids):
            self.make_whole(_OUT_OF_RANGE)

    def mark_gradient(self, gradient: torch.Tensor) -> None:
        """Flag the rows that `gradient`, of the parameter's shape, may change."""
        self.bits.mark_gradient(local_of(gradient))

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that a step of `optimizer` updated the table."""
        if any(optimizer is each or optimizer.state is each.state for each in self._optimizers):
            self._stepped_by_given = True
        else:
            self._stepped_by_other = type(optimizer).__name__

    def make_whole(self, reason: str) -> None:
        """Declare that the rows that changed in this interval are not known; the first reason stays."""
        if self.whole is None:
            self.whole = reason

    def give_back(self, flagged: Bitmap) -> None:
        """Flag the rows of a packed bitmap that `Tracker.swap` returned."""
        if flagged.shape == self.carried_over.shape and not self.resized:
            self._carries = True
            # Sizes that differ by less than a byte look alike; no bit past the last row may be set.
            self.carried_over = (self.carried_over | flagged) & full_bitmap(self.table.local_rows)
        else:
            self.make_whole("its number of rows changed since a save that failed")
