"""Models whose rows move as in training, interval by interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from benchmarks.codec_bench.movielens import Features, TimeOrderedReader, new_training

DIM = 64
LOOKUPS_A_ROW = 3.9
"""In an interval. With the popularity below, 26 % of the rows are looked up in one interval and 53 % in nine."""

_STEEPNESS, _PLATEAU = 3.3, 0.05
_LEARNING_RATE = 0.02
_BATCH = 256


class Workload(Protocol):
    """A model in training. `advance` trains it for one interval."""

    model: nn.Module
    optimizer: Optimizer
    intervals: int

    def advance(self) -> None: ...


class MovieLens:
    """The model of `cnr demo`, trained with Adagrad on ratings in the order in which they were given.

    Attributes
    ----------
    losses
        The sum of the mean log losses of all batches. Each is judged before it is learned.
    """

    def __init__(self, features: Features, intervals: int, seed: int = 0) -> None:
        self.intervals, self.losses = intervals, 0.0
        self.model: nn.Module
        self.model, self.optimizer = new_training(features.rows, seed)
        self._features = features
        self._reader = TimeOrderedReader(features.train, _BATCH)
        self._steps = features.train // intervals // _BATCH

    def advance(self) -> None:
        for _ in range(self._steps):
            samples = next(self._reader)
            columns = {name: torch.from_numpy(ids[samples]) for name, ids in self._features.columns.items()}
            labels = torch.from_numpy(self._features.labels[samples])
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(columns), labels)
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.losses += float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        """Where the training is, beside what its model and its optimizer hold."""
        return {"reader": self._reader.state_dict(), "losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._reader.load_state_dict(state["reader"])
        self.losses = state["losses"]


class Synthetic:
    """Tables of float32 rows. In each interval, SGD moves the rows that were looked up a small step.

    Lookups of a table go to its rows by the popularity (u + 0.05)^-3.3, u being a row's rank from 0 to 1; popular
    rows lie anywhere in the table. With `rowwise`, one number a row is kept beside it, as by row-wise Adagrad.
    """

    def __init__(self, rows: Sequence[int], intervals: int, rowwise: bool) -> None:
        torch.manual_seed(0)
        self._random = np.random.default_rng(0)
        self.intervals = intervals
        self._tables = [nn.Embedding(count, DIM, sparse=True) for count in rows]
        self.model: nn.Module = nn.ModuleList(self._tables)
        for table in self.model.parameters():
            nn.init.normal_(table, std=0.1)
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=_LEARNING_RATE)
        if rowwise:
            self.optimizer.register_step_pre_hook(_scale_by_row)
            for table in self.model.parameters():
                self.optimizer.state[table]["sum"] = torch.zeros(len(table))
        self._touched = [self._random.permutation(_chances(count)) for count in rows]

    def advance(self) -> None:
        self.optimizer.zero_grad()
        for table, chances in zip(self._tables, self._touched, strict=True):
            ids = torch.from_numpy(np.flatnonzero(self._random.random(len(chances)) < chances))
            table(ids).backward(torch.randn(len(ids), DIM))
        self.optimizer.step()


def _chances(rows: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """For each row, the chance that an interval's lookups meet it."""
    popularity = ((np.arange(rows) + 0.5) / rows + _PLATEAU) ** -_STEEPNESS
    chances: np.ndarray[Any, np.dtype[np.float64]] = -np.expm1(
        -LOOKUPS_A_ROW * rows * popularity / popularity.sum()
    )
    return chances


def _scale_by_row(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Divide each row's gradient by the root of the squares so far, in place of a class that does so.

    Such a class could be trusted with moving no other rows only if it were known.
    """
    for group in optimizer.param_groups:
        for table in group["params"]:
            table.grad = table.grad.coalesce()
            ids, values = table.grad.indices()[0], table.grad.values()
            sums = optimizer.state[table]["sum"]
            sums.index_add_(0, ids, values.square().mean(1))
            values.div_(sums[ids].sqrt()[:, None])
