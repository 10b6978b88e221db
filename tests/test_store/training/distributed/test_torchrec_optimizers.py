"""TorchRec's optimizers of dense parameters, in one process. Needs TorchRec."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cnr_store

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRec's own

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.optim.keyed import (
        CombinedOptimizer,
        KeyedOptimizer,
        KeyedOptimizerWrapper,
        OptimizerWrapper,
    )


class Logged(OptimizerWrapper):  # type: ignore[misc]  # TorchRec has no types
    """A wrapper of one's own, with the state of what it wraps."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


class Counted(OptimizerWrapper):  # type: ignore[misc]  # as above
    """A wrapper of one's own, with state of its own."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]


class OfOnesOwn(KeyedOptimizer):  # type: ignore[misc]  # as above
    """Adagrad by hand, with groups in its state dict."""

    def __init__(self, params: dict[str, Any]) -> None:
        state = {each: {"sum": torch.ones_like(each)} for each in params.values()}
        super().__init__(params, state, [{"params": list(params.values()), "lr": 0.1}])
        self.save_param_groups(True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.params.values():
            if parameter.grad is not None:
                self.state[parameter]["sum"] += parameter.grad.square()
                parameter -= 0.1 * parameter.grad / self.state[parameter]["sum"].sqrt()


def keyed(model: nn.Module) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda params: torch.optim.Adagrad(params, lr=0.1)
    )


def counted(model: nn.Module) -> Counted:
    optimizer = Counted(keyed(model))
    optimizer.init_state()  # a KeyedOptimizer loads no state before it has some
    return optimizer


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "logged": lambda model: Logged(keyed(model)),
    "combined": lambda model: CombinedOptimizer([Logged(Logged(keyed(model)))]),
    "counted": counted,
    "own": lambda model: OfOnesOwn(dict(model.named_parameters())),
}


class Trained:
    def __init__(self, kind: str) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.EmbeddingBag(50, 8), nn.Linear(8, 3))
        self.optimizer = MAKERS[kind](self.model)

    def train(self, step: int) -> None:
        self.model.zero_grad()
        self.model((torch.arange(8) + step).reshape(2, 4) % 50).square().sum().backward()
        self.optimizer.step()

    @property
    def content(self) -> list[torch.Tensor]:
        sums = [self.optimizer.state[each]["sum"] for each in self.model.parameters()]
        return [each.detach().clone() for each in (*self.model.parameters(), *sums)]


@pytest.mark.parametrize("kind", MAKERS)
def test_their_state_comes_back(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    job, other = Trained(kind), Trained(kind)
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, bits=32) as checkpointer:
        for step in (1, 2):
            job.train(step)
            checkpointer.save(step).result()
    assert "not saved" not in caplog.text
    assert "in no version" not in caplog.text
    other.train(5)
    with cnr_store.Checkpointer(tmp_path, other.model, other.optimizer, bits=32) as checkpointer:
        checkpointer.load()
        for step in (6, 7):
            job.train(step)
            other.train(step)
    assert all(torch.equal(one, two) for one, two in zip(job.content, other.content, strict=True))
    by_rows = kind in ("logged", "combined")
    assert ("tables/0/sum" in cnr_store.open(tmp_path)) == by_rows
    assert getattr(other.optimizer, "steps", 0) == getattr(job.optimizer, "steps", 0)
