"""Bad arguments give one clear error of our own, which says what, where and what to do, and lose nothing."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import cnr_store
from cnr_store import (
    Checkpointer,
    ModelMismatchError,
    OptionError,
    SaveError,
    StateError,
    UnsupportedModelError,
    VersionNotFoundError,
)
from tests.test_store.support.lasting_store import (
    DIM,
    ROWS,
    assert_newest,
    change,
    make_model,
    weight,
)

# Models


def _changed(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = make_model(1)
    change(model)
    return model


def _weighted(values: torch.Tensor) -> nn.Module:
    """A model whose table is exactly this tensor."""
    model = make_model(1)
    model.get_submodule("t").register_parameter("weight", nn.Parameter(values))
    return model


def _buffered(values: torch.Tensor) -> nn.Module:
    model = make_model(1)
    model.register_buffer("b", values)
    return model


class _WithExtraState(nn.Module):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (make_model(1, name="u"), r"tables only in the model: \['u'\], only in the store: \['t'\]; give"),
        (
            make_model(1, rows=601),
            "table 't' is 601 x 8 in the model and 600 x 8 in version .*; give the model",
        ),
        (make_model(1, dim=9), "table 't' is 600 x 9 in the model and 600 x 8 in version .*; give the model"),
        (make_model(1, dtype=torch.float16), "table 't' is float16 in the model and float32.*; convert"),
        (make_model(1, out=5), "tensor 'top.weight' is 5 x 8 in the model and 4 x 8 in version.*; give"),
        (
            _changed(lambda m: m.top.double()),
            "'top.weight' is float64 in the model and float32 in.*; convert",
        ),
        (
            _changed(lambda m: m.top.bfloat16()),
            "'top.weight' is bfloat16 in the model and float32.*; convert",
        ),
        (
            _changed(lambda m: m.add_module("more", nn.Linear(2, 2))),
            "tensors only in the model: .'more.bias'",
        ),
        (_changed(lambda m: m.add_module("more", nn.Embedding(2, 2))), "tables only in the model: .'more'"),
        (_changed(lambda m: m.add_module("more", _WithExtraState())), "extra state of the model"),
    ],
)
def test_model_that_does_not_fit(stored: Path, model: nn.Module, message: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
    with Checkpointer(stored, model) as checkpointer, pytest.raises(ModelMismatchError, match=message):
        checkpointer.load()
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), (
            f"{name} was changed before the model was refused"
        )


def test_optimizer_that_does_not_fit(tmp_path: Path) -> None:
    model = make_model()
    cnr_store.save(tmp_path, model, SGD(model.parameters(), lr=0.1))
    other = make_model(1)
    before = weight(other).clone()
    given: list[tuple[Any, str]] = [
        (Adam(other.parameters()), "optimizer 0 is Adam, in version .* it is SGD; give the one"),
        (
            [SGD(other.parameters(), lr=1), SGD(other.parameters(), lr=1)],
            "state of 1 optimizers, 2 were given",
        ),
        (SGD([other.get_parameter("t.weight")], lr=1), "parameter group 0 is in no group of the checkpoint"),
    ]
    for optimizer, message in given:
        with Checkpointer(tmp_path, other, optimizer) as checkpointer:
            with pytest.raises(ModelMismatchError, match=message):
                checkpointer.load()
            assert torch.equal(weight(other), before)
    clock = torch.optim.lr_scheduler.StepLR(SGD(other.parameters(), lr=1), 1)
    with pytest.raises(ModelMismatchError, match="holds no state of clock; leave out"):
        cnr_store.load(tmp_path, other, state={"clock": clock})
    assert torch.equal(weight(other), before)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (make_model(rows=0), r"table 't' has shape \(0, 8\); a table has rows"),
        (make_model().to("meta"), "table 't' is on the meta device.*materialize"),
        (
            make_model(dtype=torch.float64),
            r"table 't' is of float64; tables are of bfloat16, float16, float32: .*model\.float\(\)",
        ),
        (3, "the model is of type int; give a torch.nn.Module"),
        (_weighted(torch.ones(1, DIM).expand(ROWS, DIM)), "table 't': rows share memory.* clone"),
        (_weighted(torch.ones(ROWS + DIM).unfold(0, DIM, 1)), "table 't': rows share memory.* clone"),
    ],
)
def test_model_that_can_not_be_saved(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpointer(tmp_path / "new", model)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (make_model(name="\ud800"), "the name '.ud800' holds half of a surrogate pair"),
        (
            nn.ModuleDict({"\ud800": nn.Linear(3, 2)}),
            "the name '.ud800.weight' holds half of a surrogate pair",
        ),
        (_buffered(torch.ones(3).expand(2, 3)), "'b' of the model: elements share memory.* clone"),
    ],
)
def test_model_that_is_refused_by_a_save(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        cnr_store.save(tmp_path, model)
    assert cnr_store.versions(tmp_path) == []


def test_memory_laid_out_otherwise_is_no_shared_memory(tmp_path: Path) -> None:
    model = _weighted(torch.randn(DIM, ROWS * 2).t()[::2])
    model.register_buffer("b", torch.ones(1, 3).expand(1, 3))
    cnr_store.save(tmp_path, model, bits=32)
    other = _weighted(torch.zeros(ROWS, DIM))
    other.register_buffer("b", torch.zeros(1, 3))
    cnr_store.load(tmp_path, other)
    assert torch.equal(weight(other), weight(model))


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"bits": bits}, "bits .*: use 2, 3, 4, 8, 32") for bits in (0, 1, 5, 16, "8", 4.0, True, [4])),
        ({"bits": {"*": 7}}, "bits 7: use 2, 3, 4, 8, 32"),
        *(({"policy": policy}, "is not one of full, one-shot") for policy in ("", "Full", None, 3)),
        ({"codec": "nope"}, "unknown codec 'nope'; use one of"),
        ({"codec": {"id": "cnr_uniform", "bits": 99}}, "bits must be an integer from 1 to 8, got 99"),
        ({"codec": {"id": "cnr_uniform", "width": 4}}, "doesn't take these options: .*width"),
        ({"codec": {"t": "nope"}}, "unknown codec 'nope'"),
        ({"codec": 3}, "expected a codec's name, configuration or object"),
        ({"codec": "cnr_uniform", "bits": 4}, "give the width in the codec's configuration alone"),
        ({"limits": {"workers": 0}}, "workers=0: give an integer of at least 1"),
        ({"limits": {"workers": 1.5}}, "workers=1.5: give an integer"),
        ({"limits": {"snapshot_bytes": -1}}, "snapshot_bytes=-1: give an integer of at least 0"),
        (
            {"limits": {"workers": 10**5000}},
            "workers=.an integer of 16610 bits.: give an integer of at least 1",
        ),
        (
            {"state": {"clock": 3}},
            "state 'clock': an object of type int has no .*: put arrays into an object that has them",
        ),
        (
            {"state": {"best": {"auc": 0.7}}},
            r"dict has .*give a few values to a save: metadata=\{'best': \.\.\.\}",
        ),
        ({"state": [3]}, "state is of type list; give"),
        ({"state": {1: nn.Linear(2, 2)}}, "state: the name 1 is of type int; give a string"),
        ({"state": {"clock": nn.Linear}}, "state 'clock': Linear is a class; give an object of it"),
        (
            {"job": {"restores_per_save": 10**400}},
            "restores_per_save=.an integer of 1329 bits.; give a number",
        ),
    ],
)
def test_option_out_of_range(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    groups = {"limits": cnr_store.Limits, "job": cnr_store.Job}
    with pytest.raises(OptionError, match=message):
        given = {name: groups[name](**value) if name in groups else value for name, value in options.items()}
        Checkpointer(tmp_path / "new", make_model(), **given)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [-1, 2**62 + 1, 1.0, "3", None, True, math.nan, np.int64(-2), np.float64(3)])
def test_step_that_is_no_count(stored: Path, step: Any) -> None:
    count: Any = np.int64(7)
    with Checkpointer(stored, make_model()) as checkpointer:
        with pytest.raises(OptionError, match=r"step=.*: give an integer of at least 0"):
            checkpointer.save(step)
        assert checkpointer.save(count).result().step == 7
    assert [info.step for info in cnr_store.versions(stored)] == [5, 7]


def _nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def _endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"reader": {"a": [1, object()]}},
            r"^state\['reader'\]\['a'\]\[1\]: a builtins.object can't be stored; use",
        ),
        ({"reader": {"a": np.array([None])}}, r"\['reader'\]\['a'\]: an array of dtype object.*use numbers"),
        ({"reader": {"a": "\ud800"}}, r"\['reader'\]\['a'\]: a string that is not valid Unicode"),
        (
            {"reader": cnr_store.TrackedReader},
            "the class TrackedReader was given for its state; give an object",
        ),
        ({"reader": int}, "the class int was given for its state; give an object"),
        (
            {"reader": [torch.eye(3).to_sparse()]},
            r"state\['reader'\]\[0\]: a tensor of layout torch.sparse_coo.* has no plain values",
        ),
        (
            {"reader": _nested()},
            r"state\['reader'\]: a nested tensor, type torch.float32 on cpu has no plain values",
        ),
        (
            {"reader": torch.empty(3, device="meta")},
            r"state\['reader'\]: a tensor .* on meta has no plain values",
        ),
        (
            {"metadata": {"a": torch.eye(3).to_sparse()}},
            r"state\['metadata'\]\['a'\]: a tensor of layout torch.sparse_coo",
        ),
        ({"reader": _endless()}, "nested deeper than 200 levels, or contains itself; flatten it"),
        (
            {"metadata": {"a": torch.tensor(1.5, dtype=torch.bfloat16)}},
            r"\['metadata'\]\['a'\]: metadata holds no bfloat16 tensor; give its item\(\)",
        ),
        ({"metadata": {"a": {3}}}, r"^state\['metadata'\]\['a'\]: a builtins.set can't be stored; use"),
        (
            {"metadata": "x" * 70_000},
            "metadata takes more than 64 KiB; give it through `state=`, in an object with state_dict",
        ),
        (
            {"metadata": [np.zeros(9000)]},
            r"\['metadata'\]\[0\]: an array of more than 8 KiB; give it through `state=`, in an object with",
        ),
    ],
)
def test_state_that_can_not_be_stored(stored: Path, given: dict[str, Any], message: str) -> None:
    model = make_model()
    with Checkpointer(stored, model, bits=32, policy="consecutive") as checkpointer:
        checkpointer.load()
        change(checkpointer, model, [3, 4])
        with pytest.raises(StateError, match=message):
            checkpointer.save(6, **given)
        assert checkpointer.save(6).result().rows == 2
    assert_newest(stored, model)


class _Registered:
    def state_dict(self) -> dict[str, Any]:
        return {"seen": [torch.eye(3).to_sparse()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_registered_state_that_can_not_be_stored(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, make_model(), state={"mine": _Registered()}) as checkpointer:
        with pytest.raises(
            StateError, match=r"^state\['objects'\]\['mine'\]\['seen'\]\[0\]: a tensor of layout"
        ):
            checkpointer.save(1)


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (
            "weight",
            "table 't': SGD keeps state called 'weight' for it, which the store needs .*; give that state another",
        ),
        ("", "table 't': SGD keeps state called '' for it, .*; give that state another name"),
        ("one", None),
    ],
)
def test_names_of_optimizer_state(tmp_path: Path, slot: str, message: str | None) -> None:
    model = make_model()
    table = model.get_parameter("t.weight")
    optimizer = SGD([table], lr=0.1)
    optimizer.state[table][slot] = torch.zeros_like(table)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        if message is None:
            assert checkpointer.save(1).result().step == 1
        else:
            with pytest.raises(UnsupportedModelError, match=message):
                checkpointer.save(1)


@pytest.mark.parametrize(
    ("table", "ids", "message"),
    [
        ("u", [1], r"no table 'u'; there are \['t'\]"),
        ("t", [1, ROWS], "ids from 1 to 600, but it has 600 rows"),
        ("t", [-1], "ids from -1 to -1"),
        ("t", [1.5], "ids are torch.float32; give integers"),
        ("t", torch.tensor([1, 2]).to_sparse(), "ids are a torch.sparse_coo tensor; give row numbers"),
        ("t", "abc", "ids are no numbers .*; give integers"),
        ("t", None, "ids are no numbers .*; give integers"),
    ],
)
def test_touch_of_no_row(tmp_path: Path, table: str, ids: Any, message: str) -> None:
    with (
        Checkpointer(tmp_path, make_model()) as checkpointer,
        pytest.raises(ModelMismatchError, match=message),
    ):
        checkpointer.touch(table, ids)


# Versions


@pytest.mark.parametrize(
    "version",
    [
        *("../x", "..", "", "zarr.json", "{id}/", "{id}\n", "../{id}", "versions/{id}", "LATEST", "5"),
        *("\u0660{id}", "00000\u0661-00000000.00000001", None, 5.0, True, b"x", [5]),
    ],
)
def test_version_that_is_none(stored: Path, version: Any) -> None:
    if isinstance(version, str):
        version = version.format(id=cnr_store.versions(stored)[0].id)
    _assert_no_version(stored, version, "give an id as `versions` lists them, a step, a tag, or 'latest'")


@pytest.mark.parametrize("version", [99, -1, "000009-00000000.00000001"])
def test_version_that_is_not_there(stored: Path, version: Any) -> None:
    _assert_no_version(stored, version, "`cnr_store.versions` and `cnr ls` list the versions")


def test_version_of_another_store(stored: Path, tmp_path: Path) -> None:
    _assert_no_version(stored, cnr_store.save(tmp_path / "other", make_model()), "no committed version")


def _assert_no_version(folder: Path, version: Any, message: str) -> None:
    model = make_model(1)
    with Checkpointer(folder, model) as checkpointer, pytest.raises(VersionNotFoundError, match=message):
        checkpointer.load(version)
    assert torch.equal(weight(model), weight(make_model(1)))
    for call in (cnr_store.open, cnr_store.view, cnr_store.state_dict):
        with pytest.raises(VersionNotFoundError, match=message):
            call(folder, version)


def test_a_clock_beyond_any_calendar_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(time, "time", lambda: 3e11)
    with pytest.raises(
        SaveError, match=r"nothing can be saved to .*: the time of this machine's clock is 3.*; set the clock"
    ):
        cnr_store.save(tmp_path, model, step=1)
    monkeypatch.undo()
    cnr_store.save(tmp_path, model, step=1)
    assert cnr_store.verify(tmp_path).ok


def test_a_module_given_as_state_that_has_none_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"empty": nn.Module(), "filled": nn.Linear(1, 1)}
    Checkpointer(tmp_path, make_model(1), state=state).close()
    (line,) = caplog.messages
    assert "state 'empty': the state_dict of this Module is empty, so nothing of it is saved" in line
