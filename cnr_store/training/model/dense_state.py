"""What a model holds beside its tables: dense tensors, and the extra state of its modules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from cnr_store.errors import ModelMismatchError, UnsupportedModelError
from cnr_store.training.distributed.pieces import is_dtensor
from cnr_store.training.model.names import (
    clean_name,
    named_modules,
    parameter_names,
    state_names,
    wrapped_parts,
    wrapper_paths,
)
from cnr_store.training.model.object_state import is_wrapper, taken_apart
from cnr_store.training.model.patterns import NOTHING, Exclusion
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import may_overlap_itself, overwriting

EXTRA_STATE = "_extra_state"
NamedState = Mapping[str, tuple[str, Any]]
"""Key in the model's state dict and value, by stored name."""


def named_state(model: nn.Module, excluded: Exclusion = NOTHING) -> NamedState:
    """What the model's state dict holds now, by stored name, without what is excluded.

    `UnsupportedModelError` if two entries have one name.
    """
    state = model.state_dict(keep_vars=True)
    names = state_names(model, state)
    return {names[key]: (key, value) for key, value in state.items() if not excluded.has(names[key])}


def absent_parameters(model: nn.Module) -> list[str]:
    """Names of parameters that the model leaves out of its state dict."""
    state = named_state(model)
    held = {id(value) for _, value in state.values()}
    return [name for key, name in parameter_names(model).items() if key not in held and name not in state]


