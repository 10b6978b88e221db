"""An optimizer that trains the model and was not given: whoever forgets one is told, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import cnr_store
from cnr_store import Checkpointer

Make = Callable[[nn.ModuleDict], list[Optimizer]]


def build() -> nn.ModuleDict:
    return nn.ModuleDict({"users": nn.EmbeddingBag(64, 4), "top": nn.Linear(4, 1)})


def said_of(
    url: Path, caplog: pytest.LogCaptureFixture, model: nn.ModuleDict, make: Make, *given: Any, **options: Any
) -> list[str]:
    """What two saves say of optimizers, of which those at the positions `given` were given."""
    optimizers = make(model)
    chosen = [optimizers[position] for position in given]
    with Checkpointer(url, model, chosen, **options) as checkpointer:
        for step in (1, 2):
            model["top"](model["users"](torch.arange(8).reshape(2, 4))).square().sum().backward()
            for each in optimizers:
                each.step()
            checkpointer.save(step).result()
    return [message for message in caplog.messages if "is in no version" in message]


def told(count: int, name: str) -> list[str]:
    return [
        f"{count} parameters of the model are updated by {name}, whose state is in no version; give all optimizers "
        "that train: Checkpointer(url, model, optimizer)"
    ]


def apart(model: nn.ModuleDict) -> list[Optimizer]:
    return [Adagrad(model["users"].parameters()), Adam(model["top"].parameters())]


@pytest.mark.parametrize(
    ("make", "given", "expected"),
    [
        (lambda model: [Adam(model.parameters())], (), told(3, "Adam")),
        (lambda model: [SGD(model.parameters(), momentum=0.9)], (), told(3, "SGD")),
        (apart, (0,), told(2, "Adam")),
        (apart, (1,), told(1, "Adagrad")),
        (apart, (), told(1, "Adagrad") + told(2, "Adam")),
        (apart, (0, 1), []),
        (lambda model: [SGD(model.parameters())], (), []),  # it has no state
        (lambda _: [Adam(build().parameters())], (), []),  # of another model
    ],
)
def test_state_that_no_save_has_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Make, given: tuple[int, ...], expected: list[str]
) -> None:
    assert sorted(said_of(tmp_path, caplog, build(), make, *given)) == sorted(expected)


def test_state_that_is_saved_or_left_out_on_purpose_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    optimizers = apart(model)

    def same(_: nn.ModuleDict) -> list[Optimizer]:
        return optimizers

    assert said_of(tmp_path / "a", caplog, model, same, 0, state={"optimizer": optimizers[1]}) == []
    assert said_of(tmp_path / "b", caplog, model, same, 0, tracking=cnr_store.Tracking(exclude="top*")) == []
