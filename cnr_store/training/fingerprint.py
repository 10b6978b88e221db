"""Whether a tensor was changed since it was last looked at, without reading its values."""

from __future__ import annotations

import math

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Fingerprint:
    """Where the values of a tensor are, and how often they were changed in place, at one moment.

    Torch raises a tensor's version counter at every change in place. It does not when the tensor is given other
    memory (``tensor.data = other``), and freed memory soon comes back at the same address: so the storage itself
    is told apart, by a weak reference that keeps its identity from being used again.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._memory = _memory(tensor, storage)
        self._version = None if tensor.is_inference() else tensor._version

    def changes_in(self, tensor: torch.Tensor) -> float:
        """How often `tensor` was changed in place since.

        Infinity if it has other memory now, or was made in inference mode, where torch counts no changes.
        """
        if self._version is None or _memory(tensor, tensor.untyped_storage()) != self._memory:
            return math.inf
        return tensor._version - self._version

    def renewed(self, tensor: torch.Tensor) -> Fingerprint:
        """A fingerprint of `tensor` as it is now: this one, brought up to date, where the memory is the same."""
        if self._version is None or _memory(tensor, tensor.untyped_storage()) != self._memory:
            return Fingerprint(tensor)
        self._version = tensor._version
        return self


def _memory(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int, tuple[int, ...]]:
    return storage._cdata, tensor.data_ptr(), tensor.stride()
