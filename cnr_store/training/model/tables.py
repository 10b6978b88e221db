"""Finds what a model holds: embedding tables, dense tensors, extra state, and their names in the store.

A name is the key in ``model.state_dict()`` without the parts that wrappers add (``module.`` of
DistributedDataParallel, ``_orig_mod.`` of ``torch.compile``), so wrapped and bare models share checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from cnr_store.errors import ModelMismatchError, UnsupportedModelError
from cnr_store.format.layout import table_name
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.tensors import TABLE_DTYPES, dtype_name, may_overlap_itself

Lookup = nn.Embedding | nn.EmbeddingBag
_EXTRA_STATE = "_extra_state"
_WRAPPERS = (AveragedModel, DataParallel, DistributedDataParallel)


@dataclass(eq=False)
class Table:
    """One embedding parameter of a model.

    Attributes
    ----------
    name
        What it is stored under: its module's path without wrapper prefixes.
    parameter_name
        What optimizers' state calls it: as `parameter_names` does.
    key
        Its key in ``model.state_dict()``, by its module.
    aliases
        Names, made like `name`, of the other state dict entries that are this same parameter.
    parameter
        ``(rows, dim)``.
    modules
        The modules that look rows up in it.
    shared_with
        Names of what else uses its memory: modules that are no lookups (a tied output layer), other tensors.
    """

    name: str
    parameter_name: str
    key: str
    parameter: nn.Parameter
    aliases: list[str] = field(default_factory=list)
    modules: list[Lookup] = field(default_factory=list)
    shared_with: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.parameter.shape[0]

    @property
    def dim(self) -> int:
        return self.parameter.shape[1]

    @property
    def element(self) -> str:
        """Element type: ``"float32"``, ``"bfloat16"`` or ``"float16"``."""
        return dtype_name(self.parameter.dtype)

    @property
    def has_max_norm(self) -> bool:
        """Whether a lookup may itself change rows; modules are asked each time."""
        return any(module.max_norm is not None for module in self.modules)


def wrapper_paths(model: nn.Module) -> frozenset[str]:
    """Paths of the ``module`` attributes that only wrap.

    By the class of their parent: one of the user's own with nothing but a ``module`` may get a metric or a loss later,
    and names must stay.
    """
    return frozenset(
        f"{path}.module" if path else "module"
        for path, parent in model.named_modules(remove_duplicate=False)
        if isinstance(parent, _WRAPPERS)
    )


def clean_name(key: str, wrappers: Collection[str] = ()) -> str:
    """`key` without ``_orig_mod`` and without the components that `wrapper_paths` found."""
    path, kept = "", []
    for part in key.split("."):
        path = f"{path}.{part}" if path else part
        if part != "_orig_mod" and path not in wrappers:
            kept.append(part)
    return ".".join(kept)


def state_names(model: nn.Module) -> dict[str, str]:
    """The stored name of every key of ``model.state_dict()``, in its order.

    Raises
    ------
    UnsupportedModelError
        Two keys have the same name.
    """
    return _clean_keys(model, model.state_dict(keep_vars=True))


def _clean_keys(model: nn.Module, keys: Collection[str]) -> dict[str, str]:
    wrappers = wrapper_paths(model)
    names = {key: clean_name(key, wrappers) for key in keys}
    first: dict[str, str] = {}
    for key, name in names.items():
        if first.setdefault(name, key) != key:
            raise UnsupportedModelError(
                f"{first[name]!r} and {key!r} of the model's state dict are both called {name!r} without "
                "wrapper prefixes; rename one of the modules"
            )
    return names


def parameter_names(model: nn.Module) -> dict[int, str]:
    """``id(parameter)`` to the name it is stored under; of tied parameters, the first name."""
    wrappers = wrapper_paths(model)
    names: dict[int, str] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), clean_name(key, wrappers))
    return names


def find_tables(model: nn.Module) -> list[Table]:
    """The tables of a model: one for each distinct weight of its Embedding and EmbeddingBag modules.

    Returns
    -------
    In the order of ``model.state_dict()``. Weights that are computed (parametrized, pruned) are no tables:
    their sources are dense tensors.

    Raises
    ------
    UnsupportedModelError
        A table without rows or columns, on the meta device, not yet initialized, of another element type than
        float32, bfloat16 and float16, with rows that share memory, missing in the state dict, or two entries with
        one name.
    """
    state = model.state_dict(keep_vars=True)
    names = _clean_keys(model, state)
    keys: dict[int, list[str]] = {}
    for key, value in state.items():
        keys.setdefault(id(value), []).append(key)
    found: dict[int, Table] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) not in found:
            own = f"{path}.weight" if path else "weight"
            found[id(weight)] = _table(path, weight, own, keys.get(id(weight), []), names)
        found[id(weight)].modules.append(module)
    _note_sharing(model, found, state, names)
    order = {key: position for position, key in enumerate(state)}
    return sorted(found.values(), key=lambda table: order[table.key])


def _table(path: str, weight: nn.Parameter, own: str, keys: Sequence[str], names: Mapping[str, str]) -> Table:
    if not keys:
        raise UnsupportedModelError(
            f"table {path or 'weight'!r} is not in the model's state dict, so it has no name in the store"
        )
    check_weight(path, weight)
    key = own if own in keys else keys[0]  # a parameter of the model itself may be tied to it, and come first
    others = [table_name(names[other]) for other in keys if other != key]
    return Table(table_name(names[key]), names[keys[0]], key, weight, others)


def check_weight(path: str, weight: nn.Parameter) -> None:
    """Prove that the weight of the module at `path` can be stored as a table.

    Raises
    ------
    UnsupportedModelError
    """
    where = f"table {path or 'weight'!r}"
    if is_lazy(weight):
        raise UnsupportedModelError(f"{where} is not initialized; run the model once before")
    if weight.is_meta:
        raise UnsupportedModelError(
            f"{where} is on the meta device, without values; materialize the model before"
        )
    if type(weight.data).__name__ == "DTensor":  # by name: its module is long to import
        raise UnsupportedModelError(
            f"{where} is a DTensor, spread over ranks; give a model whose tables this process holds itself"
        )
    if weight.layout is not torch.strided or weight.is_quantized:
        kind = "quantized" if weight.is_quantized else f"of layout {weight.layout}"
        raise UnsupportedModelError(f"{where} is {kind}; make it a plain dense tensor")
    if weight.dtype not in TABLE_DTYPES:
        allowed = ", ".join(sorted(map(dtype_name, TABLE_DTYPES)))
        raise UnsupportedModelError(
            f"{where} is of {dtype_name(weight.dtype)}; tables are of {allowed}: convert the model before, as with "
            "model.float()"
        )
    if weight.ndim != 2 or weight.numel() == 0:
        raise UnsupportedModelError(f"{where} has shape {tuple(weight.shape)}; a table has rows and columns")
    if may_overlap_itself(weight):
        raise UnsupportedModelError(
            f"{where}: rows share memory, as in an expanded tensor; give it memory of its own with clone()"
        )


def _note_sharing(
    model: nn.Module, found: Mapping[int, Table], state: Mapping[str, object], names: Mapping[str, str]
) -> None:
    """Fill `shared_with`: other modules that own the parameter, and other tensors over the same memory."""
    wrappers = wrapper_paths(model)
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            table = found.get(id(parameter))
            if table is not None and not (module in table.modules and attribute == "weight"):
                table.shared_with.append(clean_name(path, wrappers) if path else attribute)
    by_storage: dict[int, list[Table]] = {}
    for table in found.values():
        by_storage.setdefault(table.parameter.untyped_storage().data_ptr(), []).append(table)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or is_lazy(value) or value.layout is not torch.strided:
            continue
        for table in by_storage.get(value.untyped_storage().data_ptr(), []):
            if value is not table.parameter and _overlap(value, table.parameter):
                table.shared_with.append(names[key])


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the spans of two tensors of one storage, from first to last byte, meet."""

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()

    (start, stop), (other_start, other_stop) = span(left), span(right)
    return left.numel() > 0 and start < other_stop and other_start < stop


