"""Optimizers with one number a row: torchrec's as it is found by its name, and classes of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adagrad, Optimizer


class OwnRowWise(Optimizer):
    """Row-wise Adagrad: the arithmetic of torchrec's, in place and once."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        maximize: bool = False,
    ) -> None:
        settings = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                began = torch.full_like(parameter, initial_accumulator_value)
                self.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "sum": began.mean(dim=1).view(-1, 1).detach(),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def update(
        self, parameter: Any, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if group["maximize"]:
            gradient = -gradient
        if group["weight_decay"] != 0:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state["sum"] += gradient.pow(2).mean(dim=1).view(-1, 1)
        spread = state["sum"].sqrt().add_(group["eps"])
        rate = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
        parameter.addcdiv_(gradient, spread, value=-rate)


class RowWiseAdagrad(OwnRowWise):
    """What passes for torchrec's, which need not be installed."""

    __module__ = "torchrec.optim.rowwise_adagrad"


class TwoChanges(OwnRowWise):
    """Changes parameter and state several times, and replaces the state."""

    def update(
        self, parameter: Any, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        state["sum"] = state["sum"] + gradient.pow(2).mean(dim=1, keepdim=True) / 2
        state["sum"] += gradient.pow(2).mean(dim=1, keepdim=True) / 2
        change = gradient / state["sum"].sqrt().add_(group["eps"])
        for _ in range(2):
            parameter.sub_(change, alpha=group["lr"] / 2)


class ClearsGradients(OwnRowWise):
    """Leaves gradients of zero behind."""

    def update(
        self, parameter: Any, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        super().update(parameter, gradient, state, group)
        gradient.zero_()


class DropsGradients(OwnRowWise):
    """Leaves no gradients behind."""

    def update(
        self, parameter: Any, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        super().update(parameter, gradient, state, group)
        parameter.grad = None


class Unseen(OwnRowWise):
    """Writes past the version counters, as kernels of one's own do."""

    def update(
        self, parameter: Any, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        super().update(parameter.data, gradient, {**state, "sum": state["sum"].data}, group)


class FailsBehindUpdate(Unseen):
    """Raises when all is done."""

    def update(
        self, parameter: Any, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        super().update(parameter, gradient, state, group)
        raise RuntimeError("behind the update")


class OnAnother(Adagrad):
    """Steps by another optimizer's step, whose hooks run within its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss: float | None = super().step(closure)
        return loss


class Lies(OwnRowWise):
    """Moves a row without a gradient."""

    def update(
        self, parameter: Any, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        super().update(parameter, gradient, state, group)
        parameter[-1] += 1


OWN: list[type[Optimizer]] = [OwnRowWise, TwoChanges, ClearsGradients, Unseen, OnAnother]
