"""A job whose first rank holds no row of any table that a fused optimizer trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cnr_store
from tests.test_store.support.distributed.sharded_model import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingComputeKernel,
    EmbOptimType,
    KeyedJaggedTensor,
    ShardingPlan,
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)

ROWS, DIM = 50, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name.lower()]
            )
            for name in "AB"
        ]
        self.bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        found = self.bags(ids)
        total: torch.Tensor = sum((found[name] ** 2).sum() for name in "ab")
        return total


def run(url: str) -> list[Any]:
    """Train, save, and load again. Returns what this rank's memory had and has of the fused state."""
    world, model = dist.get_world_size(), Model()
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    ways = {"A": data_parallel(), "B": table_wise(1, compute_kernel=EmbeddingComputeKernel.FUSED.value)}
    plan = construct_module_sharding_plan(
        model.bags, ways, sharder=sharder, world_size=world, local_size=world, device_type="cpu"
    )
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"bags": plan}), sharders=[sharder]
    )
    stepping = torch.optim.SGD([each for name, each in model.named_parameters() if ".A." in name], lr=0.1)
    options: Any = {"bits": 32, "policy": "consecutive", "failures": cnr_store.Failures(timeout_seconds=30)}
    with cnr_store.Checkpointer(url, model, [model.fused_optimizer, stepping], **options) as checkpointer:
        for step in (1, 2):
            ids = KeyedJaggedTensor(
                ["a", "b"], torch.arange(8) + step, lengths=torch.ones(8, dtype=torch.int64)
            )
            model(ids).backward()
            stepping.step()
            stepping.zero_grad()
            checkpointer.save(step).result()
        before = _momentum(model)
        for each in _live(model):
            each.zero_()
        checkpointer.load()
        return [before, _momentum(model)]


def _live(model: Any) -> list[torch.Tensor]:
    state = model.fused_optimizer.state_dict()["state"]
    return [
        shard.tensor for slots in state.values() for value in slots.values() for shard in value.local_shards()
    ]


def _momentum(model: Any) -> list[list[float]]:
    return [each.tolist() for each in _live(model)]
