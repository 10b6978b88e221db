"""What is known of one table's changes in the present interval: flags, and counts of changes. No values are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from cnr_store.training.devices import support
from cnr_store.training.distributed.pieces import is_dtensor, local_of
from cnr_store.training.distributed.sharded import ShardedTable
from cnr_store.training.model.optimizer_state import row_slots
from cnr_store.training.model.tables import Table
from cnr_store.training.tracking import bitmap
from cnr_store.training.tracking.bitmap import Bitmap, full_bitmap

OUTSIDE = (
    "it was changed outside lookups and optimizer steps (call Checkpointer.touch after changing rows by hand)"
)
STATE_OUTSIDE = "what an optimizer keeps for its rows was changed outside steps"
_RESIZED = "its number of rows changed"
_OUT_OF_RANGE = "an id out of range was looked up"
_OTHER_PROCESSES = (
    "it, or what an optimizer keeps for its rows, is in memory shared with other processes, whose lookups and steps "
    "are not seen here"
)
_STEP_UNSEEN = (
    "gradients of it were computed, and no step was seen; give Checkpointer the optimizer that trains it"
)

Owner = Optimizer | ShardedTable | None
"""Has state for the rows of a table: an optimizer, or TorchRec's module. None is the table itself."""
_PACKED_BYTES = 1 << 22  # of a bitmap that a device makes together
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """A view of a strided tensor's bits as integers of its shape."""
    return values.detach().view(_INTEGERS[values.dtype.itemsize])


def _packed(flags: torch.Tensor) -> Bitmap:
    """A bitmap in host memory, from bytes of 0 and 1 on a device."""
    bits = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8, device=flags.device)
    parts = torch.split(flags.view(-1, 8), _PACKED_BYTES)
    return torch.cat([(each * bits).sum(1, dtype=torch.uint8).cpu() for each in parts]).numpy()


