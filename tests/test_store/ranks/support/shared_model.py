"""A small model of which ranks share the rows of one table, and the same model in one process.

The table of items has rows on each rank, cut where no chunk begins, so that ranks exchange rows in every save. The
table of users and the dense part are replicas, which every rank trains alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.optim import Adagrad

import cnr_store
from cnr_store import Checkpointer
from cnr_store.format import grid
from cnr_store.ranks import placement
from cnr_store.training.distributed.pieces import LocalPiece
from cnr_store.training.distributed.sharded import ShardedTable
from cnr_store.training.distributed.torchrec import FusedOptimizer
from cnr_store.training.model import trained_model
from cnr_store.training.model.tables import Table, find_tables, spread_table

Values = Mapping[str, np.ndarray[Any, Any]]
USERS, ITEMS, DIM = 200, 400, 8
GRID_LIMITS_BYTES = {
    "TARGET_CHUNK_BYTES": 256,
    "MAX_CHUNK_BYTES": 1024,
    "TARGET_SHARD_BYTES": 1024,
    "MAX_SHARD_BYTES": 4096,
}


class SharedModel(nn.Module):
    """The part of the model that a rank holds.

    Parameters
    ----------
    rank, world
        Which rank of how many.
    """

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.users = nn.EmbeddingBag(USERS, DIM, mode="sum", sparse=True)
        self.top = nn.Linear(DIM, 1)
        edges = [ITEMS * each // world for each in range(world + 1)]
        self.first = edges[rank]
        items = torch.arange(ITEMS * DIM, dtype=torch.float32).reshape(ITEMS, DIM) / 7
        self.items = items[
            self.first : edges[rank + 1]
        ].clone()  # no parameter: torch knows nothing of shards
        self.optimizer: torch.optim.Optimizer = Adagrad(
            [*self.users.parameters(), *self.top.parameters()], lr=0.3
        )

    def table(self) -> Table:
        """The table of items, as one that is sharded."""
        pieces = [LocalPiece(self.first, 0, self.items)]
        sgd = FusedOptimizer("exact_sgd", {})
        place = ShardedTable("items.weight", (ITEMS, DIM), torch.float32, False, False, sgd, {}, pieces)
        return spread_table(place, None)

    def train(self, step: int, checkpointer: Checkpointer) -> None:  # type: ignore[override]
        """One step, alike on every number of ranks."""
        ids = torch.arange(step, USERS, 3)
        self.top(self.users(ids[None])).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        changed = torch.arange(step % 2, ITEMS, 2)
        own = changed[(changed >= self.first) & (changed < self.first + len(self.items))] - self.first
        self.items[own] = self.items[own] * 0.75 + step
        checkpointer.touch("items", changed)

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of all values that this rank holds."""
        weight = self.users.weight
        return {
            "users": weight.detach().numpy().copy(),
            "users/sum": self.optimizer.state[weight]["sum"].numpy().copy(),
            "top": self.top.weight.detach().numpy().copy(),
            "items": self.items.numpy().copy(),
        }


def checkpointer_of(model: SharedModel, url: Any, **options: Any) -> Checkpointer:
    """A checkpointer of the model."""

    def tables(module: nn.Module, *_: object) -> list[Table]:
        return [model.table(), *find_tables(module)]

    with patch.object(trained_model, "find_tables", tables):
        own = {
            "bits": 32,
            "policy": "consecutive",
            "limits": cnr_store.Limits(workers=1),
            "failures": cnr_store.Failures(retry_seconds=2),
            **options,
        }
        return Checkpointer(url, model, model.optimizer, **own)


def cut_small() -> None:
    """Give tables many shards, and each replica some rows, from now on. Only for a process that runs nothing else."""
    placement.WRITER_ROWS = 64
    for name, nbytes in GRID_LIMITS_BYTES.items():
        setattr(grid, name, nbytes)


def together(parts: list[Values]) -> Values:
    """The values of the whole model, from those of all its ranks."""
    return {**parts[0], "items": np.concatenate([part["items"] for part in parts])}


def load_alone(url: str) -> Values:
    """What one process loads."""
    model = SharedModel(0, 1)
    with checkpointer_of(model, url) as checkpointer:
        checkpointer.load()
    return model.values()


def assert_equal(found: Values, expected: Values) -> None:
    """Check that values are equal bit for bit."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].view(np.int32), values.view(np.int32), name)