def dense_items(
    model: nn.Module, tables: Sequence[Table], state: NamedState | None = None
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Each entry of the state dict that is no table and no extra state.

    `state`: from `named_state`, where the caller has it.

    Returns: Its name, the first name of the same tensor, and the tensor.
    """
    of_tables = {id(table.parameter) for table in tables}
    spread = {table.key for table in tables if table.sharded is not None}
    first_names: dict[int, str] = {}
    for name, (key, value) in (named_state(model) if state is None else state).items():
        if id(value) in of_tables or name in spread or key.rpartition(".")[2] == EXTRA_STATE:
            continue
        if isinstance(value, torch.Tensor):
            for part, tensor in _plain_parts(name, value):
                _check_dense(part, tensor)
                yield part, first_names.setdefault(id(tensor), part), tensor
        elif not Loaders(model).may_take(name):
            raise UnsupportedModelError(
                f"{key!r} of the model's state dict is neither a tensor nor extra state, and no hook or "
                "_load_from_state_dict loads it; return it from get_extra_state"
            )


def _plain_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, or those that it wraps, which a load fills in place."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    for part, inner in taken_apart(tensor, repr(name))[0].items():
        yield from _plain_parts(f"{name}.{part}", inner)


def _check_dense(key: str, value: torch.Tensor) -> None:
    """Check that an entry of a state dict can be stored."""
    if value.is_meta or is_lazy(value) or value.layout is not torch.strided or value.is_quantized:
        raise UnsupportedModelError(
            f"{key!r} of the model is not a dense tensor with values: layout {value.layout}, device "
            f"{value.device}; convert or materialize it before"
        )
    if may_overlap_itself(value):
        raise UnsupportedModelError(
            f"{key!r} of the model: elements share memory, as in an expanded tensor, so it could not be loaded; "
            "give it memory of its own with clone()"
        )


def dense_tensors(model: nn.Module, tables: Sequence[Table]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers that are no tables, by name: the model's own tensors, tied ones once."""
    return {name: tensor for name, first, tensor in dense_items(model, tables) if name == first}


@contextmanager
def unchanged(
    model: nn.Module, tables: Sequence[Table], excluded: Exclusion, taken: Collection[str]
) -> Iterator[None]:
    """Around code of the model's: all dense tensors but those `taken`, by name, are put back afterwards."""

    def find() -> dict[str, torch.Tensor]:
        own, found = named_state(model, excluded), dict[str, torch.Tensor]()
        others = named_state(model).items() if excluded.patterns else ()
        for state in (own, *({name: entry} for name, entry in others if name not in own)):
            with suppress(UnsupportedModelError):  # left out because it can't be stored
                items = [*dense_items(model, tables, state)]
                found |= {name: one for name, first, one in items if name == first and name not in taken}
        return found

    kept = {name: one.detach().clone() for name, one in find().items()}
    yield
    now = find() if kept else {}
    for name, before in kept.items():
        tensor = now.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
            raise ModelMismatchError(
                f"a hook or loader of a module replaced {name!r}, which is not loaded, by a tensor of another shape or "
                "type; the model is now partly overwritten: load the whole version into it"
            )
        with overwriting(tensor):
            tensor.detach().copy_(before)


def remade_names(
    tensors: Mapping[str, torch.Tensor], items: Iterable[tuple[str, str, torch.Tensor]]
) -> list[str]:
    """Which of `tensors` modules make anew for each state dict, as of `dense_items`: writes to them are lost."""
    now = {name: tensor for name, _, tensor in items}
    # `tensors` are alive, so that other memory has another address.
    return [
        name
        for name, tensor in tensors.items()
        if now[name] is not tensor and (is_dtensor(tensor) or now[name].data_ptr() != tensor.data_ptr())
    ]


def extra_state(state: NamedState) -> dict[str, object]:
    """What the model's modules return from ``get_extra_state``, and what is no tensor, by name."""
    return {
        name: value
        for name, (key, value) in state.items()
        if key.rpartition(".")[2] == EXTRA_STATE or not isinstance(value, torch.Tensor)
    }


def module_versions(model: nn.Module) -> dict[str, int]:
    """The versions of its modules' state, by the name of the module; those that are not 1, as usual in torch."""
    modules = named_modules(model, remove_duplicate=False)
    found = {path: getattr(module, "_version", 1) for path, module in modules}
    return {name: version for name, version in found.items() if type(version) is int and version != 1}


def state_root(module: nn.Module) -> nn.Module:
    """The module whose keys a state dict has: wrappers of Fabric and TorchRec leave theirs out."""
    while parts := wrapped_parts(module):
        module = getattr(module, parts[-1])
        if isinstance(module, DistributedDataParallel):  # TorchRec's own
            module = module.module
    return module


def users_hooks(hooks: Mapping[int, Any]) -> list[Any]:
    """Those of a module's hooks that are neither ours nor FSDP2's, which give parameters their place back."""
    ours = ("cnr_store.", "torch.distributed.")
    return [hook for hook in hooks.values() if not getattr(hook, "__module__", "").startswith(ours)]


def is_overridden(method: Any) -> bool:
    """Whether a method of a module is not torch's usual one."""
    return not method.__module__.startswith("torch.nn.modules.")


class Loaders:
    """The modules of a model that take entries of a state dict in a way of their own.

    These have hooks before ``load_state_dict``, or a ``_load_from_state_dict`` of their own; or the model has a
    ``load_state_dict`` of its own. `skipped`, TorchRec's modules, are passed over with all in them.

    `act`: whether a load runs any code of the model's, hooks after it included.
    """

    def __init__(self, model: nn.Module, skipped: Collection[nn.Module] = ()) -> None:
        wrappers, root = wrapper_paths(model), state_root(model)
        self._skipped = {*map(id, skipped)}
        self._prefixes: dict[str, str] = {}
        own = {""} if is_overridden(root.load_state_dict) else set[str]()
        self.act = bool(own)
        modules = [("", root)]
        for prefix, module in modules:  # which grows
            modules += self.children(prefix, module)
            name = clean_name(prefix, wrappers)
            self._prefixes[name] = prefix  # of a wrapper and what is in it, which have one name, the latter's
            if is_overridden(module._load_from_state_dict) or users_hooks(module._load_state_dict_pre_hooks):
                own.add(name)
            self.act |= name in own or bool(users_hooks(module._load_state_dict_post_hooks))
        self._own = tuple(own)

    def children(self, prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules that torch loads after `module`, each with what its keys begin with."""
        found = [(f"{prefix}{part}.", child) for part, child in module._modules.items() if child is not None]
        return [(key, state_root(child)) for key, child in found if id(child) not in self._skipped]

    def key(self, name: str) -> str:
        """The key of an entry that the model's state dict has not now."""
        owner = max(filter(name.startswith, self._prefixes), key=len)
        return self._prefixes[owner] + name[len(owner) :]

    def takes(self, name: str) -> bool:
        """Whether the module that has an entry takes it in a way of its own, in another shape, too."""
        return name[: name.rfind(".") + 1] in self._own

    def may_take(self, name: str) -> bool:
        """Whether it or a module around it does so, under another name, too."""
        return name.startswith(self._own)
