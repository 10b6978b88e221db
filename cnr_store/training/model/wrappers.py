"""What other packages wrap around models and optimizers, known by name: none of them need be installed."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

_OPTIMIZERS = {
    "accelerate.optimizer.AcceleratedOptimizer",
    "lightning.fabric.wrappers._FabricOptimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer",
    "lightning_fabric.wrappers._FabricOptimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer",
}
"""Classes that leave steps and state to their ``optimizer``."""

_PARTS = ("_forward_module", "_original_module")
"""Attributes of Fabric's model, both the same module or wrapped around it; its state dict names neither."""

_MODELS = {
    "lightning.fabric.wrappers._FabricModule": _PARTS,
    "lightning_fabric.wrappers._FabricModule": _PARTS,
    "torchrec.distributed.model_parallel.DistributedModelParallel": ("_dmp_wrapped_module",),
}


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer that steps and has the state: what was given, unless that is a known wrapper.

    Only exact wrappers count. One of another class may change rows itself.
    """
    while _is_wrapper(type(optimizer)) and isinstance(inner := optimizer.optimizer, Optimizer):
        optimizer = inner
    return optimizer


def _is_wrapper(kind: type) -> bool:
    # Lightning makes a class for each class wrapped: its own first, and then the other.
    return any(class_name(each) in _OPTIMIZERS for each in (kind, *kind.__bases__[:1]))


def wrapped_parts(module: nn.Module) -> tuple[str, ...]:
    """The attributes in which a module of Fabric or TorchRec has the model that it wraps; none of any other module."""
    return _MODELS.get(class_name(type(module)), ())


def class_name(kind: type) -> str:
    """A class with its module, as a store calls it."""
    return f"{kind.__module__}.{kind.__qualname__}"
