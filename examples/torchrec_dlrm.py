"""Train the demo's features on MovieLens-100k with TorchRec, tables sharded over ranks, and checkpoint them.

    torchrun --nproc-per-node 2 examples/torchrec_dlrm.py STORE [STEPS]

Run it again with more steps, and with any number of ranks: it resumes from the newest checkpoint. The data set is
fetched as for `movielens_adagrad.py`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import distributed, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

import cnr_store
from movielens import BAGS, Features, TimeOrderedReader, auc, find_data, load_features

DIM, BATCH, STEPS_PER_SAVE, WIDE_ROWS = 16, 48, 50, 4_096


class Dlrm(nn.Module):
    """Logit of "this user rates this item 4 or 5": embedding tables under a perceptron."""

    def __init__(self, features: Features, device: str) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=DIM,
                num_embeddings=rows,
                feature_names=[name],
                pooling=torchrec.PoolingType.MEAN,
            )
            for name, rows in features.rows.items()
        ]
        self.sparse = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device(device))
        self.top = nn.Sequential(nn.Linear(DIM * len(tables), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.top(self.sparse(ids).values())
        return logits.squeeze(1)


class SharedReader(TimeOrderedReader):
    """The same batches on all ranks, of which each takes its part: any number of ranks goes on where others stood."""

    @staticmethod
    def split_state(states: list[Any], rank: int, world: int) -> Any:
        """The state for one of `world` ranks, of those that another number of ranks saved."""
        return states[0]


def select(features: Features, samples: Any) -> tuple[torchrec.KeyedJaggedTensor, torch.Tensor]:
    """The model's input and labels for `samples`."""
    values, lengths = [], []
    for name, column in features.columns.items():
        ids = torch.from_numpy(column[samples]).reshape(len(samples), -1)
        used = (
            ids != 0 if name in BAGS else torch.ones_like(ids, dtype=torch.bool)
        )  # bags are filled up with 0
        values.append(ids[used])
        lengths.append(used.sum(dim=1))
    ids = torchrec.KeyedJaggedTensor(
        keys=list(features.columns), values=torch.cat(values), lengths=torch.cat(lengths)
    )
    return ids, torch.from_numpy(features.labels[samples])


def shard(model: Dlrm, rank_count: int) -> DistributedModelParallel:
    """Spread the tables over the ranks: wide ones by rows, each of the others on one rank."""
    kernel = EmbeddingComputeKernel.FUSED.value
    sharder: Any = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    )
    ways = {
        table.name: row_wise(compute_kernel=kernel)
        if table.num_embeddings >= WIDE_ROWS
        else table_wise(rank=position % rank_count, compute_kernel=kernel)
        for position, table in enumerate(model.sparse.embedding_bag_configs())
    }
    plan = construct_module_sharding_plan(
        model.sparse, ways, sharder, local_size=rank_count, world_size=rank_count, device_type="cpu"
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"sparse": plan}), sharders=[sharder]
    )


def main(url: str, steps: int = 500) -> None:
    """Train to step `steps`, counting those of earlier starts. The first rank prints how well the result ranks."""
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(1)
    features = load_features(find_data(say=print if rank == 0 else lambda _: None))
    model = shard(Dlrm(features, "meta"), world)
    dense = torch.optim.Adagrad(
        dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.02
    )
    reader = SharedReader(features.train, BATCH)
    with cnr_store.Checkpointer(url, model, [model.fused_optimizer, dense], bits=8) as checkpointer:
        resumed = checkpointer.resume(reader=reader)
        if rank == 0:
            print(f"{world} ranks go on from step {resumed}", flush=True)
        for step in range(resumed + 1, steps + 1):
            samples = next(reader)
            part = len(samples) // world  # the same on all ranks, as TorchRec wants it
            ids, labels = select(features, samples[rank * part : (rank + 1) * part])
            loss: Any = binary_cross_entropy_with_logits(model(ids), labels)
            dense.zero_grad()
            loss.backward()
            dense.step()
            if step % STEPS_PER_SAVE == 0 or step == steps:
                checkpointer.save(step, reader=reader)
    distributed.destroy_process_group()
    if rank == 0:
        print(f"AUC of step {steps}, as loaded by one process: {evaluate(url, features):.4f}", flush=True)


def evaluate(url: str, features: Features) -> float:
    """Load the newest version into a model of one process, and rank what no run trained on."""
    model = Dlrm(features, "cpu")
    cnr_store.load(url, model)
    held_out = np.arange(features.train, len(features))
    with torch.no_grad():
        ids, _ = select(features, held_out)
        scores = model(ids)
    return auc(features.labels[held_out], scores.numpy())


if __name__ == "__main__":
    if len(sys.argv) < 2 or "RANK" not in os.environ:
        sys.exit(f"usage: torchrun --nproc-per-node 2 {sys.argv[0]} STORE [STEPS]")
    main(sys.argv[1], *map(int, sys.argv[2:3]))
