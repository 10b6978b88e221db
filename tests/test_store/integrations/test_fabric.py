"""Models and optimizers that Lightning Fabric has set up are stored as they are without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cnr_store
from cnr_store import OptionError, TrackedReader
from tests.test_store.integrations.lightning_fit import WARNINGS
from tests.test_store.support.wrapped_training import ROWS, Run, check_wrapped, paths

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


def setup(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    wrapped: tuple[Any, Any] = Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    return wrapped


@pytest.mark.slow
def test_what_fabric_wraps_is_stored_as_without_it(tmp_path: Path) -> None:
    check_wrapped(tmp_path, setup)


@pytest.mark.slow
def test_what_fabric_compiles_is_stored_as_without_it(tmp_path: Path) -> None:
    def compile_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return setup(torch.compile(model, backend="eager"), optimizer)  # type: ignore[arg-type]

    def compile_after(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        wrapped, stepping = setup(model, optimizer)
        return torch.compile(wrapped, backend="eager"), stepping

    for way in (compile_before, compile_after):
        run = Run(way)
        assert run.save(tmp_path / way.__name__) == [ROWS, 2, 2]
        assert {path for path in paths(tmp_path / way.__name__) if "_" in path} == set()


def test_parts_that_fabric_wraps_have_their_own_names(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    tower: Any = nn.ModuleDict({"out": nn.Linear(2, ROWS), "t": nn.Embedding(ROWS, 2)})
    tower["out"].weight = tower["t"].weight  # which the state dict has first
    model = nn.ModuleDict({"tower": fabric.setup_module(tower)})
    optimizer = torch.optim.Adagrad(model.parameters())
    cnr_store.save(tmp_path, model, fabric.setup_optimizers(optimizer))
    assert [path for path in paths(tmp_path) if path.startswith("tables/tower.t/")] == [
        "tables/tower.t/sum",
        "tables/tower.t/weight",
    ]


def test_optimizers_of_lightnings_own_loop_are_known(tmp_path: Path) -> None:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = nn.Embedding(ROWS, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: Any = LightningOptimizer(optimizer)
    with cnr_store.Checkpointer(tmp_path, model, wrapped, policy="consecutive") as checkpointer:
        checkpointer.save(1).result()
        model(torch.tensor([5])).sum().backward()
        optimizer.step()
        assert checkpointer.save(2).result().rows == 1


def test_a_reader_of_a_loader_that_fabric_set_up_is_told_what_to_do() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), 2)
    prepared = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    with pytest.raises(
        OptionError, match=r"give TrackedReader the loader that setup_dataloaders\(\) was given"
    ):
        TrackedReader(prepared)
    TrackedReader(loader)
