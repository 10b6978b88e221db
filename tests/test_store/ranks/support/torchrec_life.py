"""What each rank of a TorchRec job does in its life: resume, check what was loaded, train, save. Needs TorchRec."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
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

import cnr_store
from cnr_store.training.distributed.torchrec import find_sharded
from cnr_store.training.model.names import named_modules
from tests.test_store.ranks.support.rank_processes import reach

ROWS, DIM, BATCH = 203, 16, 12
FUSED = EmbeddingComputeKernel.FUSED.value


class Model(nn.Module):
    """Tables named by letters, the last of which every rank has whole."""

    def __init__(self, names: str) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=ROWS + place, feature_names=[name.lower()]
            )
            for place, name in enumerate(names)
        ]
        self.ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        self.over = nn.Linear(DIM * len(names), 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.over(self.pooled(ids))
        return logits

    def pooled(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """What is looked up, in the order of the tables: that of TorchRec's output depends on the sharding."""
        found, features = self.ebc(ids), ids.keys()
        return torch.cat([found[feature] for feature in features], dim=1)


class Job:
    """One rank of a job.

    Parameters
    ----------
    sharding
        A letter for each table: r (by rows), t (whole), c and q (two and four column shards), d (on every rank).
    optimizer
        The fused one's name.
    """

    def __init__(self, sharding: str, optimizer: str) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.names = "ABCDEF"[: len(sharding)]
        model = Model(self.names)
        sharder = EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1}
        )
        shardings = zip(self.names, sharding, strict=True)
        plan = construct_module_sharding_plan(
            model.ebc,
            {name: self._how(letter, place) for place, (name, letter) in enumerate(shardings)},
            sharder=sharder,
            world_size=self.world,
            local_size=self.world,
            device_type="cpu",
        )
        self.dmp = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
        )
        parameters = [one for _, one in in_backward_optimizer_filter(self.dmp.named_parameters())]
        self.dense = torch.optim.Adagrad(parameters, lr=0.1)
        with torch.no_grad():  # alike on any number of ranks
            for name, (shape, pieces) in self.arrays().items():
                if name.endswith(".weight"):
                    seed = torch.Generator().manual_seed(ord(name.split(".")[-2][0]))
                    whole = torch.rand(shape, generator=seed) - 0.5
                    for piece in pieces:
                        piece.tensor.copy_(_box(whole, piece))

    def _how(self, letter: str, place: int) -> Any:
        first, second = place % self.world, (place + 1) % self.world
        return {
            "r": lambda: row_wise(compute_kernel=FUSED),
            "t": lambda: table_wise(rank=first, compute_kernel=FUSED),
            "c": lambda: column_wise(ranks=[first, second], compute_kernel=FUSED),
            "q": lambda: column_wise(ranks=[first, second] * 2, compute_kernel=FUSED),
            "d": data_parallel,
        }[letter]()

    def arrays(self) -> dict[str, Any]:
        """By name, the shape of each sharded array and the pieces of it that are here."""
        found: dict[str, Any] = {}
        for module in find_sharded(named_modules(self.dmp)):
            for table in module.tables:
                found[table.name] = table.shape, table.pieces
                for slot, kept in table.slots.items():
                    found[f"{table.name}/{slot}"] = kept.shape, kept.pieces
        return found

    def gathered(self) -> dict[str, torch.Tensor]:
        """Everything that training changes, whole, on all ranks."""
        found = {}
        for name, (shape, pieces) in self.arrays().items():
            whole, least = torch.full(shape, -torch.inf), torch.full(shape, torch.inf)
            for piece in pieces:
                _box(whole, piece).copy_(piece.tensor)
                _box(least, piece).copy_(piece.tensor)
            dist.all_reduce(whole, dist.ReduceOp.MAX)
            dist.all_reduce(least, dist.ReduceOp.MIN)
            assert torch.equal(whole, least), f"{name}: a part that no rank has, or replicas that differ"
            found[name] = whole
        found |= {name: value.clone() for name, value in self.dmp.state_dict().items() if "over" in name}
        names = {id(one): name for name, one in self.dmp.named_parameters()}
        for parameter, state in self.dense.state.items():
            found[f"{names[id(parameter)]}/sum"] = state["sum"].clone()
        return found

    def ids(self, step: int) -> KeyedJaggedTensor:
        """This rank's part of a batch that is the same on any number of ranks."""
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, ROWS, (len(self.names), BATCH, 2), generator=generator)
        mine = ids[:, self.rank * BATCH // self.world : (self.rank + 1) * BATCH // self.world]
        keys = [name.lower() for name in self.names]
        return KeyedJaggedTensor(keys, mine.reshape(-1), lengths=torch.full((len(keys) * mine.shape[1],), 2))

    def outputs(self) -> torch.Tensor:
        """What the model says of one fixed batch, on all ranks. A product of matrices would depend on its part here."""
        out = torch.zeros(BATCH)
        with torch.no_grad():
            pooled = self.dmp.module.pooled(self.ids(10**6)).double()
            mine = (pooled * self.dmp.module.over.weight).sum(dim=1)
        first = self.rank * BATCH // self.world
        out[first : first + len(mine)] = mine
        dist.all_reduce(out)
        return out

    def train(self, step: int) -> None:
        self.dense.zero_grad()
        # Ranks' gradients are averaged.
        loss = ((self.dmp(self.ids(step)) - step % 3) ** 2).sum() / BATCH * self.world
        loss.backward()
        self.dense.step()


def _box(whole: torch.Tensor, piece: Any) -> torch.Tensor:
    rows = whole[piece.first_row : piece.first_row + len(piece.tensor)]
    if whole.ndim == 1:
        return rows
    return rows[:, piece.first_column : piece.first_column + piece.tensor.shape[1]]


def life(folder: str, sharding: str, optimizer: str, last_step: int, dies: bool) -> dict[str, Any]:
    """Go on with the run in `folder` until a step, saving each; then die in the middle of a save, or end.

    What was loaded is left in ``loadedSTEP.pt``, and what each step made in ``STEP.pt``.

    Returns
    -------
    The step begun at, and what was logged.
    """
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cnr_store").addHandler(handler)
    job = Job(sharding, optimizer)

    def leave(name: str) -> None:
        found = {**job.gathered(), "outputs": job.outputs()}
        if job.rank == 0:
            torch.save(found, Path(folder, f"{name}.pt"))

    with cnr_store.Checkpointer(
        f"{folder}/store",
        job.dmp,
        [job.dmp.fused_optimizer, job.dense],
        bits=32,
        policy="consecutive",
        failures=cnr_store.Failures(timeout_seconds=60),
    ) as checkpointer:
        start = checkpointer.resume()
        leave(f"loaded{start}")
        for step in range(start + 1, last_step + 1):
            job.train(step)
            leave(str(step))
            checkpointer.save(step)
        if dies:
            reach("kill")
    return {"start": start, "logged": logged}
