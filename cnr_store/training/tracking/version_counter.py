"""Whether a tensor, or what an optimizer keeps for the rows of a table, was changed since it was last looked at.

No values are read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cnr_store.training.distributed.dtensors import is_dtensor, local_of
from cnr_store.training.model.optimizer_state import follows_rows


class VersionCounter:
    """The memory of a tensor's values, and how often they had been changed in place, at one moment.

    torch raises a tensor's version counter at every change in place, but not when the tensor is given other memory
    (``tensor.data = other``). Freed memory soon comes back at the same address, so the storage itself is compared: a
    weak reference keeps its identity from being used again.

    `pointer`, `strides`: of the memory.
    `storage`: its identity; None if torch counts no changes of the tensor.
    `version`: how often the tensor had been changed.
    """

    __slots__ = ("_reference", "pointer", "storage", "strides", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        # torch counts no changes of a tensor that was made in inference mode: it never has this storage.
        self.storage = None if tensor.is_inference() else storage._cdata
        self.pointer = tensor.data_ptr()
        self.strides = tensor.stride()
        self.version = 0 if tensor.is_inference() else tensor._version

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
        return tensor._version - self.version

    def catch_up(self, tensor: torch.Tensor) -> bool:
        """Count from now on. False, and nothing is done, if the changes of `tensor` can't be counted."""
        if self.count_changes(tensor) == math.inf:
            return False
        self.version = tensor._version
        return True


class SpreadCounter:
    """The same for a DTensor: changes of it, and of the memory that this process holds of it."""

    __slots__ = ("_local", "_whole")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._whole, self._local = VersionCounter(tensor), VersionCounter(local_of(tensor))

    def count_changes(self, tensor: torch.Tensor) -> float:
        """See `VersionCounter.count_changes`."""
        return self._whole.count_changes(tensor) + self._local.count_changes(local_of(tensor))

    def catch_up(self, tensor: torch.Tensor) -> bool:
        """See `VersionCounter.catch_up`."""
        return self._whole.catch_up(tensor) and self._local.catch_up(local_of(tensor))


def counter_of(tensor: torch.Tensor) -> VersionCounter | SpreadCounter:
    """What counts the changes of a tensor from now on."""
    return SpreadCounter(tensor) if is_dtensor(tensor) else VersionCounter(tensor)


class SlotCounters:
    """The version counters of what one optimizer keeps for the rows of a table: of `slots`, by key."""

    __slots__ = ("_counters",)

    def __init__(self, slots: Mapping[str, torch.Tensor]) -> None:
        self._counters = {slot: counter_of(tensor) for slot, tensor in slots.items()}

    def count_changes(self, state: Mapping[str, object], written: Collection[str] | None = None) -> float:
        """The most changes of one slot in `state`, the optimizer's for this parameter.

        Infinity for a change of a slot that is not among `written`, if these are given.
        """
        most: float = 0
        for slot, counter in self._counters.items():
            tensor = state.get(slot)
            changes = counter.count_changes(tensor) if isinstance(tensor, torch.Tensor) else math.inf
            if changes and written is not None and slot not in written:
                return math.inf
            if changes > most:  # `max` takes longer, and every step asks
                most = changes
        return most

    def catch_up(self, state: Mapping[str, object], parameter: torch.Tensor) -> bool:
        """Count from now on; False if slots were replaced, or others added."""
        if not self.knows(state, parameter):
            return False
        for slot, counter in self._counters.items():
            tensor = state.get(slot)
            if not isinstance(tensor, torch.Tensor) or not counter.catch_up(tensor):
                return False
        return True

    def knows(self, state: Mapping[str, object], parameter: torch.Tensor) -> bool:
        """Whether every slot in `state` has a counter."""
        # A slot may take the place of another entry, so their number tells nothing.
        return not any(
            key not in self._counters and follows_rows(key, value, parameter) for key, value in state.items()
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no slot to count changes of."""
        return not self._counters

    def plain(self, state: Mapping[str, object]) -> dict[str, VersionCounter] | None:
        """Each slot's counter; None if one is of no single memory, or no longer in `state`."""
        counters = {
            slot: counter
            for slot, counter in self._counters.items()
            if isinstance(counter, VersionCounter) and counter.storage is not None and slot in state
        }
        return counters if len(counters) == len(self._counters) else None


Counters = tuple[VersionCounter, Mapping[str, VersionCounter]]
"""Of a parameter, and by key of what an optimizer keeps for its rows."""
