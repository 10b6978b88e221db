"""Whether a module, and state beside it, have changed since they were saved."""

from __future__ import annotations

from typing import Any

import google_crc32c
import torch
from torch import nn

from cnr_store.format.state import encode_state
from cnr_store.format.state_arrays import ArrayLeaf
from cnr_store.training.model.object_state import tensor_leaf
from cnr_store.training.model.tables import table_weights
from cnr_store.training.model.tensors import dense_numpy
from cnr_store.training.tracking.version_counter import VersionCounter


class SavedMoment:
    """A module and state beside it as they were saved.

    Values of dense tensors are compared by checksums. Of tables, only changes that torch counts are seen.

    `module`, `beside`: the module, and the state: what `encode_state` takes.
    """

    def __init__(self, module: nn.Module, beside: Any) -> None:
        tensors = _tensors(module)
        self._tensors = tensors  # kept, so that no other one gets the id of one of them
        self._counters = [VersionCounter(tensor) for tensor in tensors]
        self._sums, self._beside = _sums_of_dense(module), _encoded(beside)

    def is_still(self, module: nn.Module, beside: Any) -> bool:
        """Whether nothing has changed since."""
        return self.is_still_trained(module) and self._beside == _encoded(beside)

    def is_still_trained(self, module: nn.Module) -> bool:
        """Whether no weight or buffer has changed since."""
        tensors = _tensors(module)
        return (
            list(map(id, tensors)) == list(map(id, self._tensors))
            and not any(map(VersionCounter.count_changes, self._counters, tensors))
            and self._sums == _sums_of_dense(module)
        )


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _sums_of_dense(module: nn.Module) -> list[int]:
    tables = {id(weight) for _, _, _, weight in table_weights(module)}
    dense = [tensor for tensor in _tensors(module) if id(tensor) not in tables]
    return [google_crc32c.value(dense_numpy(tensor)[0].tobytes()) for tensor in dense]


def _encoded(beside: Any) -> Any:
    return encode_state(beside, beside=_sum_of, as_leaf=tensor_leaf)


def _sum_of(path: str, leaf: ArrayLeaf) -> str:
    return f"{google_crc32c.value(leaf.values.tobytes()):08x}"
