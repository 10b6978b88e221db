"""Whether ranks that should hold the same hold it: a few values of tensors that only one of them will write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cnr_store.errors import SaveError
from cnr_store.ranks.decisions import named
from cnr_store.ranks.group import Document
from cnr_store.training.devices.support import failing_saves
from cnr_store.training.distributed.dtensors import is_dtensor
from cnr_store.training.model.names import parameter_names
from cnr_store.training.model.tables import SpreadTable
from cnr_store.training.model.trained_model import TrainedModel

CHECK_EVERY = 16
"""Saves."""

_TENSORS, _VALUES = 256, 8
_TOLERANCE = 0.05
"""Replicas may drift by the order in which a device adds: by far less than tensors differ that are no replicas."""


def sample_replicas(trained: TrainedModel) -> dict[str, list[float]]:
    """A few values of the parameters that each rank has whole, by name."""
    spread = {
        table.key
        for table in trained.tables
        if isinstance(table, SpreadTable) and not table.sharded.replicated
    }
    names = parameter_names(trained.model)
    found: dict[str, list[float]] = {}
    for parameter in trained.model.parameters():
        name = names.get(id(parameter))
        if name is None or name in spread or is_dtensor(parameter) or not _is_plain(parameter):
            continue
        found[name] = _values(parameter)
        if len(found) == _TENSORS:
            break
    return found


def check_replicas(phase: str, said: Sequence[Document]) -> None:
    """Check that all ranks say alike values, as far as they said any.

    Raises
    ------
    SaveError
        Naming the first parameter that differs, and on which ranks.
    """
    first: Mapping[str, list[float]] = said[0].get("replicas") or {}
    for name, values in first.items():
        differing = [
            rank
            for rank, doc in enumerate(said)
            if name in (doc.get("replicas") or {}) and not _alike(values, doc["replicas"][name])
        ]
        if differing:
            raise SaveError(
                f"{phase}: parameter {name!r} has other values on {named(differing)} than on rank 0, so one of them "
                "would be lost: nothing was written. Train replicas that are kept alike, as DistributedDataParallel "
                "does, or shard tables by TorchRec or FSDP2"
            )


def _is_plain(parameter: torch.Tensor) -> bool:
    return (
        parameter.is_floating_point()
        and parameter.layout is torch.strided
        and not parameter.is_meta
        and type(parameter.data) is torch.Tensor
        and parameter.numel() > 0
    )


def _values(parameter: torch.Tensor) -> list[float]:
    """So many of a tensor's values, from its first to its last."""
    numbers = torch.linspace(0, parameter.numel() - 1, min(_VALUES, parameter.numel()), dtype=torch.float64)
    with failing_saves(parameter.device, "values that ranks compare"):
        places = torch.unravel_index(numbers.round().long().to(parameter.device), parameter.shape)
        values: list[float] = parameter.detach()[places].to(torch.float64).cpu().tolist()
    return values


def _alike(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    if len(ours) != len(theirs):
        return False
    largest = max(map(abs, (*ours, *theirs)), default=0.0)
    # NaN and infinity are alike to nothing and to everything: they tell nothing of replicas.
    return not any(abs(one - other) > _TOLERANCE * largest for one, other in zip(ours, theirs, strict=True))
