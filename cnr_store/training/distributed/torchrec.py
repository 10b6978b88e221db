"""Embedding tables that TorchRec shards over ranks.

TorchRec groups tables into lookups, one for each way to shard. A lookup has kernels, and each kernel holds the local
shards of some tables, with the state of the optimizer that changes them in the backward pass. Classes are looked up
among the modules that are imported already, because importing TorchRec takes long and it may not be installed. Nothing
here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.distributed.fused_optimizers import FusedOptimizer
from cnr_store.training.distributed.pieces import LocalPiece
from cnr_store.training.distributed.sharded import (
    ShardedModule,
    ShardedTable,
    Slot,
    attribute,
    bare_lookups,
)

_KERNELS = {"fused", "fused_uvm", "fused_uvm_caching", "dense"}
_COLLECTIONS = {
    "ShardedEmbeddingBagCollection": "embedding_bags",
    "ShardedEmbeddingCollection": "embeddings",
}
"""Classes that are known, with what stands before a table's name in their state dicts."""
_OUTER = {"ShardedFeatureProcessedEmbeddingBagCollection"}
"""Classes that leave rows to a known one inside them."""
_WRAPPERS = (AveragedModel, DataParallel, DistributedDataParallel)


def find_sharded(model: nn.Module) -> list[ShardedModule]:
    """The modules of `model` whose tables TorchRec shards, with their live memory.

    `model`: a ``DistributedModelParallel``, a module that has or is in one, or any other module, which has none.
    """
    base = getattr(sys.modules.get("torchrec.distributed.embedding_types"), "ShardedEmbeddingModule", None)
    if base is None:
        return []
    found = []
    for path, module in _named_modules(model):
        kind = type(module).__name__
        if kind == "DMPCollection":
            raise UnsupportedModelError(
                "DMPCollection holds replicas of tables that differ between its syncs; use DistributedModelParallel"
            )
        if not isinstance(module, base) or kind in _OUTER:
            continue
        if kind not in _COLLECTIONS:
            raise UnsupportedModelError(
                f"{path or 'the model'} is a {kind}, which changes rows by more than lookups; shard an "
                "EmbeddingBagCollection or an EmbeddingCollection"
            )
        tables = _tables(module, ".".join(filter(None, (path, _COLLECTIONS[kind]))))
        found.append(ShardedModule(path, module, tables))
    return found


def _named_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules by their paths without what wrappers add. The first path of a module counts."""
    seen: set[int] = set()
    stack = [(path, model)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        for name, child in reversed(list(module.named_children())):
            wrapped = name in ("_dmp_wrapped_module", "_orig_mod") or (
                name == "module" and isinstance(module, _WRAPPERS)
            )
            stack.append((path if wrapped else f"{path}.{name}" if path else name, child))


def _tables(module: nn.Module, prefix: str) -> list[ShardedTable]:
    tables: dict[str, ShardedTable] = {}
    shards: dict[str, list[Any]] = {}
    for shard in _all_shards(module):
        shards.setdefault(shard.name, []).append(shard)
    for name, found in shards.items():
        tables[name] = _table(f"{prefix}.{name}.weight", found)
    for lookup in bare_lookups(module):
        for kernel in lookup.modules():
            if hasattr(kernel, "emb_module") and hasattr(kernel, "split_embedding_weights"):
                _add_memory(tables, kernel)
    return list(tables.values())


def _all_shards(module: nn.Module) -> Iterator[Any]:
    """The ``ShardedEmbeddingTable`` of all ranks' shards."""
    found = attribute(module, "_embedding_shardings", "_sharding_type_to_sharding")
    for sharding in found.values() if isinstance(found, Mapping) else found:
        for groups in attribute(sharding, "_grouped_embedding_configs_per_rank"):
            for group in groups:
                yield from group.embedding_tables


def _table(name: str, shards: list[Any]) -> ShardedTable:
    """A table without local memory so far, of all ranks' shards."""
    first = shards[0]
    kernel = first.compute_kernel.value
    if kernel not in _KERNELS or first.use_virtual_table:
        raise UnsupportedModelError(
            f"table {name!r} has the compute kernel {kernel!r}, whose rows are not in plain memory; "
            f"use one of {', '.join(sorted(_KERNELS))}"
        )
    shape = (first.num_embeddings, first.embedding_dim)
    optimizer = None if kernel == "dense" else FusedOptimizer.of(first.fused_params or {}, name)
    slots = {}
    columns = tuple(sorted({first_of(shard)[1] for shard in shards}))
    for slot, rowwise in optimizer.slots.items() if optimizer else ():
        if not rowwise:
            slots[slot] = Slot(shape)
        elif len(columns) == 1:
            slots[slot] = Slot(shape[:1])
        else:
            slots[slot] = Slot((shape[0], len(columns)), columns)
    return ShardedTable(
        name,
        shape,
        _dtype(first, name),
        replicated=first.local_metadata is None,
        cached=kernel == "fused_uvm_caching",
        optimizer=optimizer,
        slots=slots,
    )


def _dtype(shard: Any, name: str) -> torch.dtype:
    names = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
    if (kind := shard.data_type.name) not in names:
        raise UnsupportedModelError(f"table {name!r} is of {kind}; tables are of {', '.join(names)}")
    return names[kind]


def first_of(shard: Any) -> tuple[int, int]:
    """The first row and column of a ``ShardedEmbeddingTable``."""
    if shard.local_metadata is None:
        return 0, 0
    row, column = shard.local_metadata.shard_offsets
    return row, column


def _add_memory(tables: dict[str, ShardedTable], kernel: Any) -> None:
    """Add the live memory of a kernel's shards to their tables."""
    shards = kernel.config.embedding_tables
    weights = kernel.split_embedding_weights()
    for shard, weight in zip(shards, weights, strict=True):
        table = tables[shard.name]
        if weight.is_meta or tuple(weight.shape) != (shard.local_rows, shard.local_cols):
            raise UnsupportedModelError(
                f"a shard of table {table.name!r} lies on {weight.device} with the shape {tuple(weight.shape)}, not "
                f"{(shard.local_rows, shard.local_cols)} in memory; move the model to its device first"
            )
        if weight.numel():
            table.pieces.append(LocalPiece(*first_of(shard), weight.detach()))
        if kernel not in table.kernels:
            table.kernels.append(kernel)
    if not hasattr(kernel, "fused_optimizer"):
        return
    for shard, state in zip(shards, kernel.emb_module.get_optimizer_state(), strict=False):
        _add_state(tables[shard.name], shard, list(state.items()))


def _add_state(table: ShardedTable, shard: Any, state: list[tuple[str, torch.Tensor]]) -> None:
    """Add the live state of a shard's optimizer. There is none of plain gradient descent."""
    row, column = first_of(shard)
    # TorchRec gives the first state this name, whatever FBGEMM calls it.
    named = {"momentum1" if place == 0 else key: value for place, (key, value) in enumerate(state)}
    named.pop("iter", None)  # a number for all rows
    if named.keys() != table.slots.keys():
        raise UnsupportedModelError(
            f"the optimizer of table {table.name!r} has the state {sorted(named)}, not {sorted(table.slots)} as its "
            "settings say; install the FBGEMM release that belongs to TorchRec 1.8"
        )
    for name, value in named.items():
        slot, value = table.slots[name], value.detach()
        if slot.boundaries:
            column_shard = slot.boundaries.index(column)
            slot.pieces.append(LocalPiece(row, column_shard, value.unsqueeze(1)))
        elif value.numel():
            slot.pieces.append(LocalPiece(row, column if value.ndim == 2 else 0, value))
