"""What a version holds and a load was not given is told of; messages about what differs name a way out that works."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import StepLR

import cnr_store
from cnr_store import Checkpointer, ModelMismatchError


class Model(nn.Module):
    def __init__(self, rows: int = 20, dtype: torch.dtype = torch.float32, **more: nn.Module) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, 4, sparse=True, dtype=dtype)
        self.top = nn.Linear(4, 1, dtype=dtype)
        for name, module in more.items():
            setattr(self, name, module)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    place, model = str(tmp_path_factory.mktemp("saved")), Model()
    optimizer = Adagrad(model.parameters())
    cnr_store.save(place, model, optimizer, state={"lr": StepLR(optimizer, 3)}, bits=32)
    return place


ALL = ("state of optimizer 0", "state of 'lr'")


def test_what_a_load_was_not_given_is_told_of_and_listed(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(url, Model()) as checkpointer:
        restored = checkpointer.load()
        assert restored.unexpected == ALL
        (said,) = caplog.messages
        assert said.startswith(f"version {restored.version.id} of ")
        assert "also holds the state of optimizer 0, state of 'lr', which the next save will not have" in said
        assert checkpointer.load(strict="ignore").unexpected == ALL
        assert checkpointer.load(tables="*").unexpected == ()
        assert len(caplog.messages) == 1
        assert checkpointer.load(fallback=True).unexpected == ALL
        assert len(caplog.messages) == 2
    model = Model()
    optimizer = Adagrad(model.parameters())
    with Checkpointer(url, model, optimizer) as checkpointer:
        assert checkpointer.load().unexpected == ("state of 'lr'",)
        assert "also holds the state of 'lr'" in caplog.messages[-1]
    with Checkpointer(url, model, optimizer, state={"lr": StepLR(optimizer, 3)}) as checkpointer:
        assert checkpointer.load().unexpected == ()
    assert len(caplog.messages) == 3


def test_loading_weights_alone_is_silent(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cnr_store"):
        assert cnr_store.load(url, Model()).unexpected == ALL
    assert not caplog.messages


def test_an_optimizer_comes_back_to_a_store_that_lost_its_state(tmp_path: Path) -> None:
    url, model = str(tmp_path), Model()
    cnr_store.save(url, model)
    with Checkpointer(url, other := Model(), Adagrad(other.parameters())) as checkpointer:
        with pytest.raises(
            ModelMismatchError, match=r"was saved without an optimizer, 1 were given.*strict=\"ignore\""
        ):
            checkpointer.load()
        assert checkpointer.load(strict="ignore").missing == ("state of optimizer 0 (Adagrad)",)
    assert torch.equal(other.users.weight, model.users.weight)


def of(kind: Callable[..., Optimizer], **options: Any) -> Callable[[], tuple[Model, Optimizer]]:
    def make() -> tuple[Model, Optimizer]:
        model = Model(**options)
        return model, kind(model.parameters(), lr=0.1)

    return make


def two_groups() -> tuple[Model, Optimizer]:
    model = Model()
    return model, Adagrad([{"params": model.users.parameters()}, {"params": model.top.parameters()}])


@pytest.mark.parametrize(
    "make",
    [
        of(Adagrad, rows=25),
        of(Adagrad, dtype=torch.float16),
        of(Adagrad, items=nn.Embedding(3, 2)),
        of(Adagrad, more=nn.Linear(2, 2)),
        of(SGD),
        two_groups,
    ],
    ids=["grown", "another type", "one more table", "one more tensor", "another optimizer", "other groups"],
)
def test_the_way_out_that_a_message_names_is_one(
    url: str, make: Callable[[], tuple[Model, Optimizer]]
) -> None:
    model, optimizer = make()
    with Checkpointer(url, model, optimizer) as checkpointer:
        with pytest.raises(ModelMismatchError, match=r'or load\(strict="ignore"\), which loads'):
            checkpointer.load()
        checkpointer.load(strict="ignore")


@pytest.mark.parametrize("options", [{}, {"tables": "*", "tensors": "*"}])
def test_one_error_names_every_difference(url: str, options: dict[str, Any]) -> None:
    model = Model(25, torch.float16, items=nn.Embedding(3, 2))
    model.top = nn.Linear(5, 1)
    before = copy.deepcopy(model.state_dict())
    with Checkpointer(url, model) as checkpointer, pytest.raises(ModelMismatchError) as caught:
        checkpointer.load(**options)
    parts = (
        r"tables only in the model: \['items'\], only in the store: none; .* loads what both have",
        r"table 'users' is 25 x 4 in the model and 20 x 4 in .* loads its rows and keeps the new ones",
        r"table 'users' is float16 in the model and float32 in .* loads it converted",
        r"tensor 'top.weight' is 1 x 5 in the model and 1 x 4 in .*; give the model that was saved",
    )
    lines = str(caught.value).splitlines()
    assert len(lines) == len(parts)
    assert all(re.search(part, line) for part, line in zip(parts, lines, strict=True))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_one_error_names_twenty_differences_at_most(tmp_path: Path) -> None:
    def model(dtype: torch.dtype) -> nn.Module:
        return nn.ParameterDict({f"p{at}": torch.zeros(2, dtype=dtype) for at in range(24)})

    cnr_store.save(tmp_path, model(torch.float32))
    with pytest.raises(ModelMismatchError, match=r"\nand 4 more differences$") as caught:
        cnr_store.load(tmp_path, model(torch.float64))
    assert str(caught.value).count("is float64 in the model and float32 in") == 20


def test_a_table_that_shrank_is_loaded_by_the_rows_that_the_message_names(url: str) -> None:
    with Checkpointer(url, Model(15)) as checkpointer:
        with pytest.raises(
            ModelMismatchError, match=r"20 x 4 .*or load a part of it, as with rows=range\(15\)"
        ):
            checkpointer.load()
        checkpointer.load(rows=range(15))


def test_no_way_out_is_named_where_there_is_none(url: str) -> None:
    model = Model()
    model.users = nn.Embedding(20, 5, sparse=True)
    with Checkpointer(url, model) as checkpointer:
        with pytest.raises(ModelMismatchError, match=r"give the model that was saved$"):
            checkpointer.load()
