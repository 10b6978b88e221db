"""A resumed fit tells of parts that may not continue as without an interruption."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it ships no types

from cnr_store.integrations.lightning import CnrCheckpoint
from tests.test_store.integrations.lightning_fit import WARNINGS, Module

pytestmark = pytest.mark.filterwarnings(*WARNINGS, "ignore:Your `IterableDataset` has `__len__`")

IDS = torch.arange(96) * 3 % 200
DATA = TensorDataset(IDS, IDS / 200)
TOLD = "may not be those of a fit without an interruption"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)

    def __len__(self) -> int:
        return len(DATA)


class Own:
    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(DATA, 16))

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Skips(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return None


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Pairs(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.top(self.table(batch[0][0])).squeeze(1), batch[1][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "module", "loader", "reload"),
    [
        (None, Module, lambda: StatefulDataLoader(DATA, 16, shuffle=True), 0),
        (None, Module, lambda: StatefulDataLoader(DATA, 16, num_workers=1), 0),
        ("manual optimization", ByHand, lambda: StatefulDataLoader(DATA, 16), 0),
        ("on_train_batch_start", Skips, lambda: StatefulDataLoader(DATA, 16), 0),
        ("reload_dataloaders_every_n_epochs", Module, lambda: StatefulDataLoader(DATA, 16), 1),
        (
            "several loaders",
            Pairs,
            lambda: CombinedLoader(
                [StatefulDataLoader(DATA, 16), StatefulDataLoader(DATA, 16)], "max_size_cycle"
            ),
            0,
        ),
        ("the loader Own", Module, Own, 0),
        ("the iterable dataset", Module, lambda: StatefulDataLoader(Stream(), 16), 0),
        (
            "the generator= of",
            Module,
            lambda: StatefulDataLoader(DATA, 16, shuffle=True, generator=torch.Generator()),
            0,
        ),
        (
            "the sampler of",
            Module,
            lambda: StatefulDataLoader(DATA, 16, sampler=WeightedRandomSampler(torch.ones(96).tolist(), 96)),
            0,
        ),
    ],
)
def test_a_resume_tells_of_what_only_lightning_brings_back(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    part: str | None,
    module: type[Module],
    loader: Callable[[], Any],
    reload: int,
) -> None:
    caplog.set_level(logging.WARNING, "cnr_store")

    def train(steps: int) -> None:
        Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            reload_dataloaders_every_n_epochs=reload,
            callbacks=[CnrCheckpoint(str(tmp_path / "store"), 2, bits=32, resume=True)],
        ).fit(module(), loader())

    train(4)
    assert TOLD not in caplog.text, "nothing was resumed"
    train(8)
    told = [record.getMessage() for record in caplog.records if TOLD in record.getMessage()]
    assert len(told) == (part is not None)
    assert part is None or part in told[0].split("because of")[1]
