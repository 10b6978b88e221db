"""Entries of a state dict that modules make anew each time: no write to them reaches the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cnr_store


class Scaled(nn.Module):
    """A number that is an attribute, and a tensor in the state dict alone; it need not be loaded from there."""

    def __init__(self, takes: bool = True) -> None:
        super().__init__()
        self.scale, self.takes, self.linear = 1.0, takes, nn.Linear(2, 2)

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep)
        state[prefix + "scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.takes:
            self.scale = float(state.pop(prefix + "scale"))
        super()._load_from_state_dict(state, prefix, *rest)


class Cloned(nn.Module):
    """A parameter, of which the state dict holds a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        register: Any = self.register_state_dict_post_hook
        register(lambda module, state, prefix, _: state.update({prefix + "weight": module.weight.clone()}))


def _model(takes: bool = True) -> Any:
    return nn.ModuleDict({"table": nn.Embedding(8, 2), "scaled": Scaled(takes), "cloned": Cloned()})


@pytest.fixture
def saved(tmp_path: Path) -> str:
    model = _model()
    model["scaled"].scale = 7.0
    nn.init.ones_(model["cloned"].weight)
    cnr_store.save(str(tmp_path / "s"), model)
    return str(tmp_path / "s")


@pytest.mark.parametrize("wrap", [nn.Module.eval, nn.DataParallel])
def test_they_are_loaded_through_their_module(saved: str, wrap: Any) -> None:
    model = _model()
    with cnr_store.Checkpointer(saved, wrap(model)) as checkpointer:
        checkpointer.load()
        assert checkpointer.save(1).result().kind == "delta"  # no table has changed
    assert model["scaled"].scale == 7.0
    assert model["cloned"].weight.tolist() == [1, 1, 1]


def test_one_that_its_module_does_not_take_is_an_error(saved: str) -> None:
    with pytest.raises(cnr_store.ModelMismatchError, match=r"'scaled\.scale'.*get_extra_state"):
        cnr_store.load(saved, _model(takes=False))


def test_a_follower_refuses_them(saved: str) -> None:
    with pytest.raises(cnr_store.UnsupportedModelError, match=r"'scaled\.scale'"):
        next(cnr_store.follow(saved)).apply(_model())
