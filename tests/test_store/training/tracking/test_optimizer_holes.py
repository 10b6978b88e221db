"""Steps that once moved rows, or what is kept for them, without a trace: what a load returns tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import cnr_store
from cnr_store import Checkpointer
from tests.test_store.support.tracked_table import ids

ROWS = 30


class Job:
    """A table that a checkpointer saves as deltas, without the audit, and its optimizer."""

    def __init__(
        self,
        place: Path,
        make: Callable[[Any], Optimizer],
        *,
        given: bool = True,
        dim: int = 4,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.make, self.place, self.dim = make, place, dim
        self.model = nn.ModuleDict({"t": nn.Embedding(ROWS, dim)})
        self.optimizer = make(self.model.parameters())
        self.given = [self.optimizer] if given else []
        self.options = {"bits": 32, "policy": "consecutive", "audit": False} | options

    @property
    def weight(self) -> nn.Parameter:
        found = self.model["t"].weight
        assert isinstance(found, nn.Parameter)
        return found

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self.place, self.model, self.given, **self.options)

    def train(self, *rows: int) -> None:
        self.optimizer.zero_grad()
        self.model["t"](ids(*rows)).square().sum().backward()
        self.optimizer.step()

    def loaded(self) -> Job:
        """What the newest version holds, in a model of its own."""
        other = Job(self.place, self.make, given=bool(self.given), dim=self.dim, **self.options)
        other.model.to(self.weight.dtype)
        cnr_store.load(self.place, other.model, other.given)
        return other


class Dropping(Optimizer):
    """Moves every row by momentum, uncounted, and drops its gradients, as old code does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                kept = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter.data))
                kept.mul_(0.9).add_(parameter.grad)
                parameter.data.add_(kept, alpha=-0.1)
                parameter.grad = None


def test_a_step_of_an_optimizer_not_given_that_drops_its_gradients_is_seen(tmp_path: Path) -> None:
    job = Job(tmp_path, Dropping, given=False)
    with job.checkpointer() as checkpointer:
        for step in range(4):
            job.train(step)
            checkpointer.save(step).result()
    assert torch.equal(job.loaded().weight, job.weight)
