"""Loading a part of a version, or a whole one into a model that differs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

import cnr_store
from cnr_store import Checkpointer, ModelMismatchError, OptionError

Saved = tuple["Model", Adagrad]
DIM = 4


class Model(nn.Module):
    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, **rows: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(count, DIM, sparse=True, dtype=dtype) for name, count in rows.items()}
        )
        self.top = nn.Linear(DIM, 1)

    def forward(self, **ids: Sequence[int]) -> torch.Tensor:
        loss: torch.Tensor = self.top(torch.ones(1, DIM)).sum()
        for name, chosen in ids.items():
            loss = loss + self.tables[name](torch.tensor(chosen)).float().sum()
        return loss

    def rows(self, name: str) -> torch.Tensor:
        weight = self.tables.get_parameter(f"{name}.weight")
        return weight.detach()


def train(model: Model, optimizer: Optimizer, **ids: Sequence[int]) -> None:
    optimizer.zero_grad()
    loss: Any = model(**ids)
    loss.backward()
    optimizer.step()


def adagrad(model: Model) -> Adagrad:
    return Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)


def sums(model: Model, optimizer: Optimizer, name: str) -> torch.Tensor:
    found: torch.Tensor = optimizer.state[model.tables.get_parameter(f"{name}.weight")]["sum"]
    return found


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def saved(url: str) -> tuple[Model, Adagrad]:
    """What is in the store: two versions, the second a delta."""
    model = Model(user=20, item=30)
    optimizer = adagrad(model)
    with Checkpointer(url, model, optimizer, bits=32, policy="consecutive") as checkpointer:
        train(model, optimizer, user=[1, 2, 3], item=[4, 29])
        checkpointer.save(1)
        train(model, optimizer, user=[3, 19], item=[0])
        checkpointer.save(2, reader={"at": 2})
    return model, optimizer


# What is loaded


def test_one_table_comes_with_its_optimizer_state_and_nothing_else_does(url: str, saved: Saved) -> None:
    model = Model(1, user=20, item=30)
    optimizer = adagrad(model)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    restored = cnr_store.load(url, model, optimizer, tables="tables.user")
    assert restored.step == 2
    assert restored.reader == {"at": 2}
    assert torch.equal(model.rows("user"), saved[0].rows("user"))
    assert torch.equal(sums(model, optimizer, "user"), sums(*saved, "user"))
    assert torch.equal(model.rows("item"), before["tables.item.weight"])
    assert sums(model, optimizer, "item").eq(0.5).all()
    assert torch.equal(model.top.weight, before["top.weight"])
    assert torch.equal(torch.get_rng_state(), rng)


def test_dense_tensors_are_chosen_by_pattern(url: str, saved: Saved) -> None:
    model = Model(1, other=3)
    cnr_store.load(url, model, tensors="top.*")
    assert torch.equal(model.top.weight, saved[0].top.weight)


@pytest.mark.parametrize("rows", [range(2, 4), [3, 2, 3], np.array([2, 3]), torch.tensor([2, 3])])
def test_chosen_rows_come_alone_also_of_a_table_that_shrank(url: str, saved: Saved, rows: Any) -> None:
    model = Model(1, user=5)
    optimizer = adagrad(model)
    before = model.rows("user").clone()
    cnr_store.load(url, model, optimizer, rows={"tables.user": rows})
    assert torch.equal(model.rows("user")[2:4], saved[0].rows("user")[2:4])
    assert torch.equal(sums(model, optimizer, "user")[2:4], sums(*saved, "user")[2:4])
    for kept in (0, 1, 4):
        assert torch.equal(model.rows("user")[kept], before[kept])
        assert sums(model, optimizer, "user")[kept].eq(0.5).all()


def test_rows_without_a_mapping_are_those_of_every_table(url: str, saved: Saved) -> None:
    model = Model(1, user=20, item=30)
    cnr_store.load(url, model, rows=range(5))
    for name in ("user", "item"):
        assert torch.equal(model.rows(name)[:5], saved[0].rows(name)[:5])
        assert not torch.equal(model.rows(name)[5:], saved[0].rows(name)[5:])


@pytest.mark.parametrize("strict", ["ignore", "report"])
def test_new_rows_of_a_grown_table_keep_what_they_hold(
    url: str, saved: Saved, strict: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(1, user=33, item=30)
    optimizer = adagrad(model)
    before = model.rows("user").clone()
    with caplog.at_level(logging.WARNING, "cnr_store"):
        restored = cnr_store.load(url, model, optimizer, strict=strict)
    assert restored.grown == {"tables.user": (20, 33)}
    assert ("grew from 20 rows to 33" in caplog.text) == (strict == "report")
    assert torch.equal(model.rows("user")[:20], saved[0].rows("user"))
    assert torch.equal(model.rows("user")[20:], before[20:])
    assert torch.equal(sums(model, optimizer, "user")[:20], sums(*saved, "user"))
    assert sums(model, optimizer, "user")[20:].eq(0.5).all()
    assert torch.equal(model.rows("item"), saved[0].rows("item"))
    assert torch.equal(model.top.weight, saved[0].top.weight)


def test_state_that_is_not_there_yet_begins_at_zero_for_new_rows(url: str) -> None:
    model = Model(user=8)
    with Checkpointer(
        url, model, optimizer := SparseAdam(model.tables.parameters()), bits=32
    ) as checkpointer:
        train(model, optimizer, user=[1, 7])
        checkpointer.save(1)
    other = Model(1, user=10)
    again = SparseAdam(other.tables.parameters())
    cnr_store.load(url, other, again, strict="ignore")
    state, stored = (next(iter(each.state_dict()["state"].values())) for each in (again, optimizer))
    assert torch.equal(state["exp_avg"][:8], stored["exp_avg"])
    assert state["exp_avg"][8:].eq(0).all()
    assert state["step"] == 1


def test_tables_that_only_one_side_has_are_listed(url: str, saved: Saved) -> None:
    model = Model(1, user=20, new=3)
    restored = cnr_store.load(url, model, strict="ignore")
    assert restored.missing == ("tables.new",)
    assert restored.unexpected == ("tables.item", "state of optimizer 0")
    assert torch.equal(model.rows("user"), saved[0].rows("user"))


def test_an_optimizer_of_another_class_and_state_that_is_not_stored_are_listed(
    url: str, saved: Saved
) -> None:
    model = Model(1, user=20, item=30)
    optimizer = SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    restored = cnr_store.load(url, model, optimizer, state={"lr": scheduler}, strict="ignore")
    assert restored.missing == ("state of optimizer 0 (SGD)", "state of 'lr'")
    assert torch.equal(model.rows("user"), saved[0].rows("user"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_converted_to_the_model_s_type_and_it_is_said(
    url: str, saved: Saved, dtype: torch.dtype
) -> None:
    model = Model(1, dtype, user=20, item=30)
    restored = cnr_store.load(url, model, strict="ignore")
    name = str(dtype).removeprefix("torch.")
    assert restored.cast == {f"tables.{table}": ("float32", name) for table in ("user", "item")}
    assert torch.equal(model.rows("user"), saved[0].rows("user").to(dtype))


def test_everything_that_fits_is_as_exact_as_a_plain_load(url: str, saved: Saved) -> None:
    model, plain = Model(1, user=20, item=30), Model(2, user=20, item=30)
    optimizer, plain_optimizer = adagrad(model), adagrad(plain)
    restored = cnr_store.load(url, model, optimizer, strict="report")
    rng = torch.get_rng_state()
    cnr_store.load(url, plain, plain_optimizer)
    assert (restored.missing, restored.unexpected, restored.grown, restored.cast) == ((), (), {}, {})
    assert torch.equal(torch.get_rng_state(), rng)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert torch.equal(sums(model, optimizer, "item"), sums(plain, plain_optimizer, "item"))


# What is refused: the model stays as it is


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ({"user": 20, "item": 30}, {"tables": "usr*"}, "no table in .* matches 'usr\\*'"),
        ({"user": 20, "item": 30}, {"tensors": "bottom"}, "no tensor in .* matches 'bottom'"),
        (
            {"user": 20, "new": 3},
            {"tables": ["tables.user", "tables.new"]},
            r"only in the model: \['tables.new'\]",
        ),
        ({"user": 20}, {"tables": "*"}, r"only in the store: \['tables.item'\]"),
        ({"user": 21, "item": 30}, {"tables": "*"}, "'tables.user' is 21 x 4 in the model and 20 x 4 in"),
        ({"user": 19, "item": 30}, {"strict": "ignore"}, r"is 19 x 4 .* and 20 x 4 .*rows=range\(19\)"),
        ({"user": 19, "item": 30}, {"tables": "*.user", "rows": [19]}, "row 19 was chosen"),
        ({"user": 25, "item": 30}, {"tables": "*.user", "rows": [20]}, "row 20 was chosen"),
    ],
)
def test_what_does_not_fit_leaves_the_model_unchanged(
    url: str, saved: Saved, rows: Any, options: dict[str, Any], message: str
) -> None:
    model = Model(1, **rows)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelMismatchError, match=message):
        cnr_store.load(url, model, adagrad(model), **options)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_other_columns_are_never_passed_over(url: str, saved: Saved) -> None:
    with pytest.raises(ModelMismatchError, match="is 20 x 3 in the model and 20 x 4 in"):
        cnr_store.load(
            url, nn.ModuleDict({"tables": nn.ModuleDict({"user": nn.Embedding(20, 3)})}), strict="ignore"
        )


@pytest.mark.parametrize(
    "options",
    [
        {"strict": "maybe"},
        {"rows": [-1]},
        {"rows": [0.5]},
        {"rows": 3},
        {"tables": [1]},
        {"fallback": True, "rows": [1]},
    ],
)
def test_wrong_options(url: str, saved: Saved, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        cnr_store.load(url, Model(1, user=20, item=30), **options)


# What the next save writes


def _saved_after(
    url: str, model: Model, optimizer: Optimizer | None, ids: dict[str, list[int]], **options: Any
) -> Any:
    """Load, train, save; what the version says of its arrays, proven to restore to the model as it was."""
    with Checkpointer(url, model, optimizer, bits=32, policy="consecutive") as checkpointer:
        checkpointer.load(**options)
        if optimizer is not None:
            train(model, optimizer, **ids)
        info = checkpointer.save(9).result()
    again = copy.deepcopy(model)
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    if optimizer is None:
        cnr_store.load(url, again)
    else:
        cnr_store.load(url, again, optimizer_again := adagrad(again))
        for table in model.tables:
            assert torch.equal(sums(again, optimizer_again, table), sums(model, optimizer, table))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    return info


def test_only_tables_that_were_loaded_exactly_go_on_as_deltas(url: str, saved: Saved) -> None:
    model = Model(1, user=33, item=30)
    info = _saved_after(url, model, adagrad(model), {"user": [32], "item": [5]}, strict="ignore")
    assert info.kind == "delta"
    assert info.rows == 33 + 1


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"tables": "tables.item"}, 20 + 1),
        ({"tables": "*"}, 2),
        ({"rows": range(20)}, 20 + 30),
        ({"tensors": "top.*"}, 20 + 30),
    ],
)
def test_what_was_not_loaded_is_saved_whole(
    url: str, saved: Saved, options: dict[str, Any], rows: Any
) -> None:
    model = Model(1, user=20, item=30)
    info = _saved_after(url, model, adagrad(model), {"user": [2], "item": [5]}, **options)
    assert info.rows == rows


def test_a_table_of_another_type_is_saved_whole(url: str, saved: Saved) -> None:
    model = Model(1, torch.bfloat16, user=20, item=30)
    assert _saved_after(url, model, None, {}, strict="ignore").rows == 50


def test_optimizer_state_that_was_not_loaded_is_saved_whole_beside_a_delta(url: str, saved: Saved) -> None:
    other = Model(2, user=20, item=30)
    two = [
        Adagrad(other.top.parameters()),
        Adagrad(other.tables.parameters(), initial_accumulator_value=0.25),
    ]
    with Checkpointer(url, other, two, bits=32, policy="consecutive") as checkpointer:
        checkpointer.load(strict="ignore")
        train(other, two[1], user=[1], item=[2])
        info = checkpointer.save(9).result()
    assert info.rows == 2
    third = Model(3, user=20, item=30)
    three = [Adagrad(third.top.parameters()), Adagrad(third.tables.parameters())]
    cnr_store.load(url, third, three)
    assert torch.equal(sums(third, three[1], "user"), sums(other, two[1], "user"))
    assert torch.equal(third.rows("user"), other.rows("user"))


class Tied(nn.Module):
    """Three tables and three layers. In each the last is tied to the one that is named."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(5, DIM) for name in "abc"})
        self.layers = nn.ModuleDict({name: nn.Linear(DIM, DIM, bias=False) for name in "abc"})
        for kind in (self.tables, self.layers):
            kind["c"].weight = kind[owner].weight


