"""A store that two ranks have saved together, each with a reader and random numbers of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adagrad

from cnr_store import Checkpointer
from cnr_store.training.model.rng_state import rng_state

ROWS, DIM = 400, 4
STEPS = 2


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(ROWS, DIM)
        self.lin = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.lin(self.emb(ids)).sum()
        return loss


def make() -> tuple[Model, Adagrad]:
    model = Model(1)
    return model, Adagrad(model.parameters(), lr=0.1)


def reader_of(rank: int) -> dict[str, Any]:
    """A state of a reader, with an array that stands beside it."""
    return {"rank": rank, "large": np.arange(3000) + rank}


def random_numbers() -> bytes:
    """The state of torch's generator."""
    state: torch.Tensor = rng_state()["torch"]
    return state.numpy().tobytes()


def save_on_ranks(url: str) -> dict[str, Any]:
    """Save a baseline and a delta, then load it. Returns what this rank had at the save, and what it has then."""
    rank, (model, optimizer) = dist.get_rank(), make()
    with Checkpointer(url, model, optimizer, policy="consecutive", bits=32) as checkpointer:
        torch.manual_seed(100 + rank)
        for step in range(STEPS):
            model(torch.tensor([step, step + 5])).backward()
            optimizer.step()
            saved = checkpointer.save(step, reader=reader_of(rank) | {"step": step})
            saved.result()
        assert saved.stats is not None
        before = random_numbers()
        torch.manual_seed(5)
        restored = checkpointer.load()
    return {
        "ranks": saved.stats.ranks,
        "before": before,
        "after": random_numbers(),
        "reader": restored.reader["rank"],
        "readers": restored.readers,
    }


def save_alone(url: Path) -> None:
    """The same store, saved by one process."""
    model, optimizer = make()
    with Checkpointer(url, model, optimizer, policy="consecutive", bits=32) as checkpointer:
        for step in range(STEPS):
            model(torch.tensor([step, step + 5])).backward()
            optimizer.step()
            checkpointer.save(step, reader=reader_of(0)).result()
