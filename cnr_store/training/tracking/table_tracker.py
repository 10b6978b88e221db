"""What is known of one table's changes in the present interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from cnr_store.training.model.optimizer_state import row_slots
from cnr_store.training.model.tables import Table
from cnr_store.training.tracking import bitmap
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.training.tracking.device_bitmap import RowBits
from cnr_store.training.tracking.version_counter import VersionCounter

OUTSIDE = "it was changed outside lookups and optimizer steps (tell of changes made by hand with Checkpointer.touch)"
STATE_OUTSIDE = "what an optimizer keeps for its rows was changed outside steps"


class TableTracker:
    """Flags of one table, and how far its changes, and those of what optimizers keep beside it, are accounted for.

    Parameters
    ----------
    table
        What is watched.
    optimizers
        Those whose state is saved with the table.

    Attributes
    ----------
    bits
        Rows flagged in this interval.
    carried
        Rows flagged although not in this interval: looked up in the last one, or given back by a failed save.
    owned
        Whether an optimizer whose state is saved with the table updates it.
    whole
        Why the rows that changed in this interval are not known; None if they are.
    """

    # Read at each lookup, for each table: without a dictionary there is less memory to wait for.
    __slots__ = (
        "_marked",
        "_optimizers",
        "_seen",
        "_seen_slots",
        "_stepped",
        "bits",
        "carried",
        "owned",
        "table",
        "whole",
    )

    def __init__(self, table: Table, optimizers: Sequence[Optimizer] = ()) -> None:
        self.table = table
        self._optimizers = {id(optimizer): optimizer for optimizer in optimizers}
        self._seen_slots: dict[int, _Slots] = {}
        self.owned = self._stepped = False
        self.bits = RowBits(table.rows, table.parameter.device)
        self._seen = VersionCounter(table.parameter)
        self.begin()

    def flagged(self, whole: bool) -> Bitmap:
        """All rows, or those flagged in this interval or carried into it; in memory of its own."""
        return bitmap.full_bitmap(self.table.rows) if whole else self.bits.read() | self.carried

    def begin(self, carry: bool = False) -> None:
        """Begin a new interval; with `carry`, the rows flagged in the last one are flagged in this one, too.

        The table may have got another size or device since.
        """
        rows, device = self.table.rows, self.table.parameter.device
        taken = self.bits.take()
        if self.resized:
            taken = bitmap.full_bitmap(rows)
        # Before the bits: were this interrupted, the table would still count as resized.
        self.carried = taken if carry else bitmap.empty_bitmap(rows)
        if (self.bits.rows, self.bits.device) != (rows, device):
            self.bits = RowBits(rows, device)
        self.whole: str | None = None
        self._marked = False
        self.account_all()

    @property
    def resized(self) -> bool:
        """Whether the table has another number of rows than flags."""
        return self.bits.rows != self.table.rows

    @property
    def changes(self) -> float:
        """How often the parameter changed in place since that was last accounted for; see `VersionCounter`."""
        return self._seen.changes_in(self.table.parameter)

    @property
    def changed_elsewhere(self) -> bool:
        """Whether the parameter changed by something that flags no rows."""
        if not self.changes:
            return False
        # With no optimizer given, who updates a table is unknown until a step is seen: its lookups are trusted if
        # there are any. With some, and of a table that takes no gradient, a change that no step made is another's:
        # an average's, say.
        trusted = not (self._optimizers or self._stepped) and self.table.parameter.requires_grad
        return not (trusted and (self._marked or self.carried.any()))

    def account(self) -> None:
        """Declare every change so far flagged."""
        if not self._seen.followed(self.table.parameter):
            self._seen = VersionCounter(self.table.parameter)

    def slot_changes(self, optimizer: Optimizer) -> float:
        """The most changes of one slot of `optimizer` in place since they were last accounted for.

        Infinity if one was replaced or is gone. Slots that were not there then don't count: what was never saved
        is saved whole. 0 if the optimizer is none of those that are saved.
        """
        seen = self._seen_slots.get(id(optimizer))
        if seen is None:
            return 0
        state = optimizer.state.get(self.table.parameter, {})
        most: float = 0
        for slot, fingerprint in seen.fingerprints.items():
            changes = _changes(fingerprint, state.get(slot))
            if changes > most:
                most = changes
        return most

    @property
    def slots_changed(self) -> bool:
        """Whether any optimizer's slots changed since they were last accounted for."""
        return any(self.slot_changes(optimizer) for optimizer in self._optimizers.values())

    def account_slots(self, optimizer: Optimizer) -> None:
        """Declare that every change so far of `optimizer`'s slots is in rows that are flagged."""
        seen = self._seen_slots.get(id(optimizer))
        if id(optimizer) not in self._optimizers or (seen is None and not optimizer.state):
            return
        state = optimizer.state.get(self.table.parameter, {})
        if seen is None or not seen.followed(state):
            slots = row_slots(optimizer, self.table.parameter)
            prints = {slot: VersionCounter(tensor) for slot, tensor in slots.items()}
            self._seen_slots[id(optimizer)] = _Slots(len(state), prints)

    @property
    def replaced(self) -> bool:
        """Whether the parameter or a slot has other memory than when its changes were last accounted for."""
        slots = (self.slot_changes(optimizer) for optimizer in self._optimizers.values())
        return math.isinf(max(self.changes, *slots, 0))

    def account_all(self) -> None:
        """Declare every change so far of the parameter and its slots flagged."""
        self.account()
        for optimizer in self._optimizers.values():
            self.account_slots(optimizer)

    def mark(self, ids: torch.Tensor) -> None:
        """Flag the rows `ids`, integers of any shape, in the table as it is now."""
        self._marked = True
        bits = self.bits
        if bits.rows != self.table.parameter.shape[0]:
            self.make_whole("its number of rows changed")
        elif not bits.mark(ids):
            self.make_whole("an id out of range was looked up")

    def mark_gradient(self, gradient: torch.Tensor) -> None:
        """Flag the rows that `gradient`, of the parameter's shape, may change."""
        self._marked = self._stepped = True
        self.bits.mark_gradient(gradient)

    def make_whole(self, reason: str) -> None:
        """Declare that the rows that changed in this interval are not known; the first reason stays."""
        if self.whole is None:
            self.whole = reason

    def give_back(self, flagged: Bitmap) -> None:
        """Flag the rows of a packed bitmap that `Tracker.swap` returned."""
        if flagged.shape == self.carried.shape and not self.resized:
            # Sizes that differ by less than a byte look alike; no bit past the last row may be set.
            self.carried = (self.carried | flagged) & bitmap.full_bitmap(self.table.rows)
        else:
            self.make_whole("its number of rows changed since a save that failed")


class _Slots:
    """What an optimizer keeps for a table's rows, by slot, and how many entries it keeps for the table in all."""

    __slots__ = ("_entries", "fingerprints")

    def __init__(self, entries: int, fingerprints: dict[str, VersionCounter]) -> None:
        self._entries, self.fingerprints = entries, fingerprints

    def followed(self, state: Mapping[str, object]) -> bool:
        """Bring the fingerprints up to date; False if these are not all slots, or other tensors now."""
        if len(state) != self._entries:
            return False
        for slot, fingerprint in self.fingerprints.items():
            value = state.get(slot)
            if not isinstance(value, torch.Tensor) or not fingerprint.followed(value):
                return False
        return True


def _changes(seen: VersionCounter, slot: object) -> float:
    return seen.changes_in(slot) if isinstance(slot, torch.Tensor) else math.inf
