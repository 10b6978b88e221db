"""What versions are without: as the option `exclude` says, or as the model leaves it out of its state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad

import cnr_store
from cnr_store import Checkpointer, ModelMismatchError, OptionError

ROWS = 300


class Words(nn.Embedding):
    """A table with extra state."""

    language = "en"

    def get_extra_state(self) -> str:
        return self.language

    def set_extra_state(self, state: str) -> None:
        self.language = state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = Words(ROWS, 4)
        self.users = nn.Embedding(ROWS, 4, sparse=True)
        self.top = nn.Linear(4, 2)

    def train_step(self, optimizer: Any, *ids: int) -> None:
        rows = torch.tensor(ids)
        (self.words(rows) + self.top(self.users(rows)).sum()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(*ids: int) -> tuple[Model, Any]:
    model = Model()
    optimizer: Any = Adagrad([*model.words.parameters(), *model.top.parameters()])
    model.train_step(optimizer, *ids)
    return model, optimizer


def held(model: Model, optimizer: Any) -> dict[str, Any]:
    """Copies of all that the model and the optimizer hold."""
    state: dict[str, Any] = dict(model.state_dict())
    state |= {
        f"of {name}": optimizer.state.get(each, {}).get("sum") for name, each in model.named_parameters()
    }
    return {name: value.tolist() if torch.is_tensor(value) else value for name, value in state.items()}


EXCLUDED = {"words.weight", "words._extra_state", "of words.weight", "top.bias", "of top.bias"}


@pytest.mark.parametrize("saved_with", [(), ("words*", "top.bias")])
def test_what_is_excluded_is_not_saved_and_stays_as_it_is(
    tmp_path: Path, saved_with: tuple[str, ...]
) -> None:
    model, optimizer = trained(3, 5)
    model.words.language = "de"
    cnr_store.save(tmp_path, model, optimizer, tracking=cnr_store.Tracking(exclude=saved_with), bits=32)
    assert ("words.weight" in cnr_store.state_dict(tmp_path)) == (not saved_with)
    other, stepped = trained(7)
    before, expected = held(other, stepped), held(model, optimizer)
    with Checkpointer(
        tmp_path,
        other,
        stepped,
        tracking=cnr_store.Tracking(exclude=("words*", "top.bias")),
        policy="consecutive",
    ) as checkpointer:
        checkpointer.load()
        after = held(other, stepped)
        assert {name for name in after if after[name] != expected[name]} == EXCLUDED
        assert {name: after[name] for name in EXCLUDED} == {name: before[name] for name in EXCLUDED}
        with torch.no_grad():
            other.users.weight[8] *= 2
        checkpointer.touch("users", [8])
        version = checkpointer.save(2).result()
        assert (version.kind, version.rows) == ("delta", 1)
    assert sorted(cnr_store.state_dict(tmp_path)) == ["top.weight", "users.weight"]


def test_a_table_is_named_as_in_the_store_or_by_its_parameter(tmp_path: Path) -> None:
    model, optimizer = trained(3)
    for number, exclude in enumerate(("words", "words.weight", ["word?"])):
        cnr_store.save(tmp_path / str(number), model, optimizer, tracking=cnr_store.Tracking(exclude=exclude))
        assert "words.weight" not in cnr_store.state_dict(tmp_path / str(number))


def test_an_excluded_table_may_be_replaced(tmp_path: Path) -> None:
    model = Model()
    with Checkpointer(tmp_path, model, tracking=cnr_store.Tracking(exclude="words*")) as checkpointer:
        checkpointer.save(1).result()
        model.words = Words(9, 4, dtype=torch.float64)
        assert checkpointer.save(2).result().kind == "delta"


@pytest.mark.parametrize("exclude", ["wrods", "top", ("users", "x*")])
def test_a_pattern_that_fits_nothing_is_refused(tmp_path: Path, exclude: Any) -> None:
    with pytest.raises(OptionError, match=r"exclude: .* fits no table or tensor; there are .*'words'"):
        Checkpointer(tmp_path, Model(), tracking=cnr_store.Tracking(exclude=exclude))


@pytest.mark.parametrize("exclude", ["users", "users.weight", "out.weight"])
def test_one_name_alone_of_a_tied_tensor_is_refused(tmp_path: Path, exclude: str) -> None:
    model: Any = Model()
    model.out = nn.Linear(1, 1, bias=False)
    model.out.weight = model.users.weight
    with pytest.raises(OptionError, match=r"which is the same tensor as '(out|users)\.weight': give both"):
        Checkpointer(tmp_path, model, tracking=cnr_store.Tracking(exclude=exclude))
    Checkpointer(tmp_path, model, tracking=cnr_store.Tracking(exclude=("users", "out.weight"))).close()


def test_without_the_option_what_is_missing_is_an_error(tmp_path: Path) -> None:
    cnr_store.save(tmp_path, Model(), tracking=cnr_store.Tracking(exclude="words*"))
    with pytest.raises(ModelMismatchError, match=r"only in the model: \['words'\]"):
        cnr_store.load(tmp_path, Model())


def leave_out(_module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    del state[prefix + "words.weight"], state[prefix + "top.bias"]


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
def test_what_a_model_leaves_out_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrap: Any
) -> None:
    model, optimizer = trained(3)
    other, stepped = trained(5)
    for each in (model, other):
        each._register_state_dict_hook(leave_out)  # type: ignore[no-untyped-call]
    cnr_store.save(tmp_path, model, optimizer, bits=32)
    assert sorted(cnr_store.state_dict(tmp_path)) == ["top.weight", "users.weight"]
    caplog.clear()
    before = other.words.weight.detach().clone()
    with Checkpointer(tmp_path, wrap(other), stepped) as checkpointer:
        checkpointer.load()
        assert checkpointer.save(2).result().kind == "delta"
    (said,) = caplog.messages
    assert said.startswith("the model leaves words.weight, top.bias out of its state dict")
    exclude = ["words.weight", "top.bias"]
    advice = "; leave out its optimizer state, too, with tracking=cnr_store.Tracking(exclude="
    assert said.endswith(f"{advice}{exclude})")
    assert torch.equal(other.words.weight, before)
    assert torch.equal(other.users.weight, model.users.weight)
    # An optimizer's state dict has its state, as torch.save would.
    assert torch.equal(stepped.state[other.words.weight]["sum"], optimizer.state[model.words.weight]["sum"])
    caplog.clear()
    cnr_store.save(tmp_path / "less", wrap(model), optimizer, tracking=cnr_store.Tracking(exclude=exclude))
    assert caplog.messages == []
    other, stepped = trained(5)
    kept = held(other, stepped)
    cnr_store.load(tmp_path / "less", other, stepped, tracking=cnr_store.Tracking(exclude=exclude))
    loaded = held(other, stepped)
    assert {name for name in exclude if loaded[f"of {name}"] == kept[f"of {name}"]} == {*exclude}
    cnr_store.save(tmp_path / "bare", model)  # without an optimizer there is no state to leave out
    assert [said.endswith("leaves it as it is") for said in caplog.messages] == [True]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.int64, torch.bool])
def test_tables_of_other_than_floating_point_are_stored_as_dense_tensors(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    values = [torch.randint(0, 2, (ROWS, 4)).to(dtype) for _ in range(2)]
    frozen = [nn.Parameter(each, requires_grad=False) for each in values]
    saved, model = (
        nn.ModuleDict({"few": nn.Embedding(ROWS, 4, _weight=each, _freeze=True)}) for each in frozen
    )
    assert cnr_store.save(tmp_path, saved, bits=4).kind == "baseline"
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.load()
        assert torch.equal(model["few"](torch.arange(ROWS)), values[0])
        with torch.no_grad():
            model["few"].weight.zero_()  # type: ignore[operator]
        checkpointer.save(2).result()
    assert not cnr_store.state_dict(tmp_path)["few.weight"].any()


def test_lbfgs_keeps_all_parameters_in_one_so_none_is_left_out(tmp_path: Path) -> None:
    model = nn.ModuleDict({"users": nn.Embedding(900, 8), "top": nn.Linear(8, 1)})
    with pytest.raises(cnr_store.OptionError, match=r"exclude leaves 'users.weight' out.*LBFGS"):
        cnr_store.Checkpointer(
            tmp_path,
            model,
            torch.optim.LBFGS(model.parameters()),
            tracking=cnr_store.Tracking(exclude="users"),
        )
