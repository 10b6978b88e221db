"""Trains a model that another package has wrapped, and compares its store with that of the bare model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cnr_store

ROWS = 1000
Setup = Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Any]]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, 8, sparse=True), nn.Linear(8, 1))


class Run:
    """A model and its optimizer, as `setup` returns them."""

    def __init__(self, setup: Setup) -> None:
        self.bare = net()
        self.optimizer = torch.optim.Adagrad(self.bare.parameters(), lr=0.1)
        self.model, self.wrapped = setup(self.bare, self.optimizer)

    def checkpointer(self, url: Path) -> cnr_store.Checkpointer:
        return cnr_store.Checkpointer(url, self.model, self.wrapped, policy="consecutive", bits=32)

    def save(self, url: Path) -> list[int]:
        """Train and save three times; the rows that each save wrote."""
        rows = []
        with self.checkpointer(url) as checkpointer:
            for step in range(3):
                self.train(0, step + 1)
                rows.append(checkpointer.save(step).result().rows)
        return rows

    def train(self, *ids: int) -> None:
        loss = self.model(torch.tensor(ids)).square().sum()
        loss.backward()
        self.wrapped.step()
        self.wrapped.zero_grad()

    def same_as(self, other: Run) -> bool:
        mine, theirs = self.bare.state_dict(), other.bare.state_dict()
        state, other_state = (run.optimizer.state_dict()["state"] for run in (self, other))
        return (
            all(torch.equal(mine[name], theirs[name]) for name in (mine | theirs))
            and state.keys() == other_state.keys()
            and all(
                torch.equal(state[key][slot], other_state[key][slot]) for key in state for slot in state[key]
            )
        )


def as_is(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return model, optimizer


def paths(url: Path) -> list[str]:
    return sorted(path for path, _ in cnr_store.open(url).members(max_depth=None))


def check_wrapped(folder: Path, setup: Setup) -> None:
    """A wrapped model's store holds what that of the bare one does, and each continues the other's."""
    wrapped, bare = Run(setup), Run(as_is)
    assert wrapped.save(folder / "wrapped") == bare.save(folder / "bare") == [ROWS, 2, 2]
    assert paths(folder / "wrapped") == paths(folder / "bare")
    for url, kind in (("wrapped", as_is), ("bare", setup), ("wrapped", setup)):
        run = Run(kind)
        with run.checkpointer(folder / url) as checkpointer:
            checkpointer.load(2)
            assert run.same_as(wrapped)
            run.train(7)
            assert checkpointer.save(3).result().rows == 1
        again = Run(setup)
        cnr_store.load(folder / url, again.model, again.wrapped)
        assert again.same_as(run)
