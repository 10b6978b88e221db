"""A job whose tables have a learning rate each, and one that gives all of them one rate. The last rank holds all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.optim import apply_optimizer_in_backward

import cnr_store
from cnr_store.training.distributed.torchrec import find_sharded
from cnr_store.training.model.names import named_modules
from tests.test_store.support.distributed.fused_elsewhere import Model
from tests.test_store.support.distributed.sharded_model import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingComputeKernel,
    EmbOptimType,
    ShardingPlan,
    construct_module_sharding_plan,
    table_wise,
)


def run(url: str) -> tuple[str, list[float], list[float]]:
    """What a job with one rate is told, the rates that it has then, and those of a job with two."""
    saved = _sharded({"A": 0.1, "B": 0.5})
    with cnr_store.Checkpointer(url, saved, [saved.fused_optimizer], bits=32) as checkpointer:
        checkpointer.save(1).result()
    joined, told = _sharded({}), ""
    with cnr_store.Checkpointer(url, joined, [joined.fused_optimizer], bits=32) as checkpointer:
        try:
            checkpointer.load()
        except cnr_store.CheckpointError as error:
            told = str(error)
    apart = _sharded({"A": 0.2, "B": 0.3})
    with cnr_store.Checkpointer(url, apart, [apart.fused_optimizer], bits=32) as checkpointer:
        checkpointer.load()
    return told, _rates(joined), _rates(apart)


def _rates(model: Any) -> list[float]:
    tables = [table for module in find_sharded(named_modules(model)) for table in module.tables]
    return [round(table.settings()["lr"], 6) for table in tables if table.kernels]


def _sharded(rates: dict[str, float]) -> Any:
    model, world = Model(), dist.get_world_size()
    for name, rate in rates.items():
        apply_optimizer_in_backward(torch.optim.SGD, [model.bags.embedding_bags[name].weight], {"lr": rate})
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    )
    ways = {name: table_wise(world - 1, compute_kernel=EmbeddingComputeKernel.FUSED.value) for name in "AB"}
    plan = construct_module_sharding_plan(
        model.bags, ways, sharder=sharder, world_size=world, local_size=world, device_type="cpu"
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"bags": plan}), sharders=[sharder]
    )
