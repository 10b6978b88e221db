"""Training whose collectives run while saves are written, and the same training without any save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad

import cnr_store
from cnr_store import Checkpointer

Array = np.ndarray[Any, Any]
ROWS, DIM, BATCH = 300, 8, 16


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.emb(ids))
        return out


def _train(steps: int, save: Callable[[nn.Module, Adagrad, int], None]) -> dict[str, Array]:
    """Train on a batch of this rank's own at each step; what is trained, and all that collectives have told."""
    model = DistributedDataParallel(_Model())
    optimizer = Adagrad(model.parameters(), lr=0.1)
    losses = torch.zeros(steps)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = ((model(torch.randint(0, ROWS, (BATCH, 2), generator=generator)) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        dist.all_reduce(losses[step : step + 1])
        save(model, optimizer, step)
    found = {name: value.numpy() for name, value in model.module.state_dict().items()}
    return found | {"losses": losses.numpy()}


def load(url: str) -> dict[str, Array]:
    """What one process loads."""
    model = _Model()
    with Checkpointer(url, model, Adagrad(model.parameters(), lr=0.1)) as checkpointer:
        checkpointer.load()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def train_twice(url: str, saves: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Train without saves, then with one at each step that is written while the next steps run."""
    without = _train(saves, lambda *_: None)
    checkpointers: list[Checkpointer] = []

    def save(model: nn.Module, optimizer: Adagrad, step: int) -> None:
        if not checkpointers:
            options: Any = {
                "bits": 32,
                "policy": "consecutive",
                "keep_last": 3,
                "failures": cnr_store.Failures(timeout_seconds=60),
            }
            checkpointers.append(Checkpointer(url, model, optimizer, **options))
        checkpointers[0].save(step)

    found = _train(saves, save)
    checkpointers[0].close()
    return without, found
