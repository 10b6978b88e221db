"""Generated trainings: a factorization machine, or two towers, learns a planted one, from ids drawn by Zipf's law."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from benchmarks.codec_bench.movielens import Features
from benchmarks.volumes_bench.workloads import MovieLens

OptimizerName = Literal["Adagrad", "Adagrad of half the rate", "row-wise Adagrad", "SGD"]
DenseName = Literal["Adam", "AdamW", "Adam, weight decay 1e-6", "momentum"]
DIM = 32
_FIELD_SHARES = (0.37, 0.22, 0.15, 0.11, 0.075, 0.045, 0.022, 0.008)
_TOWER_SHARES = (2 / 3, 1 / 3)
_TRUTH_DIM, _TRUTH_SPREAD, _TRUTH_LINEAR = 6, 0.35, 0.5
_TOWERS_TRUTH_SPREAD = 0.8
"""Logits of two fields then spread as those of eight do."""
_EPSILON = 1e-10
_RATES: dict[OptimizerName, float] = {
    "Adagrad": 0.04,
    "Adagrad of half the rate": 0.02,
    "row-wise Adagrad": 0.04,
    "SGD": 0.02,
}
"""Of 0.01, 0.02, 0.03, 0.04, 0.05 and 0.08, as far as tried, those of the least loss; but for the half one."""
_DENSE: dict[DenseName, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "Adam": Adam,
    "AdamW": AdamW,
    "Adam, weight decay 1e-6": partial(Adam, weight_decay=1e-6),
    "momentum": partial(SGD, lr=0.002, momentum=0.9),
}
"""As scripts make them: Adam at its own rate, and gradients for all rows."""


@dataclass(frozen=True)
class Size:
    """How large a training is.

    Attributes
    ----------
    rows
        Of the table, which all fields share.
    samples
        Between two saves.
    batch
        Samples of a step.
    exponent
        Of Zipf's law, within each field.
    warm_up
        Intervals trained before the first save.
    rate
        How fast is learned; None for the optimizer's.
    spread
        Of the table before the first step.
    towers
        Whether the score is the product of a row of users and one of items, in place of a factorization machine.
    """

    rows: int
    samples: int
    batch: int = 512
    exponent: float = 1.05
    intervals: int = 12
    warm_up: int = 12
    rate: float | None = None
    spread: float = 0.02
    towers: bool = False


class Machine(nn.Module):
    """A factorization machine. Column 0 of the table is linear, products are of the others."""

    def __init__(self, size: Size, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(size.rows, DIM, sparse=sparse)
        nn.init.normal_(self.table.weight, std=size.spread)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (batch,) of ids (batch, fields)."""
        logits: torch.Tensor = _interactions(self.table(ids))
        return logits


