"""A small recommendation model that trains, and its state as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

Array = np.ndarray[Any, Any]
Ids = Mapping[str, Sequence[int]]

SHAPES = {"users": (300, 5), "tags": (70, 3), "items": (265, 16)}
"""Rows and dim of each table; only items are large enough to be quantized without being named."""

OPTIMIZERS = ("adagrad", "sgd", "sparse-adam")
_SPARSE = {"adagrad": {"users", "items"}, "sgd": {"tags"}, "sparse-adam": set(SHAPES)}


class SmallModel(nn.Module):
    """Two embeddings, an embedding bag and a dense layer; the loss leaves gradients that differ by table."""

    def __init__(self, sparse: set[str], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.users = nn.Embedding(*SHAPES["users"], sparse="users" in sparse)
        self.tags = nn.EmbeddingBag(*SHAPES["tags"], mode="sum", sparse="tags" in sparse)
        self.items = nn.Embedding(*SHAPES["items"], sparse="items" in sparse)
        self.top = nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, ids: Ids) -> torch.Tensor:
        loss: torch.Tensor = self.top(torch.ones(1, 2)).sum()
        for name, chosen in ids.items():
            found = getattr(self, name)(torch.tensor([chosen], dtype=torch.int64))
            loss = loss + (found * torch.linspace(0.5, 1.5, found.shape[-1])).sum()
        return loss


def make_model(optimizer: str, seed: int) -> tuple[SmallModel, list[Optimizer]]:
    """A model with the optimizers of that name; each name has its own mixture of sparse and dense gradients."""
    model = SmallModel(_SPARSE[optimizer], seed)
    if optimizer == "adagrad":
        return model, [Adagrad(model.parameters(), lr=0.3)]
    if optimizer == "sgd":
        return model, [SGD(model.parameters(), lr=0.3)]
    tables = [table_weight(model, name) for name in SHAPES]
    return model, [SparseAdam(tables, lr=0.3), SGD(model.top.parameters(), lr=0.3)]


def table_weight(model: SmallModel, name: str) -> nn.Parameter:
    weight = getattr(model, name).weight
    assert isinstance(weight, nn.Parameter)
    return weight


def row_state(model: SmallModel, optimizers: Sequence[Optimizer]) -> dict[str, Array]:
    """Copies, by path in a version: each table's weight and the optimizer state of its shape, (rows, dim)."""
    found = {}
    for name in SHAPES:
        weight = table_weight(model, name)
        found[f"tables/{name}/weight"] = weight.detach().numpy().copy()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                    found[f"tables/{name}/{key}"] = value.detach().numpy().copy()
    return found


def other_state(model: SmallModel, optimizers: Sequence[Optimizer]) -> dict[str, bytes]:
    """Bytes of everything that is not stored by rows, under names that tell what it is."""
    found = {f"model {name}": _bytes(value) for name, value in model.top.state_dict().items()}
    for position, optimizer in enumerate(optimizers):
        for name, parameter in model.named_parameters():
            of_table = name.split(".")[0] in SHAPES
            for key, value in optimizer.state.get(parameter, {}).items():
                if not (of_table and isinstance(value, torch.Tensor) and value.shape == parameter.shape):
                    found[f"optimizer {position} {name} {key}"] = _bytes(value)
    return found


def gradient_rows(model: SmallModel) -> dict[str, set[int]]:
    """Per table, the rows that the next step has a gradient for."""
    found = {}
    for name in SHAPES:
        gradient = table_weight(model, name).grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            found[name] = set(gradient.coalesce().indices()[0].tolist())
        else:
            found[name] = set(np.flatnonzero(gradient.numpy().view(np.int32).any(axis=1)).tolist())
    return found


def _bytes(value: Any) -> bytes:
    return torch.as_tensor(value).detach().numpy().tobytes()
