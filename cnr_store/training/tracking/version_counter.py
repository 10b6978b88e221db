"""Whether a tensor was changed since it was last looked at, without reading its values."""

from __future__ import annotations

import math

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class VersionCounter:
    """Where the values of a tensor are, and how often they were changed in place, at one moment.

    Torch raises a tensor's version counter at every change in place. It does not when the tensor is given other
    memory (``tensor.data = other``), and freed memory soon comes back at the same address: so the storage itself
    is told apart, by a weak reference that keeps its identity from being used again.
    """

    __slots__ = ("_memory", "_pointer", "_reference", "_strides", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._memory = storage._cdata
        self._pointer = tensor.data_ptr()
        self._strides = tensor.stride()
        self._version = None if tensor.is_inference() else tensor._version

    def changes_in(self, tensor: torch.Tensor) -> float:
        """How often `tensor` was changed in place since.

        Infinity if it has other memory now, or was made in inference mode, where torch counts no changes.
        """
        # Asked at each step for each table, so nothing here is a call that need not be one.
        if (
            self._version is None
            or tensor.untyped_storage()._cdata != self._memory
            or tensor.data_ptr() != self._pointer
            or tensor.stride() != self._strides
        ):
            return math.inf
        return tensor._version - self._version

    def followed(self, tensor: torch.Tensor) -> bool:
        """Bring this up to date with `tensor`; False, and nothing changes, if it has other memory."""
        changes = self.changes_in(tensor)
        if self._version is None or changes == math.inf:
            return False
        self._version += int(changes)
        return True