class Towers(nn.Module):
    """The product of a user's row and an item's. Ids of items follow those of users."""

    def __init__(self, size: Size, sparse: bool) -> None:
        super().__init__()
        users, items = _rows_by_field(size)
        self.users, self.items = (nn.Embedding(rows, DIM, sparse=sparse) for rows in (users, items))
        for table in self.parameters():
            nn.init.normal_(table, std=size.spread)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (batch,) of ids (batch, 2)."""
        users, items = ids.T
        logits: torch.Tensor = (self.users(users) * self.items(items - len(self.users.weight))).sum(1)
        return logits


def _rows_by_field(size: Size) -> list[int]:
    counts = [round(size.rows * share) for share in (_TOWER_SHARES if size.towers else _FIELD_SHARES)]
    counts[0] += size.rows - sum(counts)
    return counts


def _interactions(rows: Any) -> Any:
    """(batch,) of (batch, fields, columns), for numpy and torch."""
    linear, factors = rows[..., 0].sum(1), rows[..., 1:]
    return linear + ((factors.sum(1) ** 2).sum(1) - (factors**2).sum((1, 2))) / 2


class Truth:
    """Draws the ids of a batch by Zipf's law, and their labels. The same for the same seed."""

    def __init__(self, size: Size, seed: int) -> None:
        random = np.random.default_rng([20261123, seed])
        counts = _rows_by_field(size)
        spread = _TOWERS_TRUTH_SPREAD if size.towers else _TRUTH_SPREAD
        self._rows = random.normal(0, spread, (size.rows, 1 + _TRUTH_DIM))
        self._rows[:, 0] *= 0 if size.towers else _TRUTH_LINEAR / _TRUTH_SPREAD
        self._popularity = [
            np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -size.exponent) for count in counts
        ]
        firsts = np.cumsum([0, *counts[:-1]])
        # Popular rows lie anywhere in their field.
        self._ids = [first + random.permutation(count) for first, count in zip(firsts, counts, strict=True)]

    def draw(self, random: np.random.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (count, fields) and labels (count,)."""
        columns = [
            ids[np.searchsorted(sums[:-1], random.random(count) * sums[-1])]
            for ids, sums in zip(self._ids, self._popularity, strict=True)
        ]
        ids = np.stack(columns, axis=1)
        chances = 1 / (1 + np.exp(-_interactions(self._rows[ids])))
        labels = (random.random(count) < chances).astype(np.float32)
        return torch.from_numpy(ids), torch.from_numpy(labels)


class Training:
    """The machine in training. Each sample is judged before it is learned.

    Attributes
    ----------
    losses
        The sum of the log losses of all samples since the warm-up.
    """

    def __init__(self, size: Size, optimizer: OptimizerName | DenseName, seed: int) -> None:
        torch.manual_seed(seed)
        self.intervals, self._size, self._seed = size.intervals, size, seed
        self.model: nn.Module = (Towers if size.towers else Machine)(size, sparse=optimizer not in _DENSE)
        self.optimizer = new_optimizer(optimizer, self.model, size.rate)
        self._truth, self._interval, self.losses = Truth(size, seed), 0, 0.0
        for _ in range(size.warm_up):
            self.advance()
        self.losses = 0.0

    def advance(self) -> None:
        """Train one interval."""
        random = np.random.default_rng([self._seed, self._interval])
        self._interval += 1
        for _ in range(self._size.samples // self._size.batch):
            ids, labels = self._truth.draw(random, self._size.batch)
            # The sum, not the mean: SGD then moves a row alike in batches of any size.
            loss: Any = binary_cross_entropy_with_logits(self.model(ids), labels, reduction="sum")
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses += float(loss.detach())

    def state_dict(self) -> dict[str, float]:
        """Where the training is, beside what its model and its optimizer hold."""
        return {"interval": self._interval, "losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._interval, self.losses = state["interval"], state["losses"]

    def snapshot(self) -> Callable[[], None]:
        """What brings the training back to where it is now."""
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        state = [
            {key: value.clone() if torch.is_tensor(value) else value for key, value in each.items()}
            for each in map(self.optimizer.state.__getitem__, self.model.parameters())
        ]
        interval, losses = self._interval, self.losses

        def restore() -> None:
            self.model.load_state_dict(weights)
            for parameter, values in zip(self.model.parameters(), state, strict=True):
                for key, value in values.items():
                    self.optimizer.state[parameter][key] = value.clone() if torch.is_tensor(value) else value
            self._interval, self.losses = interval, losses

        return restore


class RowWiseAdagrad(Optimizer):
    """Adagrad with one sum a row: of the mean squares of its gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for table in group["params"]:
                self.state[table]["sum"] = torch.zeros(len(table))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move the rows that have gradients."""
        for group in self.param_groups:
            for table in group["params"]:
                gradient = table.grad.coalesce()
                ids, values = gradient.indices()[0], gradient.values()
                sums = self.state[table]["sum"]
                sums.index_add_(0, ids, values.square().mean(1))
                table.index_add_(0, ids, values / (sums[ids].sqrt()[:, None] + _EPSILON), alpha=-group["lr"])


def new_optimizer(name: OptimizerName | DenseName, model: nn.Module, rate: float | None = None) -> Optimizer:
    """An optimizer of that name, at `rate` if it is a sparse one and this is given."""
    for dense, make in _DENSE.items():
        if name == dense:
            return make(model.parameters())
    for sparse, own in _RATES.items():
        if name == sparse:
            kinds = {"SGD": SGD, "row-wise Adagrad": RowWiseAdagrad}
            return kinds.get(sparse, Adagrad)(model.parameters(), lr=rate or own)
    raise ValueError(name)


class DenseMovieLens(MovieLens):
    """The demo's model with dense gradients."""

    def __init__(self, features: Features, intervals: int, seed: int, name: DenseName) -> None:
        super().__init__(features, intervals, seed)
        for module in self.model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False
        self.optimizer = new_optimizer(name, self.model)
