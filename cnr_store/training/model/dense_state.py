"""What a model holds beside its tables: dense tensors, and the extra state of its modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cnr_store.errors import ModelMismatchError, UnsupportedModelError
from cnr_store.training.distributed.dtensors import is_dtensor
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.names import clean_name, state_names, wrapper_paths
from cnr_store.training.model.tables import SpreadTable, Table
from cnr_store.training.model.tensors import dense_numpy, may_overlap_itself

_EXTRA_STATE = "_extra_state"
NamedState = Mapping[str, tuple[str, Any]]
"""Key in the model's state dict and value, by stored name."""


def named_state(model: nn.Module) -> NamedState:
    """What the model's state dict holds now, by stored name.

    Raises
    ------
    UnsupportedModelError
        Two entries have one name.
    """
    state = model.state_dict(keep_vars=True)
    names = state_names(model, state)
    return {names[key]: (key, value) for key, value in state.items()}


def dense_items(
    model: nn.Module, tables: Sequence[Table], state: NamedState | None = None
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Each entry of the state dict that is no table and no extra state.

    Parameters
    ----------
    state
        From `named_state`, where the caller has it.

    Returns
    -------
    Its name, the first name of the same tensor, and the tensor.

    Raises
    ------
    UnsupportedModelError
        An entry is no dense tensor with values, its elements share memory, or two entries have one name.
    """
    of_tables = {id(table.parameter) for table in tables}
    spread = {table.key for table in tables if isinstance(table, SpreadTable)}
    first_names: dict[int, str] = {}
    for name, (key, value) in (named_state(model) if state is None else state).items():
        if id(value) not in of_tables and name not in spread and not _is_extra_state(key):
            _check_dense(key, value)
            yield name, first_names.setdefault(id(value), name), value


def _check_dense(key: str, value: object) -> None:
    """Check that an entry of a state dict can be stored."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedModelError(
            f"{key!r} of the model's state dict is of type {type(value).__name__}, neither a tensor nor extra "
            "state; return it from get_extra_state"
        )
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
    """Parameters and persistent buffers that are no tables, by name: the model's own tensors, tied ones once.

    Raises
    ------
    UnsupportedModelError
        See `dense_items`.
    """
    return {name: tensor for name, first, tensor in dense_items(model, tables) if name == first}


def remade_names(model: nn.Module, tables: Sequence[Table], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Which of `tensors`, from `dense_tensors`, modules make anew for each state dict: writes to them are lost."""
    now = {name: tensor for name, _, tensor in dense_items(model, tables)}
    # `tensors` are alive, so that other memory has another address.
    return [
        name
        for name, tensor in tensors.items()
        if now[name] is not tensor and (is_dtensor(tensor) or now[name].data_ptr() != tensor.data_ptr())
    ]


def load_remade(model: nn.Module, tables: Sequence[Table], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give modules what was loaded into `tensors` that they make anew, through their own ``_load_from_state_dict``.

    Raises
    ------
    ModelMismatchError
        A module refuses them, or its state dict holds something else afterwards.
    """
    if not (remade := remade_names(model, tables, tensors)):
        return
    wrappers = wrapper_paths(model)
    # Of a wrapper and what is in it, which have one name, the latter.
    modules = {
        clean_name(path, wrappers): module for path, module in model.named_modules(remove_duplicate=False)
    }
    metadata = {
        clean_name(path, wrappers): local
        for path, local in getattr(model.state_dict(keep_vars=True), "_metadata", {}).items()
    }
    entries = {name: tensor.detach() for name, _, tensor in dense_items(model, tables)}
    entries |= {name: tensors[name].detach() for name in remade}
    errors: list[str] = []
    for path in dict.fromkeys(_owner(name, modules) for name in remade):
        prefix = f"{path}." if path else ""
        own = {name: tensor for name, tensor in entries.items() if name.startswith(prefix)}
        modules[path]._load_from_state_dict(own, prefix, metadata.get(path, {}), True, [], [], errors)
    now = {name: tensor for name, _, tensor in dense_items(model, tables)}
    lost = [name for name in remade if not _same_bits(now.get(name), tensors[name])]
    if errors or lost:
        raise ModelMismatchError(
            f"{(lost or remade)[0]!r} is in the model's state dict, but a module computes it in state_dict(), and the "
            f"stored value could not be loaded into that module{': ' + '; '.join(errors) if errors else ''}; load it "
            "in the module's _load_from_state_dict, keep it in a buffer, or return it from get_extra_state"
        )


def _owner(name: str, modules: Collection[str]) -> str:
    """The path of the innermost module that an entry of the state dict may be of."""
    path = name.rpartition(".")[0]
    while path not in modules:
        path = path.rpartition(".")[0]
    return path


def _same_bits(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    if one is None or is_dtensor(one) or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return dense_numpy(one)[0].tobytes() == dense_numpy(other)[0].tobytes()


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE


def extra_state(model: nn.Module, state: NamedState | None = None) -> dict[str, object]:
    """What the model's modules return from ``get_extra_state``, by name (ending in ``_extra_state``).

    Parameters
    ----------
    state
        From `named_state`, where the caller has it.
    """
    found = named_state(model) if state is None else state
    return {name: value for name, (key, value) in found.items() if _is_extra_state(key)}


def check_extra_state(model: nn.Module, values: Mapping[str, object]) -> dict[str, nn.Module]:
    """The modules of a model that have extra state, by the name of that state.

    Raises
    ------
    ModelMismatchError
        The names are not those of `values`.
    """
    wrappers = wrapper_paths(model)
    owners = {
        clean_name(f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE, wrappers): module
        # A module with two names has an entry of the state dict under each.
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
    if owners.keys() != values.keys():
        raise ModelMismatchError(
            f"extra state of the model ({sorted(owners)}) is not that of the checkpoint ({sorted(values)}); give "
            f"the model that was saved, or {IGNORE} the rest"
        )
    return owners


def load_extra_state(model: nn.Module, values: Mapping[str, object]) -> None:
    """Give every module its extra state back.

    Raises
    ------
    ModelMismatchError
        The model's modules with extra state are not those of `values`; nothing was set.
    """
    for name, module in check_extra_state(model, values).items():
        module.set_extra_state(values[name])
