"""Lightning's own trainer saves, stops, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it ships no types

import cnr_store
from cnr_store import OptionError
from cnr_store.integrations.lightning import CnrCheckpoint

BATCHES, EPOCHS = 8, 3
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning",  # Lightning makes them
    "ignore:'set_vital' is deprecated",  # torchdata calls it
)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(200, 8, sparse=True)
        self.top = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 1))
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += batch[0].tolist()
        return nn.functional.mse_loss(self.top(self.table(batch[0])).squeeze(1), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class StopAt(Callback):
    """Ends training by an error, as a lost machine does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            raise MemoryError("out of memory")


def fit(folder: Path, *callbacks: Callback, max_epochs: int = EPOCHS) -> tuple[Module, Trainer]:
    module = Module()
    ids = torch.arange(BATCHES * 16) * 3 % 200
    loader = StatefulDataLoader(TensorDataset(ids, ids / 200), batch_size=16, shuffle=True)
    trainer = Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader)
    return module, trainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dies_at", [5, 8, 11])
def test_a_resumed_fit_ends_as_one_that_was_never_stopped(tmp_path: Path, dies_at: int) -> None:
    url = str(tmp_path / "store")
    undisturbed, _ = fit(tmp_path)
    with pytest.raises(MemoryError):
        fit(tmp_path, CnrCheckpoint(url, 1, bits=32), StopAt(dies_at))
    saved = dies_at - (dies_at % BATCHES == 0)  # an epoch's last step is saved when the epoch has ended
    assert cnr_store.versions(url)[-1].step == saved
    module, trainer = fit(tmp_path, CnrCheckpoint(url, 4, bits=32, resume=True))
    assert trainer.global_step == BATCHES * EPOCHS
    assert trainer.current_epoch == EPOCHS
    assert module.seen == undisturbed.seen[saved * 16 :]
    for name, tensor in undisturbed.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_saves_come_at_steps_and_at_the_end(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 5, policy="consecutive"), max_epochs=2)
    found = cnr_store.versions(url)
    assert [version.step for version in found] == [5, 10, 15, 16]
    assert [version.kind for version in found] == ["baseline", "delta", "delta", "delta"]


def test_resume_begins_anew_where_nothing_is_stored(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    _, trainer = fit(tmp_path, CnrCheckpoint(url, 100, resume=True), max_epochs=1)
    assert trainer.global_step == BATCHES
    assert [version.step for version in cnr_store.versions(url)] == [BATCHES]


def test_a_run_that_has_ended_is_gone_on_with(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    first, _ = fit(tmp_path, CnrCheckpoint(url, 100, bits=32), max_epochs=1)
    module, trainer = fit(tmp_path, CnrCheckpoint(url, 100, bits=32, resume=True), max_epochs=2)
    assert (trainer.global_step, trainer.current_epoch) == (BATCHES * 2, 2)
    assert sorted(module.seen) == sorted(first.seen)  # one epoch each


def test_wrong_options() -> None:
    with pytest.raises(OptionError, match="every_n_steps"):
        CnrCheckpoint("memory://store", 0)
