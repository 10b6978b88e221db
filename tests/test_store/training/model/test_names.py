"""Whatever modules and parameters are called, a version has the keys that the model's own state dict has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cnr_store

Build = Callable[[], nn.Module]


def submodule_called_weight() -> nn.Module:
    return nn.ModuleDict({"weight": nn.Embedding(50, 4), "net": nn.Linear(4, 1)})


def nested_modules_called_weight() -> nn.Module:
    inner = nn.ModuleDict({"weight": nn.Embedding(50, 4), "a": nn.Embedding(50, 4)})
    return nn.ModuleDict({"weight": inner, "a_weight": nn.Embedding(50, 4)})


def bare() -> nn.Module:
    return nn.Embedding(50, 4)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        emb = nn.Embedding(50, 4)
        self.items = emb.weight  # registered first, so that the state dict has it first
        self.emb = emb
        self.net = nn.Linear(4, 50)
        self.net.weight = emb.weight


BUILDS = [bare, submodule_called_weight, nested_modules_called_weight, _Tied]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            optimizer.zero_grad()
            module(torch.tensor([1, 7, 7, 30])).square().sum().backward()
            optimizer.step()


@pytest.mark.parametrize("build", BUILDS)
def test_state_dict_and_export_have_the_models_keys(build: Build, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with cnr_store.Checkpointer(url, model, optimizer, bits=32, policy="consecutive") as checkpointer:
        checkpointer.save(1)
        train(model, optimizer)
        checkpointer.save(2)
    expected = model.state_dict()
    found = cnr_store.state_dict(url)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(torch.from_numpy(found[name]), values), name

    other = build()
    fresh = torch.optim.Adagrad(other.parameters(), lr=0.1)
    cnr_store.load(url, other, fresh)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    assert_same_state(fresh, optimizer)

    cnr_store.export(url, str(tmp_path / "model.safetensors"))
    exported = build()
    missing, unexpected = exported.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not unexpected
    assert all(torch.equal(value, expected[name]) for name, value in exported.state_dict().items()), missing


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    left, right = one.state_dict()["state"], other.state_dict()["state"]
    assert left.keys() == right.keys()
    for number, slots in left.items():
        for slot, value in slots.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(right[number][slot])), (number, slot)