def test_a_tie_that_moved_is_told(url: str, caplog: pytest.LogCaptureFixture) -> None:
    cnr_store.save(url, Tied("a"), step=1)
    cnr_store.load(url, Tied("a"))
    model = Tied("b")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ModelMismatchError, match=r"'tables.c.weight' is the same as 'tables.b.weight' in the"
    ) as error:
        cnr_store.load(url, model)
    assert "'layers.c.weight' is the same as 'layers.b.weight'" in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with caplog.at_level(logging.WARNING, "cnr_store"):
        cnr_store.load(url, model, strict="report")
    assert "tables.c.weight was tables.a.weight and gets the values of tables.b.weight" in caplog.text
    # A table that nothing is tied to otherwise.
    cnr_store.load(url, model, tables="tables.a", tensors=())


@pytest.mark.parametrize("part", [{"rows": range(1)}, {"tables": "tables.a"}])
def test_state_changed_by_hand_after_a_partial_load_is_saved(tmp_path: Path, part: dict[str, Any]) -> None:
    model = Model(a=50, b=50)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer, policy="consecutive", bits=32) as checkpointer:
        train(model, optimizer, a=[1, 2], b=[3])
        checkpointer.save(1).result()
        checkpointer.load(**part)
        with torch.no_grad():
            optimizer.state[model.tables.get_parameter("a.weight")]["sum"][7] += 1
        checkpointer.save(2).result()
    other = Model(1, a=50, b=50)
    loaded = Adagrad(other.parameters(), lr=0.1)
    with Checkpointer(tmp_path, other, loaded) as checkpointer:
        checkpointer.load()
    for name in ("a.weight", "b.weight"):
        of_model, of_other = model.tables.get_parameter(name), other.tables.get_parameter(name)
        assert torch.equal(loaded.state[of_other]["sum"], optimizer.state[of_model]["sum"])


class Counting(Optimizer):
    """Counts in float64, which is not stored by rows, how often each value was changed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no test asks for a loss
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one].setdefault("count", torch.zeros(one.shape, dtype=torch.float64)).add_(1)


def test_state_by_rows_that_is_stored_whole_does_not_go_into_a_grown_table(url: str) -> None:
    model = Model(user=8)
    with Checkpointer(url, model, optimizer := Counting(model.parameters())) as checkpointer:
        train(model, optimizer, user=[1])
        checkpointer.save(1)
    for rows in (8, 10):
        other = Model(1, user=rows)
        train(other, again := Counting(other.parameters()), user=[1])
        before = other.rows("user").clone()
        if rows == 8:
            cnr_store.load(url, other, again)
            continue
        with pytest.raises(
            ModelMismatchError, match=r"has 10 rows, 8 are stored, .* 'count' of torch\.float64"
        ):
            cnr_store.load(url, other, again, strict="ignore")
        assert torch.equal(other.rows("user"), before)
        cnr_store.load(url, other, strict="ignore")