def dense_items(model: nn.Module, tables: Sequence[Table]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Name, first name of the same tensor, and tensor, of every entry that is no table and no extra state.

    Raises
    ------
    UnsupportedModelError
        An entry of the state dict is not a dense tensor with values, each in its own memory, or two have one name.
    """
    state = model.state_dict(keep_vars=True)
    names = _clean_keys(model, state)
    of_tables = {id(table.parameter) for table in tables}
    first: dict[int, str] = {}
    for key, value in state.items():
        if id(value) in of_tables or _is_extra_state(key):
            continue
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
        yield names[key], first.setdefault(id(value), names[key]), value


def dense_tensors(model: nn.Module, tables: Sequence[Table]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers that are no tables, by name: the model's own tensors, tied ones once.

    Raises
    ------
    UnsupportedModelError
        An entry of the state dict is not a dense tensor with values, each in its own memory, or two have one name.
    """
    return {name: tensor for name, owner, tensor in dense_items(model, tables) if name == owner}


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE


def extra_state(model: nn.Module) -> dict[str, object]:
    """What the model's modules return from ``get_extra_state``, by name (ending in ``_extra_state``)."""
    state = model.state_dict(keep_vars=True)
    names = _clean_keys(model, state)
    return {names[key]: value for key, value in state.items() if _is_extra_state(key)}


def check_extra_state(model: nn.Module, values: Mapping[str, object]) -> dict[str, nn.Module]:
    """The modules of a model that have extra state, by the name of that state in `values`.

    Raises
    ------
    ModelMismatchError
        They are not those of `values`.
    """
    wrappers = wrapper_paths(model)
    owners = {
        clean_name(f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE, wrappers): module
        for path, module in model.named_modules()
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
