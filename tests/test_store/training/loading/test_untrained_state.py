"""State of parameters that the version's optimizer did not train stays; that a parameter had none comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, NAdam, Optimizer, RMSprop

import cnr_store
from cnr_store import Checkpointer, ModelMismatchError
from tests.test_store.support.rowwise_optimizers import RowWiseAdagrad

Kind = Callable[..., Optimizer]
SETTINGS = "settings of optimizer 0"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.top = nn.Embedding(30, 4), nn.Embedding(20, 4), nn.Linear(4, 1)


def train(model: Model, *optimizers: Optimizer, dense: bool = True) -> None:
    vectors = model.a(torch.tensor([1, 7])) + model.b(torch.tensor([2, 9]))
    loss: Any = (model.top(vectors) if dense else vectors).sum()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def same(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def saved(place: Path, kind: Kind, *parts: str) -> tuple[Model, Optimizer]:
    model = Model()
    optimizer = kind([one for part in parts for one in model.get_submodule(part).parameters()])
    train(model, optimizer)
    cnr_store.save(place, model, optimizer, bits=32)
    return model, optimizer


@pytest.mark.parametrize("kind", [Adagrad, RowWiseAdagrad])
@pytest.mark.parametrize("trained", ["a", "b"])
@pytest.mark.parametrize("strict", ["ignore", "report"])
def test_a_table_new_to_the_optimizer_keeps_its_state(
    tmp_path: Path, kind: Kind, trained: str, strict: Any
) -> None:
    source, stored = saved(tmp_path, kind, trained)
    model = Model()
    new = "b" if trained == "a" else "a"
    optimizer = kind([model.a.weight, model.b.weight])
    before = copy.deepcopy(optimizer.state[model.get_parameter(f"{new}.weight")])
    with Checkpointer(tmp_path, model, optimizer, bits=32) as checkpointer:
        restored = checkpointer.load(strict=strict)
        assert restored.missing == (f"state of '{new}.weight' in optimizer 0", SETTINGS)
        old = f"{trained}.weight"
        assert same(optimizer.state[model.get_parameter(f"{new}.weight")], before)
        assert same(
            optimizer.state[model.get_parameter(old)],
            stored.state[source.get_parameter(old)],
        )
        train(model, optimizer)
        checkpointer.save(2).result()
    other = Model()
    again = kind([other.a.weight, other.b.weight])
    cnr_store.load(tmp_path, other, again)
    for (name, one), two in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)
        assert name.startswith("top") or same(again.state[one], optimizer.state[two])


def test_a_dense_layer_that_was_frozen_keeps_its_state(tmp_path: Path) -> None:
    source, stored = saved(tmp_path, Adagrad, "a", "b")
    model = Model()
    optimizer = Adagrad(model.parameters(), initial_accumulator_value=0.5)
    with pytest.raises(ModelMismatchError, match=r'or load\(strict="ignore"\), which loads'):
        cnr_store.load(tmp_path, model, optimizer)
    restored = cnr_store.load(tmp_path, model, optimizer, strict="ignore")
    of_top = tuple(f"state of 'top.{name}' in optimizer 0" for name in ("weight", "bias"))
    assert restored.missing == (*of_top, SETTINGS)
    assert optimizer.state[model.top.weight]["sum"].eq(0.5).all()
    assert same(optimizer.state[model.a.weight], stored.state[source.a.weight])
    assert torch.equal(model.top.weight, source.top.weight)
    train(model, optimizer)


def test_optimizers_in_another_order_keep_their_state(tmp_path: Path) -> None:
    source = Model()
    cnr_store.save(tmp_path, source, [Adagrad(source.a.parameters()), Adagrad(source.b.parameters())])
    model = Model()
    optimizers = [Adagrad(model.b.parameters()), Adagrad(model.a.parameters())]
    restored = cnr_store.load(tmp_path, model, optimizers, strict="ignore")
    assert restored.missing == (
        *("state of 'b.weight' in optimizer 0", SETTINGS),
        *("state of 'a.weight' in optimizer 1", "settings of optimizer 1"),
    )
    train(model, *optimizers)


def test_a_part_says_that_state_is_not_stored(tmp_path: Path) -> None:
    saved(tmp_path, Adagrad, "a")
    model = Model()
    optimizer = Adagrad(model.parameters())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelMismatchError, match=r"only in the model: state of 'b.weight' in optimizer 0;"):
        cnr_store.load(tmp_path, model, optimizer, tables="b")
    assert same(model.state_dict(), before)
    restored = cnr_store.load(tmp_path, model, optimizer, tables="b", rows=[3], strict="ignore")
    assert restored.missing == ("state of 'b.weight' in optimizer 0",)
    train(model, optimizer)


def test_new_parameters_without_state_are_not_listed(tmp_path: Path) -> None:
    saved(tmp_path, Adam, "a")
    model = Model()
    optimizer = Adam(model.parameters())
    assert cnr_store.load(tmp_path, model, optimizer, strict="ignore").missing == (SETTINGS,)
    assert list(optimizer.state) == [model.a.weight]


@pytest.mark.parametrize("kind", [Adam, NAdam, RMSprop, lambda given: SGD(given, 0.1, momentum=0.9)])
@pytest.mark.parametrize("strict", ["raise", "ignore"])
def test_that_a_parameter_had_no_state_comes_back(tmp_path: Path, kind: Kind, strict: Any) -> None:
    source = Model()
    optimizer = kind([source.top.weight, source.top.bias, source.a.weight, source.b.weight])
    train(source, optimizer, dense=False)
    cnr_store.save(tmp_path, source, optimizer, bits=32)
    model = Model()
    again = kind([model.top.weight, model.top.bias, model.a.weight, model.b.weight])
    train(model, again)
    restored = cnr_store.load(tmp_path, model, again, strict=strict)
    assert restored.missing == ()
    assert set(again.state) == {model.a.weight, model.b.weight}
    for step_of, stepped in ((source, optimizer), (model, again)):
        train(step_of, stepped)
    assert same(model.state_dict(), source.state_dict())
