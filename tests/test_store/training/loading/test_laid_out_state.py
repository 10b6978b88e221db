"""Tensors of a state lie in memory as they did, as torch.save has it: sums and products round by how they lie.

Fused kernels walk memory, so what they use lies as the parameters do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import cnr_store


def _made() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"table": nn.Embedding(6, 4), "conv": nn.Conv2d(3, 4, 3)})
    model["table"].weight = nn.Parameter(torch.randn(4, 6).t())
    model["conv"].to(memory_format=torch.channels_last)
    return model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


def _step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
    optimizer.step()


def test_fused_steps_go_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = _made()
    _step(model, optimizer, 1)
    cnr_store.save(str(tmp_path / "s"), model, optimizer, bits=32)
    again, other = _made()
    cnr_store.load(str(tmp_path / "s"), again, other)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert other.state[two]["exp_avg"].stride() == optimizer.state[one]["exp_avg"].stride()
    _step(model, optimizer, 2)
    _step(again, other, 2)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_fused_state_lies_as_parameters_do_whatever_was_stored(tmp_path: Path) -> None:
    model, optimizer = _made()
    _step(model, optimizer, 1)
    cnr_store.save(str(tmp_path / "s"), model, optimizer, bits=32)
    again, _ = _made()
    again["table"].weight = nn.Parameter(torch.randn(6, 4))
    again["conv"].to(memory_format=torch.contiguous_format)
    other = Adam(again.parameters(), lr=0.01, fused=True)
    cnr_store.load(str(tmp_path / "s"), again, other)
    _step(model, optimizer, 2)
    _step(again, other, 2)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


BASE = torch.arange(400.0)
LAYOUTS: dict[str, torch.Tensor] = {
    "transposed": BASE[:48].view(6, 8).t(),
    "by columns, of other types": BASE[:48].bfloat16().view(6, 8).t(),
    "of numbers": (BASE[:48] > 7).view(6, 8).t(),
    "complex": torch.complex(BASE[:48], -BASE[:48]).view(6, 8).t(),
    "large": torch.arange(3000.0, dtype=torch.float64).view(30, 100).t(),
    "channels_last": BASE[:216].view(2, 3, 6, 6).to(memory_format=torch.channels_last),
    "expanded": BASE[:6].view(6, 1).expand(6, 5),
    "of one number": torch.tensor(3.0).expand(4, 5),
    "columns of a matrix": BASE[:60].view(6, 10)[:, 2:5],
    "every third": BASE[::3],
    "windows": BASE[:20].unfold(0, 6, 2),
    "permuted": BASE[:120].view(4, 5, 6).permute(1, 2, 0),
    "of qr": torch.linalg.qr(BASE[:36].sin().view(6, 6))[0],
    "of eigh": torch.linalg.eigh(BASE[:36].cos().view(6, 6))[1],
    "one row of many": BASE[:48].view(6, 8)[2:3],
    "one column, by columns": BASE[:6].view(1, 6).t(),
    "one index of many": torch.empty_strided((3, 1, 1), (1, 7, 9)).copy_(BASE[:3].view(3, 1, 1)),
    "none of one": torch.empty(1, 0).t(),
    "by rows": BASE[:48].view(6, 8),
    "empty": torch.empty(3, 0).t(),
}


def _model(rows: int = 300) -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({"table": nn.Embedding(rows, 8), "top": nn.Linear(8, 1)})


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert torch.equal(one, other)
    assert one.stride() == other.stride() or one.numel() == 0


@pytest.mark.parametrize("is_trained", [False, True])
def test_state_lies_as_it_did(tmp_path: Path, is_trained: bool) -> None:
    """Of a dense parameter, in a list, of an object and of a reader."""
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model["top"].weight] = dict(LAYOUTS) | {"list": list(LAYOUTS.values())}
    with cnr_store.Checkpointer(tmp_path, model, optimizer, state={"own": _Own(LAYOUTS)}) as checkpointer:
        checkpointer.save(1, reader=LAYOUTS)
    again, own = _model(), _Own({})
    other = SGD(again.parameters(), lr=0.1)
    if is_trained:
        other.state[again["top"].weight] = {key: torch.zeros(value.shape) for key, value in LAYOUTS.items()}
    restored = cnr_store.load(tmp_path, again, other, state={"own": own})
    state = other.state[again["top"].weight]
    for position, (key, value) in enumerate(LAYOUTS.items()):
        for found in (state[key], state["list"][position], own.kept[key], restored.reader[key]):
            _lies_as(found, value)
    assert cnr_store.verify(tmp_path, deep=True).ok


class _Own:
    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


def test_arrays_lie_as_pickle_has_them(tmp_path: Path) -> None:
    arrays = [
        np.arange(24.0).reshape(2, 3, 4).T,
        np.asfortranarray(np.eye(60)),
        np.eye(4)[::-1],
        np.eye(4)[:, ::2],
    ]
    with cnr_store.Checkpointer(tmp_path, _model()) as checkpointer:
        checkpointer.save(1, reader=arrays)
    for found, given in zip(cnr_store.load(tmp_path, _model()).reader, arrays, strict=True):
        assert np.array_equal(found, given)
        assert found.flags.f_contiguous == given.flags.f_contiguous


def test_a_small_part_of_a_large_memory_comes_back_dense_in_its_order(tmp_path: Path) -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    large = torch.arange(10_000.0).view(100, 100)
    given = {"column": large[:, 3], "corner": large.t()[:3, :3]}
    optimizer.state[model["top"].weight] = dict(given)
    cnr_store.save(tmp_path, model, optimizer)
    cnr_store.load(tmp_path, model, optimizer)
    state = optimizer.state[model["top"].weight]
    for key, strides in (("column", (1,)), ("corner", (1, 3))):
        assert torch.equal(state[key], given[key])
        assert state[key].stride() == strides


class ByBases(Optimizer):
    """Turns its steps by bases of what it has seen, which lie by columns."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None or parameter.ndim != 2:
                continue
            state = self.state[parameter]
            if not state:
                state["seen"] = torch.eye(parameter.shape[1])
            state["seen"] = state["seen"] * 0.9 + parameter.grad.t() @ parameter.grad
            state["basis"] = torch.linalg.eigh(state["seen"])[1]
            with torch.no_grad():
                parameter.sub_(parameter.grad @ state["basis"] @ state["basis"].t())


