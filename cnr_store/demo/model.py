"""A small recommendation model, its predictions and their quality."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from cnr_store.demo.data import Features

BAGS = frozenset({"genre", "user_genre"})
"""Tables looked up with several ids a sample."""

_WIDE_DIM, _NARROW_DIM, _HIDDEN = 32, 16, 64
_WIDE_ROWS = 256
"""Rows from which on a table is wide."""

_HELD_OUT_BATCH = 4_096
_SMALLEST = 1e-12
"""Smallest probability in a logarithm."""


class Recommender(nn.Module):
    """Logit of "this user rates this item 4 or 5": embedding tables under a perceptron.

    `rows`: rows of each table, by feature. A feature with several ids averages their rows.
    """

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__()
        dims = {name: _WIDE_DIM if count >= _WIDE_ROWS else _NARROW_DIM for name, count in rows.items()}
        self.embed = nn.ModuleDict({name: _table(name, rows[name], dims[name]) for name in rows})
        self.top = nn.Sequential(nn.Linear(sum(dims.values()), _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Logits, float32 (batch,), for the ids of each table: int64 (batch,) or (batch, width)."""
        looked_up = [table(columns[name]) for name, table in self.embed.items()]
        logits: Tensor = self.top(torch.cat(looked_up, dim=1))
        return logits.squeeze(1)


def _table(name: str, rows: int, dim: int) -> nn.Module:
    if name in BAGS:
        table: nn.Embedding | nn.EmbeddingBag = nn.EmbeddingBag(
            rows, dim, mode="mean", padding_idx=0, sparse=True
        )
    else:
        table = nn.Embedding(rows, dim, sparse=True)
    nn.init.normal_(table.weight, std=0.05)
    return table


def new_training(rows: Mapping[str, int], seed: int) -> tuple[Recommender, torch.optim.Optimizer]:
    """Model and optimizer of a fresh run, the same for the same seed."""
    torch.manual_seed(seed)
    # torch skips these checks by default, and warns about it unless they are disabled explicitly.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    model = Recommender(rows)
    # Adagrad does not move rows without gradient, so a delta of the rows looked up is enough.
    return model, torch.optim.Adagrad(model.parameters(), lr=0.02)


def select(features: Features, samples: NDArray[np.int64]) -> tuple[dict[str, Tensor], Tensor]:
    """The model's input and labels for `samples`."""
    columns = {name: torch.from_numpy(ids[samples]) for name, ids in features.columns.items()}
    return columns, torch.from_numpy(features.labels[samples])


def predict(model: Recommender, features: Features, samples: NDArray[np.int64]) -> NDArray[np.float64]:
    """Probabilities for `samples`, float64 (samples,)."""
    model.eval()
    pieces = np.array_split(samples, max(1, -(-len(samples) // _HELD_OUT_BATCH)))
    with torch.no_grad():
        logits = torch.cat([model(select(features, piece)[0]) for piece in pieces])
    return torch.sigmoid(logits.double()).numpy()


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Chance that a positive sample scores above a negative one, ties counting half (Mann-Whitney).

    `labels` (n,) of 0 and 1, `scores` (n,). NaN if one of the two classes is missing.
    """
    positive = np.asarray(labels, np.float64) > 0.5
    _, position, counts = np.unique(np.asarray(scores, np.float64), return_inverse=True, return_counts=True)
    # Equal scores share the mean of their ranks.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[position]
    n, p = len(positive), int(positive.sum())
    if p in (0, n):
        return float("nan")
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * (n - p)))


def log_loss(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean negative log-likelihood of `labels` (n,) of 0 and 1 under `probabilities` (n,), in nats."""
    truth = np.asarray(labels, np.float64)
    p = np.clip(np.asarray(probabilities, np.float64), _SMALLEST, 1 - _SMALLEST)
    return float(-np.mean(truth * np.log(p) + (1 - truth) * np.log1p(-p)))
