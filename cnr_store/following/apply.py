"""Writes the blocks of an update into a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.dense import read_dense
from cnr_store.errors import CorruptionError, ModelMismatchError, UnsupportedModelError
from cnr_store.format.layout import dense_path, weight_path
from cnr_store.format.record import Record
from cnr_store.format.validate import member, shown
from cnr_store.reading.blocks import Block
from cnr_store.reading.opening import model_arrays
from cnr_store.training.distributed.pieces import is_dtensor
from cnr_store.training.loading.match import Selection, match_model
from cnr_store.training.loading.module_load import ModuleLoad
from cnr_store.training.loading.validate_state import decode_tree
from cnr_store.training.model.dense_state import (
    Loaders,
    dense_items,
    dense_tensors,
    extra_state,
    named_state,
    remade_names,
)
from cnr_store.training.model.tables import find_tables
from cnr_store.training.model.tensors import (
    assign_dense,
    assign_ids,
    dense_tensor,
    dtype_name,
    has_numpy_type,
)


def block_writer(catalog: Catalog, record: Record, model: nn.Module) -> Callable[[Iterable[Block]], None]:
    """A function that writes blocks of `record` into `model`, in place, and then has modules load their extra state.

    Hooks of ``load_state_dict`` run then, too, and loaders of the modules' own.
    """
    tables = find_tables(model)
    loaders = Loaders(model)
    match = match_model(catalog, record, model, tables, Selection(), loaders)
    versions = decode_tree(catalog, record, member(catalog.state(record), "module_versions"), match.where)
    match.versions = versions if isinstance(versions, dict) else None
    given = dict(_read_extra_state(catalog, record, model, match.where))
    # An update lacks what is unchanged, and modules that change what they are given need what is stored.
    for name in filter(loaders.may_take, [*match.tensors, *match.handed]):
        given[name] = dense_tensor(*read_dense(catalog, record, dense_path("model", name)))
    weights = {weight_path(table.name): table.parameter for table in tables}
    # Blocks carry the names that readers see; a table's parameter may be named otherwise.
    by_name: dict[str, torch.Tensor] = {
        name: weights[path] for name, path in model_arrays(record).items() if path in weights
    }
    by_name |= (dense := dense_tensors(model, tables))
    if remade := remade_names(dense, dense_items(model, tables)):
        raise UnsupportedModelError(
            f"{remade[0]!r} of the model's state dict is no tensor of the model: a module makes it anew each time; "
            "follow with a model that keeps it in a buffer, or returns it from get_extra_state"
        )
    if spread := [name for name, tensor in by_name.items() if is_dtensor(tensor)]:
        raise UnsupportedModelError(
            f"{spread[0]!r} of the model is a DTensor, spread over ranks; follow with a model that this process holds "
            "itself"
        )

    def write(blocks: Iterable[Block]) -> None:
        for name, rows, values in blocks:
            if rows is None and name in given:
                continue
            if rows is None:
                tensor = by_name[name]
                stored = None if has_numpy_type(tensor.dtype) else dtype_name(tensor.dtype)
                assign_dense(tensor, values, stored)
            else:
                assign_ids(by_name[name], rows, values)
        if given or loaders.act:
            ModuleLoad(model, tables, match, given).run([table.name for table in tables])

    return write


def _read_extra_state(catalog: Catalog, record: Record, model: nn.Module, where: str) -> Mapping[str, object]:
    """The extra state of the model's modules, proven to be theirs.

    The rest of the state is not read into arrays.
    """
    if not (own := extra_state(named_state(model))):
        return {}
    extra = decode_tree(catalog, record, member(catalog.state(record), "extra_state"), where)
    if not isinstance(extra, dict) or not all(isinstance(name, str) for name in extra):
        raise CorruptionError(f"{where}: the state is malformed: extra_state is {shown(extra)}")
    if extra.keys() != own.keys():
        raise ModelMismatchError(
            f"{where} holds the extra state {sorted(extra)}, and the model has {sorted(own)}; follow with the model "
            "that was saved"
        )
    return extra
