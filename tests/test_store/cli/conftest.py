"""A store to look at, and one to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import cnr_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with two versions."""
    url = str(tmp_path_factory.mktemp("stores") / "store")
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adagrad(model.parameters())
    with cnr_store.Checkpointer(url, model, optimizer) as checkpointer:
        checkpointer.save(1, metadata={"name": "[red]first"}).result()
        checkpointer.touch("0", [3, 5])
        checkpointer.save(2).result()
    return url


@pytest.fixture
def own_store(tmp_path: Path, store: str) -> str:
    """A copy of the store, to change."""
    return str(shutil.copytree(store, tmp_path / "copy"))
