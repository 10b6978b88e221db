"""Whether ranks that should hold the same hold it: a few values of tensors that only one of them will write.

Optimizer state is among them. Where each rank steps on its own and only the parameters are averaged, as by LocalSGD,
each has state of its own, and a version would mix that of several ranks. Others spread their state over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch

from cnr_store.errors import SaveError
from cnr_store.ranks.decisions import named
from cnr_store.ranks.group import Document
from cnr_store.training.devices.support import failing_saves
from cnr_store.training.distributed.dtensors import is_dtensor
from cnr_store.training.model.names import parameter_names
from cnr_store.training.model.tables import SpreadTable
from cnr_store.training.model.trained_model import TrainedModel

_EVERY = 16
"""Saves."""

_TENSORS, _VALUES = 256, 8
_TOLERANCE = 0.05
"""Replicas may drift by the order in which a device adds: by far less than tensors differ that are no replicas."""


def is_compared(number: int) -> bool:
    """Whether this save, from 0, compares. The second does, because optimizers may have no state at the first."""
    return number < 2 or number % _EVERY == 0


def sample_replicas(trained: TrainedModel) -> dict[str, dict[str, list[float]]]:
    """A few values of the parameters that each rank has whole, by name.

    Those of a parameter stand under "", and those of its optimizer state by their keys: none of what has another shape.
    """
    spread = {
        table.key
        for table in trained.tables
        if isinstance(table, SpreadTable) and not table.sharded.replicated
    }
    names = parameter_names(trained.model)
    found: dict[str, dict[str, list[float]]] = {}
    for parameter in trained.model.parameters():
        name = names.get(id(parameter))
        if name is None or name in spread or not _is_plain(parameter):
            continue
        states = [optimizer.state.get(parameter, {}) for optimizer in trained.optimizers]
        found[name] = {"": _values(parameter)} | {
            slot: _values(value) if _is_plain(value) and value.shape[:1] == parameter.shape[:1] else []
            for state in states
            for slot, value in state.items()
            if isinstance(slot, str)
        }
        if len(found) == _TENSORS:
            break
    return found


def check_replicas(phase: str, said: Sequence[Document]) -> None:
    """Check that all ranks say alike values, as far as they said any.

    Raises
    ------
    SaveError
        Naming the first that differs, and on which ranks.
    """
    samples: list[Mapping[str, Mapping[str, list[float]]]] = [doc.get("replicas") or {} for doc in said]
    for name, first in samples[0].items():
        ours = {rank: sample[name] for rank, sample in enumerate(samples) if name in sample}
        for slot in {slot: None for each in ours.values() for slot in each}:
            what = f"optimizer state {slot!r} of parameter {name!r}" if slot else f"parameter {name!r}"
            if lacking := [rank for rank, each in ours.items() if slot not in each]:
                raise SaveError(
                    f"{phase}: {what} is not on {named(lacking)}: an optimizer that spreads its state over the ranks "
                    "can't be saved, and nothing was written. Give each rank an optimizer with the state of all that "
                    "it has"
                )
            if differing := [rank for rank, each in ours.items() if not _alike(first[slot], each[slot])]:
                raise SaveError(
                    f"{phase}: {what} has other values on {named(differing)} than on rank 0, so one of them would be "
                    "lost: nothing was written. Train replicas that are kept alike with their optimizer state, as "
                    "DistributedDataParallel does and LocalSGD does not, or shard tables by TorchRec or FSDP2"
                )


def _is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(tensor, torch.Tensor)
        and not is_dtensor(tensor)
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and type(tensor.data) is torch.Tensor
        and tensor.numel() > 0
    )


def _values(tensor: torch.Tensor) -> list[float]:
    """So many of a tensor's values, from its first to its last."""
    numbers = torch.linspace(0, tensor.numel() - 1, min(_VALUES, tensor.numel()), dtype=torch.float64)
    with failing_saves(tensor.device, "values that ranks compare"):
        places = torch.unravel_index(numbers.round().long().to(tensor.device), tensor.shape)
        values: list[float] = tensor.detach()[places].reshape(-1).to(torch.float64).cpu().tolist()
    return values


def _alike(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    if len(ours) != len(theirs):
        return False
    largest = max(map(abs, (*ours, *theirs)), default=0.0)
    # NaN and infinity are alike to nothing and to everything: they tell nothing of replicas.
    return not any(abs(one - other) > _TOLERANCE * largest for one, other in zip(ours, theirs, strict=True))
