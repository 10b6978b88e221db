"""One embedding table that trains under a tracker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from cnr_store.training.model.tables import find_tables
from cnr_store.training.model.tensors import AnyArray, array_dtype, copy_rows
from cnr_store.training.tracking.bitmap import Bitmap, rows_of
from cnr_store.training.tracking.optimizer_rules import may_move_untouched_rows
from cnr_store.training.tracking.tracker import Tracker

ROWS = 40
ALL = list(range(ROWS))

TRUSTED: dict[str, tuple[Callable[[Any], Optimizer], bool]] = {
    "sgd_sparse": (lambda p: SGD(p, lr=0.1), True),
    "sgd": (lambda p: SGD(p, lr=0.1), False),
    "sgd_plain": (lambda p: SGD(p, lr=0.1, foreach=False), False),
    "adagrad_sparse": (lambda p: Adagrad(p, lr=0.1), True),
    "adagrad": (lambda p: Adagrad(p, lr=0.1), False),
    "adagrad_plain": (lambda p: Adagrad(p, lr=0.1, foreach=False), False),
    "sparse_adam": (lambda p: SparseAdam(p, lr=0.1), True),
}


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows)


def listed(bitmap: Bitmap, rows: int = ROWS) -> list[int]:
    return [int(row) for row in rows_of(bitmap, rows)]


def gather(tensor: torch.Tensor, rows: AnyArray) -> AnyArray:
    """Rows of a tensor, in the array type."""
    out = np.empty((rows.size, *tensor.shape[1:]), array_dtype(tensor.dtype))
    copy_rows(tensor, rows, out)
    return out


def backward(loss: Any) -> None:
    loss.backward()


def moves_untouched(optimizer: Optimizer, parameter: torch.Tensor) -> str | None:
    """Why a step may move rows of `parameter` without a gradient; None if it can't, or steps another parameter."""
    for position, group in enumerate(optimizer.param_groups):
        if any(owned is parameter for owned in group["params"]):
            return may_move_untouched_rows(optimizer, position, parameter.dtype)
    return None


class Bench:
    """A model with one table, its optimizer, and a tracker."""

    def __init__(self, kind: str = "sgd_sparse", given: bool = True, **options: Any) -> None:
        make, sparse = TRUSTED[kind]
        self.table = nn.Embedding(ROWS, 3, sparse=sparse, **options)
        self.model = nn.ModuleDict({"t": self.table})
        self.optimizer = make(self.model.parameters())
        self.tracker = Tracker(find_tables(self.model), [self.optimizer] if given else [])

    def forward(self, *rows: int) -> Any:
        return self.table(ids(*rows)).square().sum()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *rows: int) -> None:
        self.forward(*rows).backward()
        self.step()

    def functional(self, *rows: int) -> Any:
        """A lookup past the module."""
        return nn.functional.embedding(ids(*rows), self.table.weight, sparse=self.table.sparse).sum()

    def swap(self) -> list[int]:
        return listed(self.tracker.swap()["t"])

    def write(self, row: int) -> None:
        """Change a row by hand."""
        with torch.no_grad():
            self.table.weight[row] += 1

    def slot(self) -> torch.Tensor:
        """What the optimizer keeps beside each row, (rows, dim)."""
        kept = self.optimizer.state[self.table.weight]
        found = kept["sum" if "sum" in kept else "exp_avg"]
        assert isinstance(found, torch.Tensor)
        return found
