"""What torch is set to where a call stands makes no difference to it: a default device, inference mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

import cnr_store
from cnr_store import Checkpointer

ROWS = 300


def make_job(
    seed: int, make: Callable[[Any], Optimizer], dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.ModuleDict, Optimizer]:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"t": nn.Embedding(ROWS, 4, dtype=dtype), "top": nn.Linear(4, 1)})
    return model, make(model.parameters())


def train(model: nn.ModuleDict, optimizer: Optimizer, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    model["top"](model["t"](ids).float()).square().sum().backward()
    optimizer.step()


def assert_same(url: Path, model: nn.Module, optimizer: Optimizer, make: Callable[[Any], Optimizer]) -> None:
    """The newest version holds both."""
    dtype = model.get_parameter("t.weight").dtype
    other, restored = make_job(2, make, dtype)
    cnr_store.load(url, other, restored)
    assert_equal(other, model)
    assert_equal_state(restored, optimizer)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def assert_equal_state(one: Optimizer, other: Optimizer) -> None:
    left, right = one.state_dict()["state"], other.state_dict()["state"]
    assert left.keys() == right.keys()
    for number, values in left.items():
        for key, value in values.items():
            if value is None:
                assert right[number][key] is None
            else:
                assert torch.equal(value, right[number][key])


def adagrad(parameters: Any) -> Adagrad:
    return Adagrad(parameters, lr=0.1, eps=1e-3)


def momentum(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.5)


def test_another_default_device(tmp_path: Path) -> None:
    """Tensors on the meta device hold no values: anything made there by mistake can't be saved or loaded."""
    ids = torch.tensor([1, 2, 7])
    model, optimizer = make_job(0, adagrad)
    with torch.device("meta"):
        checkpointer = Checkpointer(tmp_path, model, optimizer, bits=32, policy="consecutive")
        checkpointer.save(1, reader={"at": np.arange(3)}).result()
        train(model, optimizer, ids)
        for touched in (torch.tensor([1], device="cpu"), [2], np.array([9]), 11):
            checkpointer.touch("t", touched)
        info = checkpointer.save(2).result()
    assert (info.kind, info.rows) == ("delta", len({1, 2, 7, 9, 11}))
    assert_same(tmp_path, model, optimizer, adagrad)
    other, restored = make_job(1, adagrad)
    with checkpointer, torch.device("meta"):
        cnr_store.load(tmp_path, other, restored, rows=range(3))
        cnr_store.load(tmp_path, other, restored, rows=[5, 7, 9])
        found, wanted = (each.get_parameter("t.weight")[[0, 1, 2, 5, 7, 9]] for each in (other, model))
        assert torch.equal(found, wanted)
        cnr_store.load(tmp_path, other, restored)
        assert_equal(other, model)
        for update in cnr_store.follow(tmp_path):
            update.apply(other)
    assert_equal(other, model)
    assert_equal_state(restored, optimizer)


@pytest.mark.parametrize("options", [{}, {"tables": "t"}, {"rows": range(ROWS)}])
@pytest.mark.parametrize("make", [adagrad, momentum])
def test_what_was_loaded_in_inference_mode_is_trained_on(
    tmp_path: Path, make: Callable[[Any], Optimizer], options: dict[str, Any]
) -> None:
    ids = torch.tensor([1, 2, 7])
    model, optimizer = make_job(0, make, torch.float32)
    train(model, optimizer, ids)
    checkpointer = Checkpointer(tmp_path, model, optimizer, bits=32, policy="consecutive")
    with checkpointer:
        for step in (1, 2):
            with torch.inference_mode():
                checkpointer.save(step).result()
            assert_same(tmp_path, model, optimizer, make)
            train(model, optimizer, ids)
        checkpointer.save(3)
    other, restored = make_job(1, make, torch.float32)
    with torch.inference_mode():
        cnr_store.load(tmp_path, other, restored, **options)
    if options:
        cnr_store.load(tmp_path, other, restored, tensors="*")
    for pair in ((model, optimizer), (other, restored)):
        train(*pair, ids)
    assert_equal(other, model)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("strict", ["raise", "ignore"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_made_in_inference_mode_is_loaded_in_and_out_of_it(
    tmp_path: Path, inside: bool, strict: Any, dtype: torch.dtype
) -> None:
    saved, _ = make_job(0, adagrad, dtype)
    cnr_store.save(tmp_path, saved, bits=32)
    with torch.inference_mode():
        model, _ = make_job(1, adagrad, dtype)
    with torch.inference_mode(inside):
        cnr_store.load(tmp_path, model, strict=strict)
    assert_equal(model, saved)
