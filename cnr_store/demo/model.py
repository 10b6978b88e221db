"""A small recommendation model: embedding tables, hashed crosses among them, and a perceptron on top."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

WIDE_DIM = 32
NARROW_DIM = 16
HIDDEN = 64
BAGS = frozenset({"genre", "user_genre"})
_WIDE_ROWS = 256


class Recommender(nn.Module):
    """Logit of "this user rates this item 4 or 5". One table a feature; bags average their ids' rows."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__()
        dims = {name: WIDE_DIM if count >= _WIDE_ROWS else NARROW_DIM for name, count in rows.items()}
        self.embed = nn.ModuleDict({name: _table(name, rows[name], dims[name]) for name in rows})
        self.top = nn.Sequential(nn.Linear(sum(dims.values()), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        """`columns`: per table, int64 (batch,) or (batch, width). Returns float32 (batch,)."""
        looked_up = [table(columns[name]) for name, table in self.embed.items()]
        logits: Tensor = self.top(torch.cat(looked_up, dim=1))
        return logits.squeeze(1)


def _table(name: str, rows: int, dim: int) -> nn.Module:
    table: nn.Embedding | nn.EmbeddingBag
    if name in BAGS:
        table = nn.EmbeddingBag(rows, dim, mode="mean", padding_idx=0, sparse=True)
    else:
        table = nn.Embedding(rows, dim, sparse=True)
    nn.init.normal_(table.weight, std=0.05)
    return table


def new_training(rows: Mapping[str, int], seed: int) -> tuple[Recommender, torch.optim.Optimizer]:
    """Model and optimizer of a fresh run, the same for the same seed."""
    torch.manual_seed(seed)
    # torch leaves these checks out by default, and warns of it unless somebody says that this is meant.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    model = Recommender(rows)
    # Adagrad leaves rows without gradient where they are, so a delta of the rows looked up is enough.
    return model, torch.optim.Adagrad(model.parameters(), lr=0.02)
