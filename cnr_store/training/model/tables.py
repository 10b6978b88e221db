"""Finds the embedding tables of a model."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cnr_store.errors import UnsupportedModelError
from cnr_store.format.layout import table_name, weight_path
from cnr_store.training.distributed.pieces import LocalPiece, by_column, held_pieces, is_dtensor
from cnr_store.training.distributed.sharded import ShardedModule, ShardedTable
from cnr_store.training.model.names import class_name, clean_name, named_modules, state_names, wrapper_paths
from cnr_store.training.model.patterns import NOTHING, Exclusion
from cnr_store.training.model.tensors import (
    TABLE_DTYPES,
    dtype_name,
    may_overlap_itself,
    overlapping,
    spread_class,
)

Lookup = nn.Embedding | nn.EmbeddingBag


@dataclass(eq=False)
class Table:
    """One embedding parameter of a model, and what this process holds of it."""

    name: str  # the name in the store: its module's path without wrapper prefixes
    parameter_name: str  # the name in optimizers' state: see `parameter_names`
    key: str  # its key in ``model.state_dict()``, by its module
    # ``(rows, dim)``; of fused tables some memory of the rows held, whose changes are counted for all of them
    parameter: nn.Parameter
    # Stored names of the other state dict entries that are this same parameter
    tied_names: tuple[str, ...] = ()
    modules: list[Lookup] = field(default_factory=list)  # the modules that look up rows in it
    # Names of what else uses its memory: modules that look up no rows (a tied output layer), other tensors
    shared_with: list[str] = field(default_factory=list)
    sharded: ShardedTable | None = None  # what TorchRec says of it, if that shards it over ranks
    is_fused: bool = False  # whether rows change in the backward pass, and not by an optimizer's step

    def share_with(self, name: str) -> None:
        """Note that what is called `name` uses the same memory."""
        if name not in self.shared_with:
            self.shared_with.append(name)

    @cached_property
    def path(self) -> str:
        """The path of its rows in a version."""
        return weight_path(self.name)

    @property
    def is_plain(self) -> bool:
        """Whether this process holds all of it, as one tensor that modules have as their weight."""
        return self.sharded is None and not is_dtensor(self.parameter)

    @property
    def pieces(self) -> Sequence[LocalPiece]:
        """The boxes of it that this process holds."""
        if self.sharded is not None:
            return self.sharded.pieces
        if is_dtensor(self.parameter):
            return held_pieces(self.parameter, f"table {self.name!r}")
        return (LocalPiece(0, 0, self.parameter),)

    @property
    def parts(self) -> tuple[LocalPiece, ...]:
        """The memory of the rows that this process holds; no part where it holds none."""
        return by_column(self.name, self.pieces)

    @property
    def first_row(self) -> int:
        """The first of the rows that this process holds."""
        return self.pieces[0].first_row if self.pieces else 0

    @property
    def local_rows(self) -> int:
        """How many rows this process holds, from `first_row` on."""
        if self.is_plain:  # as most are, and each save asks thousands
            return self.rows
        return len(self.pieces[0].tensor) if self.pieces else 0

    @property
    def rows(self) -> int:
        """Rows of the table, on whatever rank."""
        return (self.parameter if self.sharded is None else self.sharded).shape[0]

    @property
    def dim(self) -> int:
        return (self.parameter if self.sharded is None else self.sharded).shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return (self.parameter if self.sharded is None else self.sharded).dtype

    @property
    def element(self) -> str:
        """Element type: ``"float32"``, ``"bfloat16"`` or ``"float16"``."""
        return dtype_name(self.dtype)

    @property
    def nbytes(self) -> int:
        """The size of the table in memory, on all ranks."""
        return self.rows * self.dim * self.dtype.itemsize


def spread_table(sharded: ShardedTable, parameter: nn.Parameter | None) -> Table:
    """A table that TorchRec shards over ranks. Each rank has one whole that an optimizer steps: its `parameter`."""
    memory: Any = parameter
    if parameter is None:
        own = [piece.tensor for piece in sharded.pieces]
        memory = own[0] if own else torch.empty(0, sharded.shape[1], dtype=sharded.dtype)
    name = sharded.name
    return Table(table_name(name), name, name, memory, sharded=sharded, is_fused=parameter is None)


def table_weights(
    model: nn.Module, excluded: Exclusion = NOTHING, remove_duplicate: bool = True
) -> Iterator[tuple[str, str, Lookup, nn.Parameter]]:
    """Modules whose weights are tables, each with its path and the name and parameter of its weight.

    Weights of integers and complex numbers are none: they are stored as dense tensors.
    """
    wrappers = wrapper_paths(model)
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        weight = module._parameters.get("weight") if isinstance(module, Lookup) else None
        if weight is None or not (weight.is_floating_point() or weight.is_quantized):
            continue
        name = clean_name(f"{path}.weight" if path else "weight", wrappers)
        if name not in excluded.absent and not excluded.fits(name, table_name(name)):
            yield path, name, module, weight


def find_tables(
    model: nn.Module, sharded: Sequence[ShardedModule] = (), excluded: Exclusion = NOTHING
) -> list[Table]:
    """The tables of a model: one for each distinct weight of its Embedding and EmbeddingBag modules.

    `sharded`: TorchRec's modules in it, whose tables are among the result.
    `excluded`: what is passed over.

    Returns: They are in the order of ``model.state_dict()``. Weights that are computed (parametrized, pruned) are no
    tables; their sources are dense tensors.
    """
    state = model.state_dict(keep_vars=True)
    names = state_names(model, state)
    wrappers = wrapper_paths(model)
    spread = _spread_tables(model, sharded)
    keys: dict[int, list[str]] = {}
    for key, value in state.items():
        keys.setdefault(id(value), []).append(key)
    tables: dict[int, Table] = {}
    for path, own, module, weight in table_weights(model, excluded):
        if id(weight) not in tables:
            tables[id(weight)] = _table(path, weight, own, keys.get(id(weight), []), names)
        tables[id(weight)].modules.append(module)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    for key, value in itertools.chain(_own_tensors(model), tensors.items()):
        if clean_name(key, wrappers) in spread or (kind := spread_class(value)) is None:
            continue
        if not is_dtensor(value):
            raise UnsupportedModelError(
                f"{key!r} of the model is a {kind}, whose values this process does not hold in plain memory. Models "
                "spread over ranks are those of TorchRec and of FSDP2: give one of these, or a model that this process "
                "holds itself"
            )
        held_pieces(value, repr(key))
    plain = {names[key]: value for key, value in tensors.items() if names[key] not in spread}
    note_sharing(model, tables.values(), plain)
    order = {names[key]: position for position, key in enumerate(state)}
    found = [*tables.values(), *(each for key, each in spread.items() if not excluded.fits(key, each.name))]
    return sorted(found, key=lambda table: order[names.get(table.key, table.key)])


def _spread_tables(model: nn.Module, modules: Sequence[ShardedModule]) -> dict[str, Table]:
    """The tables that TorchRec shards, by the key of their rows in the state dict."""
    sharded = [table for module in modules for table in module.tables]
    parameters = dict(model.named_parameters()) if any(table.replicated for table in sharded) else {}
    return {
        table.name: spread_table(table, parameters.get(table.name) if table.replicated else None)
        for table in sharded
    }


def _table(path: str, weight: nn.Parameter, own: str, keys: Sequence[str], names: Mapping[str, str]) -> Table:
    if not keys:
        raise UnsupportedModelError(
            f"table {path or 'weight'!r} is not in the model's state dict, which has another tensor under its name; "
            f"let no hook replace it, or leave it out: tracking=cnr_store.Tracking(exclude={table_name(own)!r})"
        )
    check_weight(path, weight)
    # A parameter of the model itself, tied to it, may come first.
    key = next((key for key in keys if names[key] == own), keys[0])
    tied_names = tuple(names[other] for other in keys if other != key)
    return Table(table_name(names[key]), names[keys[0]], key, weight, tied_names)


def check_weight(path: str, weight: nn.Parameter) -> None:
    """Check that the weight of the module at `path` can be stored as a table."""
    where = f"table {path or 'weight'!r}"
    if is_lazy(weight):
        raise UnsupportedModelError(f"{where} is not initialized; run the model once before")
    if is_dtensor(weight):
        held_pieces(weight, where)
    elif (kind := spread_class(weight)) is not None:
        raise UnsupportedModelError(
            f"{where} is a {kind}, spread over ranks; give a model whose tables this process holds itself"
        )
    elif hasattr(weight, "__tensor_flatten__"):
        raise UnsupportedModelError(
            f"{where} is a {class_name(type(weight))}, whose rows can't be stored; make it a plain dense tensor"
        )
    if weight.is_meta:
        raise UnsupportedModelError(
            f"{where} is on the meta device, without values; materialize the model before"
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


def note_sharing(
    model: nn.Module, tables: Collection[Table], entries: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Add to `shared_with` other modules that have a table's parameter, and other tensors over its memory.

    `entries`: tensors of the model's state dict, by stored name.
    """
    wrappers = wrapper_paths(model)
    by_parameter = {id(table.parameter): table for table in tables}
    for path, module in named_modules(model):
        for attribute, parameter in module._parameters.items():
            table = by_parameter.get(id(parameter))
            if table is None or (module in table.modules and attribute == "weight"):
                continue
            name = f"{path}.{attribute}" if path else attribute
            if table.sharded is None or name != table.key:
                table.share_with(path or attribute)
    own = {clean_name(key, wrappers): tensor for key, tensor in _own_tensors(model)}
    named = {**own, **(entries or {})}
    names = {id(tensor): name for name, tensor in named.items()}
    for pair in overlapping(named.values()):
        for tensor, other in (pair, pair[::-1]):
            if (table := by_parameter.get(id(tensor))) is not None:
                table.share_with(names[id(other)])


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, also those that are not in the state dict."""
    return itertools.chain(model.named_parameters(), model.named_buffers())
