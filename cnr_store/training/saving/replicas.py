"""Whether ranks that should hold the same hold it: a few values of tensors that only one of them will write.

Optimizer state is among them: where each rank steps on its own and only the parameters are averaged, as by LocalSGD,
each has state of its own, and a version would mix that of several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

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
    """A few values of the parameters that each rank has whole, and of their optimizer state, by what they are."""
    found = {what: _values(tensor) for what, tensor in islice(_parameters(trained), _TENSORS)}
    return found | {what: _values(tensor) for what, tensor in islice(_state(trained), _TENSORS)}


def _parameters(trained: TrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    spread = {
        table.key
        for table in trained.tables
        if isinstance(table, SpreadTable) and not table.sharded.replicated
    }
    names = parameter_names(trained.model)
    for parameter in trained.model.parameters():
        name = names.get(id(parameter))
        if name is not None and name not in spread and not is_dtensor(parameter) and _is_plain(parameter):
            yield f"parameter {name!r}", parameter


def _state(trained: TrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What optimizers keep for these parameters, of their shape or by their rows."""
    for what, parameter in _parameters(trained):
        for optimizer in trained.optimizers:
            for slot, value in optimizer.state.get(parameter, {}).items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape[:1] == parameter.shape[:1]
                    and not is_dtensor(value)
                    and _is_plain(value)
                ):
                    yield f"optimizer state {slot!r} of {what}", value


def check_replicas(phase: str, said: Sequence[Document]) -> None:
    """Check that all ranks say alike values, as far as they said any.

    Raises
    ------
    SaveError
        Naming the first that differs, and on which ranks.
    """
    first: Mapping[str, list[float]] = said[0].get("replicas") or {}
    for what, values in first.items():
        differing = [
            rank
            for rank, doc in enumerate(said)
            if what in (doc.get("replicas") or {}) and not _alike(values, doc["replicas"][what])
        ]
        if differing:
            raise SaveError(
                f"{phase}: {what} has other values on {named(differing)} than on rank 0, so one of them would be "
                "lost: nothing was written. Train replicas that are kept alike with their optimizer state, as "
                "DistributedDataParallel does and LocalSGD does not, or shard tables by TorchRec or FSDP2"
            )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_floating_point()
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
        values: list[float] = tensor.detach()[places].to(torch.float64).cpu().tolist()
    return values


def _alike(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    if len(ours) != len(theirs):
        return False
    largest = max(map(abs, (*ours, *theirs)), default=0.0)
    # NaN and infinity are alike to nothing and to everything: they tell nothing of replicas.
    return not any(abs(one - other) > _TOLERANCE * largest for one, other in zip(ours, theirs, strict=True))
