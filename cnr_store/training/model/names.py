"""What the entries of a model's state dict are called in the store.

A name is the key in ``model.state_dict()`` without what wrappers add (``module.`` of DistributedDataParallel,
``_orig_mod.`` of ``torch.compile``, Fabric's two), so that wrapped and bare models share checkpoints. What other
packages wrap around models and optimizers is known by name: none of them need be installed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from cnr_store.errors import UnsupportedModelError

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
_WRAPPERS = (AveragedModel, DataParallel, DistributedDataParallel)


def wrapper_paths(model: nn.Module) -> frozenset[str]:
    """Paths of the attributes in which wrappers have what they wrap: ``module``, or Fabric's.

    Wrappers are known by their class. A class of the user's own that has nothing but a ``module`` may get a metric or a
    loss later, and its names must not change then.
    """
    parts: dict[type[nn.Module], tuple[str, ...]] = {}  # each save asks for all modules again
    paths = []
    for path, parent in model.named_modules(remove_duplicate=False):
        kind = type(parent)
        if kind not in parts:
            parts[kind] = ("module",) if isinstance(parent, _WRAPPERS) else wrapped_parts(parent)
        paths += [f"{path}.{part}" if path else part for part in parts[kind]]
    return frozenset(paths)


def named_modules(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model by their paths without what wrappers add, each once or by all of them."""
    wrappers, modules = wrapper_paths(model), model.named_modules(remove_duplicate=remove_duplicate)
    return ((clean_name(path, wrappers), module) for path, module in modules)


def clean_name(key: str, wrappers: Collection[str] = ()) -> str:
    """`key` without ``_orig_mod`` and without the components at the paths in `wrappers`."""
    if not wrappers and "_orig_mod" not in key:  # nearly all keys, looked at in each save
        return key
    path, kept = "", []
    for part in key.split("."):
        path = f"{path}.{part}" if path else part
        if part != "_orig_mod" and path not in wrappers:
            kept.append(part)
    return ".".join(kept)


def state_names(model: nn.Module, keys: Collection[str] | None = None) -> dict[str, str]:
    """The stored name of every key of ``model.state_dict()``, in its order.

    `keys`: the keys of the state dict, where the caller has it.
    """
    wrappers = wrapper_paths(model)
    names = {
        key: clean_name(key, wrappers) for key in (model.state_dict(keep_vars=True) if keys is None else keys)
    }
    first_keys: dict[str, str] = {}
    for key, name in names.items():
        if first_keys.setdefault(name, key) != key:
            raise UnsupportedModelError(
                f"{first_keys[name]!r} and {key!r} of the model's state dict are both called {name!r} without "
                "wrapper prefixes; rename one of the modules"
            )
    return names


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The stored name of each parameter by its id; the first one of tied parameters."""
    wrappers = wrapper_paths(model)
    names: dict[int, str] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), clean_name(key, wrappers))
    return names


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer that steps and has the state: what was given, unless that is a known wrapper.

    Only exact wrappers count. One of another class may change rows itself.
    """
    kind = type(optimizer)
    # Lightning makes a class for each class wrapped: its own first, and then the other.
    is_wrapper = any(class_name(each) in _OPTIMIZERS for each in (kind, *kind.__bases__[:1]))
    inner = optimizer.optimizer if is_wrapper else None
    return unwrap_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def wrapped_parts(module: nn.Module) -> tuple[str, ...]:
    """The attributes in which a module of Fabric or TorchRec has the model that it wraps; none of any other module."""
    return _MODELS.get(class_name(type(module)), ())


def class_name(kind: type) -> str:
    """A class with its module, as a store calls it."""
    return f"{kind.__module__}.{kind.__qualname__}"
