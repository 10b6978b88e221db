"""A model of TorchRec whose tables are sharded in another way each time that it is made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cnr_store
from cnr_store.training.model.trained_model import TrainedModel
from tests.test_store.support.distributed.rank_training import alike, digest

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore"
    )  # what these packages warn of when they are imported is no concern of ours
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
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
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

ROWS, DIM, NAMES, EXAMPLES = 203, 8, "ABCD", 12
DENSE: dict[str, Any] = {
    "EXACT_SGD": torch.optim.SGD,
    "EXACT_ADAGRAD": torch.optim.Adagrad,
    "EXACT_ROWWISE_ADAGRAD": RowWiseAdagrad,
    "ADAGRAD_AND_SGD": torch.optim.SGD,
}
"""What steps tables that every rank has whole, by what trains the others."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=DIM,
                    num_embeddings=ROWS + number,
                    feature_names=[name.lower()],
                )
                for number, name in enumerate(NAMES)
            ],
        )
        self.over = nn.Linear(DIM * len(NAMES), 1, bias=False)

    def forward(self, batch: Any) -> torch.Tensor:
        result: torch.Tensor = self.over(self.bags(batch).values().float())
        return result


def made(optimizer: str, ways: str) -> tuple[Any, list[torch.optim.Optimizer]]:
    """The model with its tables sharded in these ways, and its optimizers."""
    world, kernel = dist.get_world_size(), EmbeddingComputeKernel.FUSED.value
    torch.manual_seed(0)
    model = Model()
    fused = "EXACT_ADAGRAD" if optimizer == "ADAGRAD_AND_SGD" else optimizer
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType[fused], "learning_rate": 0.1}
    )
    kinds: dict[str, Any] = {
        "tw": lambda number: table_wise(rank=number % world, compute_kernel=kernel),
        "rw": lambda _: row_wise(compute_kernel=kernel),
        "cw": lambda number: column_wise(ranks=[number % world, (number + 1) % world], compute_kernel=kernel),
        "dp": lambda _: data_parallel(),
    }
    plan = construct_module_sharding_plan(
        model.bags,
        {
            name: kinds[way](number)
            for number, (name, way) in enumerate(zip(NAMES, ways.split(), strict=True))
        },
        sharder=sharder,
        world_size=world,
        local_size=world,
        device_type="cpu",
    )
    spread = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"bags": plan}), sharders=[sharder]
    )
    stepped = [one for _, one in in_backward_optimizer_filter(spread.named_parameters())]
    return spread, [spread.fused_optimizer, DENSE[optimizer](stepped, lr=0.1)]


def batch(step: int) -> Any:
    """This rank's part of a batch that is the same on every number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (len(NAMES), EXAMPLES, 2), generator=generator)
    own = ids[:, rank * EXAMPLES // world : (rank + 1) * EXAMPLES // world]
    lengths = torch.full((len(NAMES) * own.shape[1],), 2)
    return KeyedJaggedTensor(keys=list(NAMES.lower()), values=own.reshape(-1), lengths=lengths)


def bits(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, str]:
    """The bits of all rows and of what is kept for them, by table and what it is: the same on all ranks."""
    found = {}
    for array in TrainedModel.from_arguments(model, optimizers).row_arrays():
        whole = torch.zeros((*array.shape, 1)[:2])
        for part in array.parts:
            rows = slice(array.table.first_row, array.table.first_row + array.table.local_rows)
            columns = slice(part.first_column, part.first_column + part.columns)
            whole[rows, columns] = part.tensor.detach().reshape(-1, part.columns)
        if getattr(array.table, "is_fused", False):
            dist.all_reduce(whole)
        found[f"{array.table.name}/{'weight' if array.is_weight else 'kept'}"] = digest(whole)
    return found


def go_on(url: Path, optimizer: str, ways: str, strict: str = "raise") -> dict[str, Any]:
    """Load what is stored, if anything is, train, and save twice."""
    warnings.simplefilter("ignore")
    model, optimizers = made(optimizer, ways)
    with cnr_store.Checkpointer(
        url, model, optimizers, policy="consecutive", bits=32, failures=cnr_store.Failures(timeout_seconds=30)
    ) as checkpointer:
        loaded: dict[str, Any] = {}
        missing: tuple[str, ...] = ()
        start, over = 0, ""
        if cnr_store.versions(url):
            restored = checkpointer.load(strict=strict)  # type: ignore[arg-type]
            start, missing, loaded = restored.step, restored.missing, alike(bits(model, optimizers))
            over = digest(model.state_dict()["over.weight"])
        rows = []
        for step in range(start + 1, start + 3):
            optimizers[1].zero_grad()
            model(batch(step)).sum().backward()
            optimizers[1].step()
            rows.append(checkpointer.save(step).result().rows)
    return {
        "loaded": loaded,
        "over": over,
        "missing": missing,
        "rows": alike(rows),
        "trained": alike(bits(model, optimizers)),
        "trained over": digest(model.state_dict()["over.weight"]),
    }
