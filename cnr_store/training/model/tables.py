"""Finds the embedding tables of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cnr_store.errors import UnsupportedModelError
from cnr_store.format.layout import table_name
from cnr_store.training.model.names import clean_name, state_names, wrapper_paths
from cnr_store.training.model.tensors import TABLE_DTYPES, dtype_name, may_overlap_itself

Lookup = nn.Embedding | nn.EmbeddingBag


@dataclass(eq=False)
class Table:
    """One embedding parameter of a model.

    Attributes
    ----------
    name
        The name in the store: its module's path without wrapper prefixes.
    parameter_name
        The name in optimizers' state: see `parameter_names`.
    key
        Its key in ``model.state_dict()``, by its module.
    parameter
        ``(rows, dim)``.
    tied_names
        Stored names of the other state dict entries that are this same parameter.
    modules
        The modules that look up rows in it.
    shared_with
        Names of what else uses its memory: modules that look up no rows (a tied output layer), other tensors.
    """

    name: str
    parameter_name: str
    key: str
    parameter: nn.Parameter
    tied_names: tuple[str, ...] = ()
    modules: list[Lookup] = field(default_factory=list)
    shared_with: list[str] = field(default_factory=list)

    @property
    def aliases(self) -> list[str]:
        """Names like `name` of the entries in `tied_names`."""
        return [table_name(name) for name in self.tied_names]

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
        """Whether a lookup may itself change rows, as the modules are set now."""
        return any(module.max_norm is not None for module in self.modules)


def find_tables(model: nn.Module) -> list[Table]:
    """The tables of a model: one for each distinct weight of its Embedding and EmbeddingBag modules.

    Returns
    -------
    They are in the order of ``model.state_dict()``. Weights that are computed (parametrized, pruned) are no tables;
    their sources are dense tensors.

    Raises
    ------
    UnsupportedModelError
        A table can't be stored (see `check_weight`) or is missing in the state dict, or two entries have one name.
    """
    state = model.state_dict(keep_vars=True)
    names = state_names(model, state)
    keys: dict[int, list[str]] = {}
    for key, value in state.items():
        keys.setdefault(id(value), []).append(key)
    tables: dict[int, Table] = {}
    for path, module in model.named_modules():
        if not isinstance(module, Lookup) or (weight := module._parameters.get("weight")) is None:
            continue
        if id(weight) not in tables:
            own = f"{path}.weight" if path else "weight"
            tables[id(weight)] = _table(path, weight, own, keys.get(id(weight), []), names)
        tables[id(weight)].modules.append(module)
    _note_sharing(model, tables, state, names)
    order = {key: position for position, key in enumerate(state)}
    return sorted(tables.values(), key=lambda table: order[table.key])


def _table(path: str, weight: nn.Parameter, own: str, keys: Sequence[str], names: Mapping[str, str]) -> Table:
    if not keys:
        raise UnsupportedModelError(
            f"table {path or 'weight'!r} is not in the model's state dict, so it has no name in the store"
        )
    check_weight(path, weight)
    key = own if own in keys else keys[0]  # a parameter of the model itself, tied to it, may come first
    tied_names = tuple(names[other] for other in keys if other != key)
    return Table(table_name(names[key]), names[keys[0]], key, weight, tied_names)


def check_weight(path: str, weight: nn.Parameter) -> None:
    """Check that the weight of the module at `path` can be stored as a table.

    Raises
    ------
    UnsupportedModelError
        It has no rows or no columns, is on the meta device or not yet initialized, is spread over ranks, sparse or
        quantized, of another element type than float32, bfloat16 and float16, or its rows share memory.
    """
    where = f"table {path or 'weight'!r}"
    if is_lazy(weight):
        raise UnsupportedModelError(f"{where} is not initialized; run the model once before")
    if weight.is_meta:
        raise UnsupportedModelError(
            f"{where} is on the meta device, without values; materialize the model before"
        )
    if type(weight.data).__name__ == "DTensor":  # by name, because importing its module takes long
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
    model: nn.Module, tables: Mapping[int, Table], state: Mapping[str, object], names: Mapping[str, str]
) -> None:
    """Fill `shared_with` with other modules that have the parameter, and other tensors over the same memory."""
    wrappers = wrapper_paths(model)
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            table = tables.get(id(parameter))
            if table is not None and not (module in table.modules and attribute == "weight"):
                table.shared_with.append(clean_name(path, wrappers) if path else attribute)
    by_storage: dict[int, list[Table]] = {}
    for table in tables.values():
        by_storage.setdefault(table.parameter.untyped_storage().data_ptr(), []).append(table)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or is_lazy(value) or value.layout is not torch.strided:
            continue
        for table in by_storage.get(value.untyped_storage().data_ptr(), []):
            if value is not table.parameter and _overlap(value, table.parameter):
                table.shared_with.append(names[key])


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one storage have bytes between their first and their last one in common."""

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    (start, stop), (other_start, other_stop) = span(left), span(right)
    return left.numel() > 0 and start < other_stop and other_start < stop