def test_training_with_bases_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def train(model: Any, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            ids = torch.arange(step, step + 200)
            model["top"](model["table"](ids)).sin().sum().backward()
            optimizer.step()

    model = _model()
    optimizer = ByBases(model.parameters())
    train(model, optimizer, range(4))
    cnr_store.save(tmp_path, model, optimizer, bits=32)
    fresh, trained = _model(), _model()
    fresh_optimizer, other_optimizer = ByBases(fresh.parameters()), ByBases(trained.parameters())
    cnr_store.load(tmp_path, fresh, fresh_optimizer)
    train(trained, other_optimizer, range(7, 8))
    cnr_store.load(tmp_path, trained, other_optimizer)
    train(model, optimizer, range(4, 20))
    for again, loaded in ((fresh, fresh_optimizer), (trained, other_optimizer)):
        for key, value in loaded.state[again["table"].weight].items():
            assert key == "seen" or value.stride(0) == 1
        train(again, loaded, range(4, 20))
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)


def test_rows_that_are_chosen_or_new_keep_how_they_lie(tmp_path: Path) -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model["table"].weight]["rows"] = torch.randn(8, 300).t()
    cnr_store.save(tmp_path, model, optimizer, bits=32)
    wanted = optimizer.state[model["table"].weight]["rows"]
    cases: list[tuple[int, Any]] = [(300, {"rows": range(5)}), (400, {"strict": "ignore"})]
    for rows, options in cases:
        grown = _model(rows)
        other = SGD(grown.parameters(), lr=0.1)
        own = other.state[grown["table"].weight]["rows"] = torch.zeros(rows, 8)
        cnr_store.load(tmp_path, grown, other, **options)
        assert other.state[grown["table"].weight]["rows"] is own
        count = len(options["rows"]) if "rows" in options else 300
        assert torch.equal(own[:count], wanted[:count])
        assert not own[count:].any()


@pytest.mark.parametrize("is_trained", [False, True])
def test_state_by_rows_lies_by_rows_or_as_the_optimizer_has_it(tmp_path: Path, is_trained: bool) -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    wanted = optimizer.state[model["table"].weight]["rows"] = torch.randn(8, 300).t()
    cnr_store.save(tmp_path, model, optimizer, bits=32)
    again = _model()
    other = SGD(again.parameters(), lr=0.1)
    if is_trained:
        other.state[again["table"].weight]["rows"] = torch.zeros(8, 300).t()
    cnr_store.load(tmp_path, again, other)
    found = other.state[again["table"].weight]["rows"]
    assert torch.equal(found, wanted)
    assert found.stride() == ((1, 300) if is_trained else (8, 1))
