"""The state of Lightning's other callbacks is saved and restored, and what they do to the model at the end is saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cnr_store
from cnr_store.integrations.lightning import CnrCheckpoint
from tests.test_store.integrations.lightning_fit import BATCHES, EPOCHS, WARNINGS, Behind, Module, fit

pytestmark = [
    pytest.mark.filterwarnings(*WARNINGS),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]

AVERAGING: dict[str, Callable[[], Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "average": WeightAveraging,
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2),
}


class DiesAt(Behind):
    def __init__(self, step: int) -> None:
        self._step = step

    def behind_batch(self, trainer: Trainer) -> None:
        if trainer.global_step == self._step:
            raise MemoryError("out of memory")


class Logged(Module):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Undrawn(Logged):
    """Draws no random numbers: those of an epoch that was not begun are drawn anew."""

    def __init__(self) -> None:
        super().__init__()
        self.top[0] = nn.Identity()


def killed_and_resumed(
    folder: Path, every: int, dies_at: int, make: Callable[[], list[Callback]], **options: Any
) -> tuple[tuple[Module, Trainer], tuple[Module, Trainer]]:
    """One fit that was never stopped, and one that died and was resumed: modules and trainers."""
    url = str(folder / "store")
    kind = Logged if every == 1 else Undrawn
    options["shuffle"] = every == 1
    undisturbed = fit(folder, *make(), module=kind(), **options)
    with pytest.raises(MemoryError):
        fit(folder, CnrCheckpoint(url, every, bits=32), *make(), DiesAt(dies_at), module=kind(), **options)
    saves = CnrCheckpoint(url, 4, bits=32, resume=True)
    return undisturbed, fit(folder, saves, *make(), module=kind(), **options)


def assert_same(one: Module, other: Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize(("every", "dies_at"), [(1, 5), (1, 11), (1, 17), (8, 10), (8, 18)])
@pytest.mark.parametrize("kind", AVERAGING)
def test_averages_go_on_bit_for_bit(tmp_path: Path, kind: str, every: int, dies_at: int) -> None:
    def make() -> list[Callback]:
        return [AVERAGING[kind]()]

    (expected, _), (module, _) = killed_and_resumed(tmp_path, every, dies_at, make)
    assert_same(expected, module)


@pytest.mark.slow
def test_early_stopping_goes_on(tmp_path: Path) -> None:
    def make() -> list[Callback]:
        return [EarlyStopping("loss", patience=2, min_delta=1e9, check_on_train_epoch_end=True)]

    (_, expected), (_, trainer) = killed_and_resumed(tmp_path, 1, BATCHES + 3, make, max_epochs=6)
    assert expected.global_step == BATCHES * 3
    assert trainer.global_step == expected.global_step


@pytest.mark.slow
def test_what_model_checkpoint_has_kept_goes_on(tmp_path: Path) -> None:
    def kept() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "kept", monitor="loss", save_top_k=2, every_n_train_steps=2)

    url, first, second = str(tmp_path / "store"), kept(), kept()
    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 1}
    with pytest.raises(MemoryError):
        fit(tmp_path, CnrCheckpoint(url, 2), first, DiesAt(4), module=Logged(), **options)
    assert len(first.best_k_models) == 2
    assert cnr_store.versions(url)[-1].step == 4
    with pytest.raises(MemoryError):
        fit(tmp_path, CnrCheckpoint(url, 2, resume=True), second, DiesAt(5), module=Logged(), **options)
    assert second.best_k_models == first.best_k_models
    assert second.best_model_path == first.best_model_path


class Counted(LightningDataModule):
    """Keeps a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: Any = None

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(64), torch.zeros(64)), batch_size=16)

    def state_dict(self) -> dict[str, Any]:
        return {"files": ["a", "b"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Hooked(Module):
    """Keeps something in Lightning's checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()
        checkpoint["negatives"] = torch.arange(5)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert torch.equal(checkpoint["state_dict"]["table.weight"], self.table.weight)
        self.loaded = checkpoint["negatives"]


def test_hooks_of_the_module_and_the_datamodule_go_on(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "default_root_dir": tmp_path,
    }
    Trainer(callbacks=[CnrCheckpoint(url, 1)], **options).fit(Hooked(), datamodule=Counted())
    module, data = Hooked(), Counted()
    Trainer(callbacks=[CnrCheckpoint(url, 1, resume=True)], **options).fit(module, datamodule=data)
    assert torch.equal(module.loaded, torch.arange(5))
    assert data.loaded == {"files": ["a", "b"]}


class Keeps(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("every", [4, 7])
@pytest.mark.parametrize("kind", AVERAGING)
def test_the_last_version_is_the_average(
    tmp_path: Path, kind: str, every: int, is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "store")
    saves, average = CnrCheckpoint(url, every, bits=32, policy="consecutive"), AVERAGING[kind]()
    module, _ = fit(tmp_path, *((saves, average) if is_first else (average, saves)))
    last = cnr_store.versions(url)[-1]
    assert (last.step, last.kind) == (BATCHES * EPOCHS, "baseline")
    stored = cnr_store.state_dict(url)
    for name, tensor in module.state_dict().items():
        assert torch.equal(torch.as_tensor(stored[name]), tensor), name
    fit(tmp_path, CnrCheckpoint(url, every, bits=32, resume=True), AVERAGING[kind](), max_epochs=4)
    assert "put the average into the model" in caplog.text


class Validated(Logged):
    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        pass


def test_a_sigterm_amid_validation_saves_the_trained_weights_and_the_average(tmp_path: Path) -> None:
    class Told(Callback):
        def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if not trainer.received_sigterm:
                os.kill(os.getpid(), signal.SIGTERM)

    urls, average = [str(tmp_path / name) for name in "ab"], EMAWeightAveraging(decay=0.9)
    trained, _ = fit(tmp_path, module=Logged(), max_epochs=1)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    options: dict[str, Any] = {"validation": loader, "num_sanity_val_steps": 0}
    with pytest.raises(SIGTERMException):
        saves = [CnrCheckpoint(url, 3, bits=32) for url in urls]
        fit(tmp_path, *saves, average, Told(), module=Validated(), **options)
    for url in urls:
        assert cnr_store.versions(url)[-1].step == BATCHES
        stored = cnr_store.state_dict(url)
        for name, tensor in trained.state_dict().items():
            assert torch.equal(torch.as_tensor(stored[name]), tensor), name


class Normalized(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.top.insert(1, nn.BatchNorm1d(8))


@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_train_epoch_end"])
def test_the_epoch_that_only_normalizes_ends_after_a_sigterm(
    tmp_path: Path, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    def told(trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == EPOCHS and not trainer.received_sigterm:
            os.kill(os.getpid(), signal.SIGTERM)

    url, stops = str(tmp_path / "store"), Callback()
    setattr(stops, hook, told)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, generator=torch.Generator())
    options: dict[str, Any] = {"validation": loader, "num_sanity_val_steps": 0}
    undisturbed, _ = fit(tmp_path, AVERAGING["swa"](), module=Normalized(), **options)
    with pytest.raises(SIGTERMException):
        saves = CnrCheckpoint(url, 100, bits=32)
        fit(tmp_path, saves, AVERAGING["swa"](), stops, module=Normalized(), **options)
    saves = CnrCheckpoint(url, 100, bits=32, resume=True)
    module, trainer = fit(tmp_path, saves, AVERAGING["swa"](), module=Normalized(), **options)
    assert_same(undisturbed, module)
    assert trainer.accumulate_grad_batches == 1
    assert "will not put the average" not in caplog.text


def test_what_a_callback_changes_at_the_end_is_saved(tmp_path: Path) -> None:
    class Halves(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
            with torch.no_grad():
                pl_module.top[1].weight.mul_(0.5)

    url = str(tmp_path / "store")
    module, _ = fit(tmp_path, CnrCheckpoint(url, 8), Halves(), max_epochs=1)
    assert [version.step for version in cnr_store.versions(url)] == [8, 8]
    stored = cnr_store.state_dict(url)["top.1.weight"]
    assert torch.equal(torch.as_tensor(stored), module.state_dict()["top.1.weight"])


def test_a_fit_that_ends_before_its_average_is_used_is_saved_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 4), AVERAGING["swa"](), max_steps=4)
    assert [version.step for version in cnr_store.versions(url)] == [4]
    fit(tmp_path, CnrCheckpoint(url, 4, resume=True), AVERAGING["swa"](), max_steps=8)
    assert "put the average into the model" not in caplog.text


def test_the_end_is_saved_once_where_nothing_changes_it(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 8), Keeps(1), max_epochs=2)
    assert [version.step for version in cnr_store.versions(url)] == [8, 16]
