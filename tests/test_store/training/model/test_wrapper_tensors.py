"""Tensors of classes that wrap others, as moments of few bits: stored by their parts, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import cnr_store
from cnr_store import ModelMismatchError, StateError, UnsupportedModelError


class Few(torch.Tensor):
    """Codes of 8 bits and a scale; `of` may be wrapped again."""

    def __new__(cls, codes: torch.Tensor, scale: Any, dtype: torch.dtype) -> Few:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

    def __init__(self, codes: torch.Tensor, scale: Any, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"dtype": self.dtype, "signed": (True, 8)}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, shape: Any, strides: Any) -> Few:
        assert context["signed"] == (True, 8)
        return cls(parts["codes"], parts["scale"], context["dtype"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # stub
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].dtype)
        raise NotImplementedError(f"no {func} of few bits")


class Unknown(Few):
    pass


class Broken(Few):
    def __tensor_flatten__(self) -> Any:
        raise RuntimeError("out of order")


@pytest.fixture
def _registered() -> Iterator[None]:
    torch.serialization.add_safe_globals([Few, Broken])
    yield
    torch.serialization.clear_safe_globals()


def _few(kind: Any, *shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 255, shape[::-1], generator=generator, dtype=torch.uint8).t()
    return kind(
        codes, kind(codes[:1].clone(), torch.rand(1, generator=generator), torch.bfloat16), torch.float32
    )


def _made(rows: int = 300) -> tuple[Any, Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"table": nn.Embedding(rows, 8), "top": nn.Linear(8, 1)})
    return model, SGD(model.parameters(), lr=0.1)


def _same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Few):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        _same(one.codes, other.codes)
        _same(one.scale, other.scale)
    else:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("is_trained", [False, True])
def test_moments_of_few_bits_come_back_in_their_class(tmp_path: Path, is_trained: bool) -> None:
    model, optimizer = _made()
    optimizer.state[model["table"].weight]["moment"] = _few(Few, 300, 8)
    optimizer.state[model["top"].weight]["moment"] = _few(Few, 1, 8)
    cnr_store.save(tmp_path, model, optimizer)
    again, other = _made()
    if is_trained:
        other.state[again["table"].weight]["moment"] = _few(Few, 300, 8, seed=1)
    cnr_store.load(tmp_path, again, other)
    for name in ("table", "top"):
        _same(other.state[again[name].weight]["moment"], optimizer.state[model[name].weight]["moment"])
    assert cnr_store.verify(tmp_path, deep=True).ok


def test_a_program_that_does_not_know_the_class_loads_all_but_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = _made()
    optimizer.state[model["top"].weight]["moment"] = _few(Few, 1, 8)
    with torch.serialization.safe_globals([Few]):
        cnr_store.save(tmp_path, model, optimizer)
    again, other = _made()
    with torch.no_grad():
        again["top"].weight.fill_(3)
    with pytest.raises(
        ModelMismatchError, match=r"'moment' of 'top.weight' in optimizer 0 was a .*add_safe_globals\(\[Few"
    ):
        cnr_store.load(tmp_path, again, other)
    assert (again["top"].weight == 3).all()
    cnr_store.load(tmp_path, again)
    assert torch.equal(again["top"].weight, model["top"].weight)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.usefixtures("_registered")
def test_classes_that_cannot_be_stored_are_refused_by_name_and_path(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    cases = [
        (_few(Unknown, 1, 8), r"'moment' of 'top.weight' in SGD is a .*Unknown.*add_safe_globals\(\[Unknown"),
        (_few(Broken, 1, 8), r"'moment' of 'top.weight' in SGD is a .*Broken.*out of order"),
        (nested, r"'moment' of 'top.weight' in SGD is a .*NestedTensor, of a shape without numbers"),
        ([_few(Few, 1, 8)], r"\['top.weight'\]\['moment'\]\[0\]: a .*Few can't be stored"),
        (
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            r"\['moment'\]: a tensor .*qint8.*no plain values",
        ),
    ]
    for value, message in cases:
        model, optimizer = _made()
        optimizer.state[model["top"].weight]["moment"] = value
        with pytest.raises((StateError, UnsupportedModelError), match=message):
            cnr_store.save(tmp_path, model, optimizer)


@pytest.mark.usefixtures("_registered")
def test_what_a_class_does_not_accept_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _made()
    optimizer.state[model["top"].weight]["moment"] = _few(Few, 1, 8)
    cnr_store.save(tmp_path, model, optimizer)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("not these")

    monkeypatch.setattr(Few, "__tensor_unflatten__", refuse)
    with pytest.raises(
        ModelMismatchError, match=r"'moment' of 'top.weight' in optimizer 0: .*Few does not .*not these"
    ):
        cnr_store.load(tmp_path, model, optimizer)


def test_weights_of_few_bits_are_stored_by_their_parts(tmp_path: Path) -> None:
    model, _ = _made()
    weight = _few(Few, 1, 8)
    model["top"].weight = nn.Parameter(weight, requires_grad=False)
    cnr_store.save(tmp_path, model)
    again, _ = _made()
    again["top"].weight = nn.Parameter(_few(Few, 1, 8, seed=1), requires_grad=False)
    held = again["top"].weight
    cnr_store.load(tmp_path, again)
    assert again["top"].weight is held
    _same(held.codes.contiguous(), weight.codes.contiguous())
    assert torch.equal(held.scale.scale, weight.scale.scale)
    assert "top.weight.scale.codes" in cnr_store.state_dict(tmp_path)


def test_tables_of_such_a_class_are_refused_by_name(tmp_path: Path) -> None:
    model, _ = _made()
    model["table"].weight = nn.Parameter(_few(Few, 300, 8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"table 'table' is a .*Few, whose rows can't be stored"):
        cnr_store.save(tmp_path, model)
