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

    Of a DTensor these are its own and those of the memory that this process holds of it.

    `pointer`, `strides`: of the memory.
    `storage`: its identity; None if torch counts no changes of the tensor.
    `version`: how often the tensor had been changed.
    `local`: of what this process holds of a DTensor.
    """

    __slots__ = ("_reference", "local", "pointer", "storage", "strides", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
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