class RowBits:
    """One bit a row in host memory, set by compiled kernels, for tables on the CPU; one byte a row elsewhere.

    Those elsewhere are on the device of their table, and nothing waits for it but what asks for what it found.

    `host`: the bitmap; None for tables elsewhere.
    `there`: uint8, on the device: a byte a row, as many as make whole bytes of a bitmap, and one that ids out of range
    set. Of tables in host memory it is empty.
    """

    __slots__ = ("device", "host", "rows", "there")

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self.device = rows, device
        is_elsewhere = support.is_elsewhere(device)
        self.host = None if is_elsewhere else bitmap.empty_bitmap(rows)
        with torch.inference_mode(False):  # one that is made in it could not be marked outside
            size = -(-rows // 8) * 8 + 1 if is_elsewhere else 0
            self.there = torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def saw_outside(self) -> bool:
        """Whether a device found an id out of range since the bits were taken or cleared, for which it waits."""
        if self.host is not None:
            return False
        with support.failing_saves(self.device, "flags of rows"):
            return bool(self.there[-1].item())

    def mark(self, ids: torch.Tensor) -> bool:
        """Set the bits of integer `ids` of any shape.

        Returns: False if an id is out of range, on the host. On another device `saw_outside` tells later.
        """
        if self.host is not None:
            return bitmap.mark(self.host, self.rows, ids.cpu().numpy().reshape(-1)) < 0
        flat = ids.detach().to(self.device, non_blocking=True).reshape(-1).to(torch.int64)
        inside = (flat >= 0) & (flat < self.rows)
        self.there.index_fill_(0, torch.where(inside, flat, -(-self.rows // 8) * 8), 1)
        return True

    def mark_gradient(self, gradient: torch.Tensor) -> None:
        """Set the bits of the rows that `gradient`, ``(rows, dim)``, may change.

        A sparse gradient may change the rows it holds, a dense one those with a value that is not +0.
        """
        if gradient.is_sparse:
            indices = gradient._indices()
            self.mark(indices if indices.shape[0] == 1 else indices[0])
        elif not gradient.numel():  # a rank may hold no columns
            return
        elif self.host is not None:
            bitmap.mark_nonzero(self.host, as_integers(gradient.resolve_neg()).cpu().numpy())
        else:
            self.there[: self.rows] |= as_integers(gradient.to(self.device).resolve_neg()).any(dim=1)

    def read(self) -> Bitmap:
        """The bits in host memory, which later marks may write to."""
        if self.host is not None:
            return self.host
        with support.failing_saves(self.device, "flags of rows"):
            return _packed(self.there[:-1])

    def clear(self) -> None:
        """Set none any more."""
        if self.host is not None:
            self.host.fill(0)
        else:
            self.there.zero_()


class VersionCounter:
    """The memory of a tensor's values, and how often they had been changed in place, at one moment.

    torch raises a tensor's version counter at every change in place, but not when the tensor is given other memory
    (``tensor.data = other``). Freed memory soon comes back at the same address, so the storage itself is compared: a
    weak reference keeps its identity from being used again.

    Of a DTensor these are its own and those of the memory that this process holds of it.

    `pointer`, `strides`: of the memory.
    `storage`: its identity; None if torch counts no changes of the tensor.
    `version`: how often the tensor had been changed.
    `local`: of what this process holds of a DTensor.
    """

    __slots__ = ("_reference", "local", "pointer", "storage", "strides", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch types a part of itself
        # torch counts no changes of a tensor that was made in inference mode: it never has this storage.
        self.storage = None if tensor.is_inference() else storage._cdata
        self.pointer = tensor.data_ptr()
        self.strides = tensor.stride()
        self.version = 0 if tensor.is_inference() else tensor._version
        self.local = VersionCounter(local_of(tensor)) if is_dtensor(tensor) else None

    def count_changes(self, tensor: torch.Tensor) -> float:
        """How often `tensor` was changed in place since.

        Infinity if that can't be counted: it has other memory now, or was made in inference mode.
        """
        # Called at each step for each table, so it makes as few calls as it can.
        if (
            tensor.untyped_storage()._cdata != self.storage
            or tensor.data_ptr() != self.pointer
            or tensor.stride() != self.strides
        ):
            return math.inf
        changes = tensor._version - self.version
        return changes if self.local is None else changes + self.local.count_changes(local_of(tensor))

    def catch_up(self, tensor: torch.Tensor) -> bool:
        """Count from now on. False, and nothing is done, if the changes of `tensor` can't be counted."""
        if self.count_changes(tensor) == math.inf:
            return False
        self.version = tensor._version
        return self.local is None or self.local.catch_up(local_of(tensor))


Counters = Mapping[str, VersionCounter]


class TableTracker:
    """The rows flagged of one table, and how many changes of it and of its slots the flags explain.

    A change is *acknowledged* once its rows are flagged, or the table is whole. Its slots are the state that optimizers
    keep for its rows.

    `table`: the table that is tracked.
    `optimizers`: those whose state is saved with the table.

    `bits`: rows flagged in this interval.
    `counters`: by id of the owner: of its tensors, by key.
    `carried_over`: rows that a failed save gave back; None if there are none.
    `had_gradient`: whether the parameter had a gradient before the last step of a trusted class.
    `has_optimizer`: whether one of `optimizers` updates the table.
    `whole`: why the rows that changed in this interval are not known; None if they are.

    `renewal`: another object each time that a tracker gets another bitmap, or other counters.
    """

    renewal = object()

    def __init__(self, table: Table, optimizers: Sequence[Optimizer] = ()) -> None:
        self.table = table
        self.has_optimizer = False
        self.bits = RowBits(table.local_rows, table.parameter.device)
        self._owners: list[Owner] = [*optimizers]
        if table.sharded is not None:
            self._owners.append(table.sharded)
        self.counters: dict[int, Counters] = {}
        self._new_gradient = self.had_gradient = False
        self._watched: torch.Tensor | None = None
        self.begin_interval()

    def flagged(self, whole: bool) -> Bitmap:
        """All rows, or those flagged in this interval or given back in it; in memory of its own."""
        if whole:
            return full_bitmap(self.table.local_rows)
        bits = self.bits.read()
        return bits.copy() if self.carried_over is None else bits | self.carried_over

    def begin_interval(self, is_settled: bool = False) -> None:
        """Begin a new interval. The table may have got another size or device since, unless it `is_settled`.

        A table that is settled has its size, its device and its counters, and no change to acknowledge.
        """
        rows, device = self.table.local_rows, self.table.parameter.device
        if is_settled or (self.bits.rows, self.bits.device) == (rows, device):
            self.bits.clear()
        else:
            TableTracker.renewal = object()
            self.bits = RowBits(rows, device)
        self.carried_over: Bitmap | None = None
        self.whole: str | None = None
        self._stepped_by_given, self._stepped_by_other = False, ""
        # What had a gradient before the save may be stepped after it.
        self._old_gradient, self._new_gradient = self._new_gradient, False
        if not is_settled:
            self.acknowledge_all()

    @property
    def whole_reason(self) -> str | None:
        """Why the rows that changed are not known if the interval ends now; None if they are flagged."""
        table = self.table
        return (
            self.whole
            or self._shared
            or (
                table.parameter.is_inference()
                and "it was made in inference mode, where torch counts no changes"
            )
            or (self.is_in_shared_memory and _OTHER_PROCESSES)
            or self._unknown_steps
            or (table.is_fused and table.sharded is not None and table.sharded.moves_untouched_rows())
            or (self.resized and _RESIZED)
            or (self.bits.saw_outside and _OUT_OF_RANGE)
            or (self.changes() > 0 and OUTSIDE)
            or (any(map(self.changes, self._owners)) and STATE_OUTSIDE)
            or None
        )

    @property
    def is_declared_whole(self) -> bool:
        """Whether `whole_reason` has one that neither its memory nor its counters tell."""
        return (self.whole or self._shared or self._unknown_steps) is not None

    @property
    def _shared(self) -> str | None:
        """Why steps are not all that changes the table."""
        if self.table.shared_with:
            return f"its memory is shared with {', '.join(self.table.shared_with)}"
        if any(module.max_norm is not None for module in self.table.modules):
            return "its module has max_norm, so lookups change rows"
        return None

    @property
    def is_in_shared_memory(self) -> bool:
        """Whether other processes may hold the memory. It can't be told for devices, where torch says so of all."""
        return any(
            tensor.device.type == "cpu" and local_of(tensor).untyped_storage().is_shared()
            for owner in (None, *self._owners)
            for tensor in self._kept(owner).values()
        )

    @property
    def _unknown_steps(self) -> str | None:
        """Why it is not known what trains the table, or not the optimizer whose state is saved beside the rows."""
        if not self.has_optimizer and not self.table.is_fused:
            # Gradients of the parts that ranks hold come past the hook.
            parameter = self.table.parameter
            is_trained = is_dtensor(parameter) and self.table.sharded is None and parameter.requires_grad
            return _STEP_UNSEEN if is_trained or self._new_gradient or self._old_gradient else None
        if self._stepped_by_given or not self._stepped_by_other:
            return None
        return (
            f"a step of another {self._stepped_by_other} than the optimizer given updated it, so the optimizer state "
            "that is saved may be out of use; make a new checkpointer with all optimizers that train"
        )

    @property
    def resized(self) -> bool:
        """Whether the table has another number of rows than flags."""
        return self.bits.rows != self.table.local_rows

    def _kept(self, owner: Owner) -> Mapping[str, torch.Tensor]:
        """The tensors whose changes are counted for an owner, by key. None are if its state is not saved."""
        if isinstance(
            owner, ShardedTable
        ):  # FBGEMM changes them without counting: what torch counts is someone else's
            pieces = ((slot, piece) for slot, kept in owner.slots.items() for piece in kept.pieces)
            return {f"{slot} {number}": piece.tensor for number, (slot, piece) in enumerate(pieces)}
        if owner is None:
            return {"": self.table.parameter}
        return row_slots(owner, self.table.parameter) if any(owner is each for each in self._owners) else {}

    def changes(self, owner: Owner = None, written: Collection[str] | None = None) -> float:
        """The most changes of one of an owner's tensors that are not acknowledged; see `VersionCounter.count_changes`.

        Infinity if one was replaced or is gone, or one not among `written` was changed, if these are given. New ones
        don't count: what was never saved is saved whole.
        """
        most: float = 0
        counters = self.counters.get(id(owner), {})
        now = self._kept(owner) if counters else {}
        for key, counter in counters.items():
            changes = counter.count_changes(now[key]) if key in now else math.inf
            if changes and written is not None and key not in written:
                return math.inf
            most = max(most, changes)
        return most

    def acknowledge(self, owner: Owner = None) -> None:
        """Take every change so far of an owner's tensors as flagged."""
        kept, counters = self._kept(owner), self.counters.get(id(owner), {})
        if counters.keys() != kept.keys() or not all(
            counter.catch_up(kept[key]) for key, counter in counters.items()
        ):
            self.count_from(owner, kept)

    def acknowledge_all(self) -> None:
        """Take every change of the parameter and of all slots so far as flagged."""
        for owner in (None, *self._owners):
            self.acknowledge(owner)

    def explain_changes(self, find: Callable[[], torch.Tensor | None]) -> None:
        """Flag the rows that `find` says were changed, if it can, where the reason to be whole is that nothing does."""
        stays = self.changes() == math.inf or self.whole_reason != OUTSIDE
        if not stays and (rows := find()) is not None:
            self.mark(rows)
            self.whole = None
            self.acknowledge()

    def settled_counters(self, optimizer: Optimizer) -> tuple[Counters, Counters] | None:
        """The counters of the parameter and of the slots of `optimizer`.

        None if one has no single memory, `acknowledge_all` would count other tensors, or it keeps further ones, which
        may come to follow the rows.
        """
        found = self.counters[id(None)], self.counters.get(id(optimizer), {})
        is_settled = all(
            self.counters.get(id(owner), {}).keys() == self._kept(owner).keys()
            and (owner is optimizer or not self.counters.get(id(owner)))
            for owner in self._owners
        )
        are_plain = all(one.local is None and one.storage is not None for of in found for one in of.values())
        kept = optimizer.state.get(self.table.parameter, {}).items()
        are_all = all(key in (*found[1], "step") or not isinstance(one, torch.Tensor) for key, one in kept)
        return found if is_settled and are_plain and are_all else None

    @property
    def replaced(self) -> bool:
        """Whether the parameter or a slot has other memory than when its changes were last acknowledged."""
        return math.inf in map(self.changes, (None, *self._owners))

    def count_from(self, owner: Owner, kept: Mapping[str, torch.Tensor]) -> None:
        """Count changes of an owner's tensors from now on, by key: those that it has, or is about to get."""
        TableTracker.renewal = object()  # first: an interrupt leaves no pass over counters that nobody asks
        self.counters[id(owner)] = {key: VersionCounter(tensor) for key, tensor in kept.items()}

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

    def watch_gradients(self) -> RemovableHandle | None:
        """Note from now on that gradients were computed, as a step may come that is not seen; None if that is so."""
        parameter = self.table.parameter
        if self._watched is parameter or not parameter.requires_grad:
            return None
        self._watched = parameter
        register: Any = parameter.register_post_accumulate_grad_hook
        handle: RemovableHandle = register(self._note_gradient)
        return handle

    def _note_gradient(self, _parameter: torch.Tensor) -> None:
        self._new_gradient = True

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that a step of `optimizer` updated the table."""
        self._new_gradient = self._old_gradient = False
        given = (each for each in self._owners if isinstance(each, Optimizer))
        if any(optimizer is each or optimizer.state is each.state for each in given):
            self._stepped_by_given = True
        else:
            self._stepped_by_other = type(optimizer).__name__

    def make_whole(self, reason: str) -> None:
        """Declare that the rows that changed in this interval are not known; the first reason stays."""
        if self.whole is None:
            self.whole = reason

    def give_back(self, flagged: Bitmap) -> None:
        """Flag the rows of a packed bitmap that `Tracker.swap` returned."""
        rows = self.table.local_rows
        if self.resized or flagged.size != (rows + 7) // 8:
            self.make_whole("its number of rows changed since a save that failed")
            return
        # Sizes that differ by less than a byte look alike; no bit past the last row may be set.
        flagged = flagged & full_bitmap(rows)
        self.carried_over = flagged if self.carried_over is None else self.carried_over | flagged
