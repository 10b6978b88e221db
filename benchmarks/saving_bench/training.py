"""A model of a few tables that trains, row by row as it is told to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

DIM = 64
_BATCH = 8192
_WIDTH = 256


class Recommender(nn.Module):
    """Embeddings of one id for each table, and a small dense net over them."""

    def __init__(self, tables: int, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM, sparse=True) for _ in range(tables))
        self.net = nn.Sequential(nn.Linear(tables * DIM, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(torch.cat([table(ids) for table in self.tables], 1))
        return logits


class Training:
    """A model and its optimizer, ``sgd`` or ``adagrad``; the latter keeps as much beside each row as a row takes.

    Attributes
    ----------
    names
        Of the tables, as a checkpointer calls them.
    arrays
        All tensors that have a line for each row: weights and what the optimizer keeps beside them.
    """

    def __init__(self, optimizer: str, tables: int, rows: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rows = rows
        self.model = Recommender(tables, rows)
        parameters = self.model.parameters()
        self.optimizer: Optimizer = (
            Adagrad(parameters, lr=0.01) if optimizer == "adagrad" else SGD(parameters, lr=0.01)
        )
        self.names = [f"tables.{number}" for number in range(tables)]
        weights = list(self.model.tables.parameters())
        slots = [self.optimizer.state[weight]["sum"] for weight in weights] if optimizer == "adagrad" else []
        self.arrays = [tensor.detach() for tensor in (*weights, *slots)]
        self.nbytes = sum(tensor.nbytes for tensor in self.arrays)
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, share: float) -> torch.Tensor:
        """A share of the rows at random, ascending, (n,) int64."""
        return torch.randperm(self.rows, generator=self._random)[: round(self.rows * share)].sort()[0]

    def touch(self, ids: torch.Tensor) -> None:
        """Train until these rows of every table, and no others, have been updated once."""
        for first in range(0, len(ids), _BATCH):
            self.step(ids[first : first + _BATCH])

    def step(self, ids: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(ids).square().mean())
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """What others save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
