"""A small model that TorchRec shards in every way over the ranks of a group, and random batches for it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore"
    )  # what these packages warn of when they are imported is no concern of ours
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        KeyedJaggedTensor,
    )
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingPlan

__all__ = [
    "DistributedModelParallel",
    "EmbOptimType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingComputeKernel",
    "KeyedJaggedTensor",
    "ShardingPlan",
    "TrainPipelineSparseDist",
    "construct_module_sharding_plan",
    "data_parallel",
    "table_wise",
]

ROWS = 103
"""Of each table: no number of ranks divides it."""
FEW = {"K": 2}
"""But of these, of which the third rank has none."""
DIM = 8
BAGS = {"A": "a", "B": "bs", "C": "cs", "D": "d", "E": "es", "F": "f", "K": "k"}
"""Tables of the bag collection, each with the features that look up in it. ``s`` is shared by three."""
SEQUENCES = {"G": "g", "H": "h", "I": "i"}
FEATURES = "abcdefksghi"


class Model(nn.Module):
    def __init__(self, weighted: bool, without: str) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.bags = EmbeddingBagCollection(
            device=meta,
            is_weighted=weighted,
            tables=[
                EmbeddingBagConfig(
                    name=n, embedding_dim=DIM, num_embeddings=FEW.get(n, ROWS), feature_names=list(f)
                )
                for n, f in BAGS.items()
                if n not in without
            ],
        )
        self.sequences = EmbeddingCollection(
            device=meta,
            tables=[
                EmbeddingConfig(name=n, embedding_dim=DIM, num_embeddings=ROWS, feature_names=list(f))
                for n, f in SEQUENCES.items()
            ],
        )
        self.over = nn.Linear(DIM, 1)

    def forward(self, batch: Any) -> Any:
        return total(self.over, self.bags(batch).values(), self.sequences(batch))


@torch.fx.wrap  # the pipeline traces the model
def total(
    over: nn.Module, bags: torch.Tensor, sequences: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss, and what it is made of."""
    found = [*torch.split(bags, DIM, dim=1), *(each.values() for each in sequences.values())]
    return torch.stack([(over(each) ** 2).sum() + each.sum() for each in found]).sum(), bags


def sharded_model(
    world: int, optimizer: str = "EXACT_ROWWISE_ADAGRAD", weighted: bool = False, without: str = "K"
) -> Any:
    """The model under `DistributedModelParallel`, without some tables.

    FBGEMM 1.8 fails in some backward passes on a CPU where a shard has no rows, as one of table K.
    """
    model = Model(weighted, without)
    fused = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1}
    sharders = [
        EmbeddingBagCollectionSharder(fused_params=dict(fused)),
        EmbeddingCollectionSharder(fused_params=dict(fused)),
    ]
    kernel = EmbeddingComputeKernel.FUSED.value
    last = world - 1
    ways = {
        "A": table_wise(rank=0, compute_kernel=kernel),
        "B": row_wise(compute_kernel=kernel),
        "C": column_wise(ranks=[last, last], compute_kernel=kernel),
        "D": data_parallel(),
        "E": row_wise(compute_kernel=kernel),
        "F": column_wise(ranks=[0, last], compute_kernel=kernel),
        "K": row_wise(compute_kernel=kernel),
        "G": row_wise(compute_kernel=kernel),
        "H": column_wise(ranks=[last, last], compute_kernel=kernel),
        "I": table_wise(rank=last, compute_kernel=kernel),
    }
    plan = {
        path: construct_module_sharding_plan(
            getattr(model, path),
            {name: ways[name] for name in tables if name not in without},
            sharder=sharder,
            world_size=world,
            local_size=world,
            device_type="cpu",
        )
        for (path, tables), sharder in zip(
            {"bags": BAGS, "sequences": SEQUENCES}.items(), sharders, strict=True
        )
    }
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan), sharders=sharders
    )


def batch(seed: int, size: int = 4, weighted: bool = False, most: int = 3) -> Any:
    """Up to `most` ids for each feature and example, with repetitions."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(FEATURES) * size,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    few = FEATURES.index("k") * size
    values[lengths[:few].sum() : lengths[: few + size].sum()] %= FEW["K"]
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(list(FEATURES), values, lengths, weights)
