"""Whether a tensor was changed since it was last looked at. No values are read."""

from __future__ import annotations

import math

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cnr_store.training.distributed.dtensors import is_dtensor, local_of


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


Counter = VersionCounter | SpreadCounter


def counter_of(tensor: torch.Tensor) -> Counter:
    """What counts the changes of a tensor from now on."""
    return SpreadCounter(tensor) if is_dtensor(tensor) else VersionCounter(tensor)
