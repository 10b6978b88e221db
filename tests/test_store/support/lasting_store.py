"""A model of one table and a layer, and a store that must survive what a test does to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cnr_store
from cnr_store import Checkpointer

ROWS, DIM = 600, 8


def make_model(
    seed: int = 0,
    rows: int = ROWS,
    dim: int = DIM,
    dtype: torch.dtype = torch.float32,
    name: str = "t",
    out: int = 4,
) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    model.add_module(name, nn.Embedding(rows, dim).to(dtype))
    model.add_module("top", nn.Linear(dim, out))
    return model


def weight(model: nn.Module) -> torch.Tensor:
    """The table's live values."""
    return model.get_parameter("t.weight").detach()


def change(checkpointer: Checkpointer, model: nn.Module, ids: list[int]) -> None:
    """Change rows of the table by hand."""
    weight(model)[ids] += 1
    checkpointer.touch("t", ids)


def assert_newest(url: Any, model: nn.Module) -> None:
    """The newest version holds the model's table, bit for bit."""
    other = make_model(2, rows=len(weight(model)))
    cnr_store.load(url, other)
    assert torch.equal(weight(other), weight(model))


@contextmanager
def lasting_store(folder: Path) -> Iterator[Path]:
    """A store with one version of `make_model()`, lossless, which must still load exactly in the end."""
    first = cnr_store.save(folder, make_model(), step=5, bits=32)
    yield folder
    assert cnr_store.versions(folder)[0] == first
    other = make_model(1)
    cnr_store.load(folder, other, version=first)
    assert torch.equal(weight(other), weight(make_model()))
