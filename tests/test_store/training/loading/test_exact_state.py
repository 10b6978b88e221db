"""What a reader or registered object keeps comes back exactly, or is refused with its path."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

import cnr_store
from cnr_store import StateError


class Tagged(torch.Tensor):
    """A subclass that could hold more than values."""


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(40, 4), nn.Linear(4, 1))


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">c16"])
def test_large_arrays_of_the_other_byte_order_keep_their_values(
    tmp_path: Path, model: nn.Module, dtype: str
) -> None:
    array = np.arange(5000).astype(dtype)
    cnr_store.save(tmp_path / "s", model, reader={"at": array, "turned": array.reshape(50, 100).T})
    reader = cnr_store.load(tmp_path / "s", model).reader
    np.testing.assert_array_equal(reader["at"], array)
    np.testing.assert_array_equal(reader["turned"], array.reshape(50, 100).T)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.ma.masked_array(np.zeros(4), [False, True, False, True]), "MaskedArray"),
        (np.ma.masked_array(np.zeros(4000), np.zeros(4000, bool)), "MaskedArray"),
        (np.zeros(3).view(np.recarray), "recarray"),
        (torch.zeros(3).as_subclass(Tagged), "Tagged"),
    ],
)
def test_subclasses_of_arrays_are_refused_by_path(
    tmp_path: Path, model: nn.Module, value: Any, name: str
) -> None:
    with pytest.raises(StateError, match=rf"state\['reader'\]\['at'\]\[0\]: a .*{name} can't be stored"):
        cnr_store.save(tmp_path / "s", model, reader={"at": [value]})
    assert cnr_store.versions(tmp_path / "s") == []


def test_random_numbers_are_left_alone_where_they_are_not_saved(tmp_path: Path, model: nn.Module) -> None:
    for rng in (True, False):
        torch.manual_seed(1)
        cnr_store.save(tmp_path / "s", model, job=cnr_store.Job(rng=rng))
        saved = torch.get_rng_state()
        torch.manual_seed(2)
        before = torch.get_rng_state()
        cnr_store.load(tmp_path / "s", model)
        assert torch.equal(torch.get_rng_state(), saved if rng else before)


def test_parameters_come_back_as_tensors(tmp_path: Path, model: nn.Module) -> None:
    cnr_store.save(tmp_path / "s", model, reader={"w": nn.Parameter(torch.ones(3))})
    found = cnr_store.load(tmp_path / "s", model).reader["w"]
    assert torch.equal(found, torch.ones(3))


def test_a_scheduler_that_counts_its_milestones(tmp_path: Path, model: nn.Module) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = MultiStepLR(optimizer, [2, 2, 5])
    cnr_store.save(tmp_path / "s", model, optimizer, state={"lr": scheduler})
    other = MultiStepLR(optimizer, [1])
    cnr_store.load(tmp_path / "s", model, optimizer, state={"lr": other})
    assert type(other.milestones) is Counter
    assert other.state_dict() == scheduler.state_dict()
