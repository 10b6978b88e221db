"""What changes behind Lightning's hooks for callbacks: the module's own hooks, schedulers that go by a metric, ends."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, TensorDataset

import cnr_store
from cnr_store import OptionError
from cnr_store.integrations.lightning import CnrCheckpoint
from tests.test_store.integrations.lightning_fit import (
    BATCHES,
    EPOCHS,
    WARNINGS,
    Module,
    StopsAt,
    StopsError,
    fit,
)

pytestmark = pytest.mark.filterwarnings(*WARNINGS, "ignore:.*`training_step` returned `None`.*")


class LearningRates(Callback):
    """By step, the rate of each."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.seen[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]


class Counts(Module):
    """Changes a buffer, and a parameter by it, in one of its hooks."""

    calls: torch.Tensor

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        setattr(self, hook, self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1
        with torch.no_grad():
            self.top.get_parameter("1.weight").mul_(0.9)


class OnPlateau(Module):
    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("never better", 1.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.interval, "monitor": "never better"},
        }


class Validated(Module):
    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("same", 1.0)


def assert_equal(module: Module, other: Module) -> None:
    for name, tensor in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_train_end"])
def test_what_the_modules_own_hooks_change_is_saved(tmp_path: Path, hook: str) -> None:
    undisturbed, _ = fit(tmp_path, module=Counts(hook))
    url = str(tmp_path / "store")
    with pytest.raises(StopsError):
        fit(tmp_path, CnrCheckpoint(url, 1, bits=32), StopsAt(BATCHES + 3), module=Counts(hook))
    resumed, _ = fit(tmp_path, CnrCheckpoint(url, 1, bits=32, resume=True), module=Counts(hook))
    assert resumed.get_buffer("calls") > 0
    assert_equal(undisturbed, resumed)
    last = Counts(hook)
    cnr_store.load(url, last)
    assert_equal(resumed, last)


@pytest.mark.slow
def test_the_module_has_its_own_hooks_again_and_can_be_copied_meanwhile(tmp_path: Path) -> None:
    class Copied(Module):
        def on_train_epoch_end(self) -> None:
            copied = copy.deepcopy(self)
            copied.on_train_batch_end(None, None, 0)
            copies.append(copied)

    copies: list[Any] = []
    module, counted = Copied(), Counts("on_train_batch_end")
    fit(tmp_path, CnrCheckpoint(str(tmp_path / "store"), 1), module=module, max_epochs=1)
    assert "on_train_batch_end" not in vars(module)
    assert len(copies) == 1
    fit(tmp_path, CnrCheckpoint(str(tmp_path / "other"), 1), module=counted, max_epochs=1)
    assert vars(counted)["on_train_batch_end"] == counted._count


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("stops", [[BATCHES], [BATCHES + 1], [3, 2 * BATCHES]])
def test_schedulers_that_go_by_a_metric_miss_no_step(tmp_path: Path, interval: str, stops: list[int]) -> None:
    whole, rates = LearningRates(), LearningRates()
    fit(tmp_path, whole, module=OnPlateau(interval))
    url = str(tmp_path / "store")
    for stop in stops:
        with pytest.raises(StopsError):
            fit(
                tmp_path,
                *(CnrCheckpoint(url, 1, bits=32, resume=True), StopsAt(stop), rates),
                module=OnPlateau(interval),
            )
    fit(tmp_path, CnrCheckpoint(url, 1, bits=32, resume=True), rates, module=OnPlateau(interval))
    assert len(set(whole.seen.values())) > 1
    assert rates.seen == whole.seen


def test_the_end_of_a_fit_has_what_changed_since_its_last_step_was_saved(tmp_path: Path) -> None:
    url, stopping = str(tmp_path / "store"), EarlyStopping("same", patience=100)
    options: Any = {"num_sanity_val_steps": 0, "val_check_interval": BATCHES // 2, "max_steps": BATCHES}
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    fit(
        tmp_path,
        *(CnrCheckpoint(url, BATCHES // 2), stopping),
        module=Validated(),
        validation=loader,
        **options,
    )
    assert stopping.wait_count > 0
    resumed = EarlyStopping("same", patience=100)
    fit(
        tmp_path,
        *(CnrCheckpoint(url, 100, resume=True), resumed),
        module=Validated(),
        validation=loader,
        **options,
    )
    assert resumed.wait_count == stopping.wait_count


@pytest.mark.slow
def test_the_end_is_saved_once_more_and_a_fit_that_is_done_saves_nothing(tmp_path: Path) -> None:
    class Written(Module):
        def on_train_end(self) -> None:
            self.top.get_parameter("1.bias").data.fill_(7)  # which torch does not count

    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 1), module=Written())
    fit(tmp_path, CnrCheckpoint(url, 1, resume=True))
    last = EPOCHS * BATCHES
    assert [version.step for version in cnr_store.versions(url)] == [*range(1, last + 1), last]
    loaded = Written()
    cnr_store.load(url, loaded)
    assert loaded.top.get_parameter("1.bias").item() == 7


@pytest.mark.slow
def test_fits_within_a_fit_save_nothing(tmp_path: Path) -> None:
    class Finds(LearningRateFinder):
        def on_fit_start(self, *_: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.lr_find(trainer, pl_module)

    class WithRate(Module):
        lr = 0.1

    url, module = str(tmp_path / "store"), WithRate()
    fit(tmp_path, CnrCheckpoint(url, 1), Finds(num_training_steps=5, update_attr=False), module=module)
    assert [version.step for version in cnr_store.versions(url)] == list(range(1, EPOCHS * BATCHES + 1))


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_a_fit_of_another_trainer_within_the_fit_saves_nothing(tmp_path: Path, hook: str) -> None:
    class Probes(Callback):
        def __init__(self) -> None:
            setattr(self, hook, self._probe)

        def _probe(self, trainer: Trainer, pl_module: Any) -> None:
            before = copy.deepcopy(pl_module.state_dict())
            fit(tmp_path, module=pl_module, max_epochs=1)
            pl_module.load_state_dict(before)

    class Keeps(Callback):
        def __init__(self) -> None:
            self.weights: dict[int, torch.Tensor] = {}

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            self.weights[trainer.global_step] = pl_module.table.weight.detach().clone()

    url, keeps = str(tmp_path / "store"), Keeps()
    fit(tmp_path, CnrCheckpoint(url, BATCHES // 2, bits=32), keeps, Probes())
    versions = cnr_store.versions(url)
    assert [version.step for version in versions] == [*range(4, EPOCHS * BATCHES + 1, 4)]
    for version in versions:
        found = cnr_store.state_dict(url, version)["table.weight"]
        assert torch.equal(torch.from_numpy(found), keeps.weights[version.step]), version.step


@pytest.mark.slow
def test_two_callbacks_leave_no_hook_behind(tmp_path: Path) -> None:
    module, urls = Module(), [str(tmp_path / name) for name in "ab"]
    callbacks = [CnrCheckpoint(url, 4, bits=32) for url in urls]
    fit(tmp_path, *callbacks, module=module, max_epochs=1)
    fit(tmp_path, *callbacks, module=module, max_epochs=1)
    for url in urls:
        assert [version.step for version in cnr_store.versions(url)] == [4, 8] * 2
        loaded = Module()
        cnr_store.load(url, loaded)
        assert_equal(module, loaded)


@pytest.mark.slow
def test_a_checkpoint_of_lightnings_own_and_a_version_are_not_mixed(tmp_path: Path) -> None:
    url, own = str(tmp_path / "store"), tmp_path / "own.ckpt"
    fit(tmp_path, CnrCheckpoint(url, 4))[1].save_checkpoint(own)
    trainer = Trainer(
        max_epochs=EPOCHS + 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        callbacks=[CnrCheckpoint(url, 4, resume=True)],
    )
    loader = DataLoader(TensorDataset(torch.arange(32), torch.rand(32)), batch_size=16)
    with pytest.raises(OptionError, match=r"resume=True continues from step 24 of .*own\.ckpt.*leave one"):
        trainer.fit(Module(), loader, ckpt_path=own)


@pytest.mark.slow
def test_a_fit_whose_steps_lightning_does_not_count_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Raw(Module):
        automatic_optimization = False

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            torch.autograd.backward(super().training_step(batch, batch_idx))
            optimizer.step()

    fit(tmp_path, CnrCheckpoint(str(tmp_path / "store"), 1), module=Raw(), max_epochs=1)
    assert f"{BATCHES} batches were trained without an optimizer step that Lightning counts" in caplog.text


@pytest.mark.slow
def test_an_average_that_a_finished_fit_never_gets_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Dies(Callback):
        def on_train_end(self, *_: Any) -> None:
            raise StopsError

    url = str(tmp_path / "store")
    with pytest.raises(StopsError):
        fit(tmp_path, Dies(), EMAWeightAveraging(decay=0.9), CnrCheckpoint(url, 1))
    fit(tmp_path, EMAWeightAveraging(decay=0.9), CnrCheckpoint(url, 1, resume=True))
    assert "EMAWeightAveraging will not put the average into the model" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_metrics_of_the_version_are_there_for_a_step_that_is_made_up_for(
    tmp_path: Path, interval: str
) -> None:
    class ValidatedOnPlateau(OnPlateau):
        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            if self.trainer.global_step == 2 * BATCHES and told:
                told.pop()
                os.kill(os.getpid(), signal.SIGTERM)

    told: list[bool] = []
    options: Any = {
        "validation": DataLoader(TensorDataset(torch.arange(8)), batch_size=2),
        "num_sanity_val_steps": 0,
    }
    whole, rates, url = LearningRates(), LearningRates(), str(tmp_path / "store")
    fit(tmp_path, whole, module=ValidatedOnPlateau(interval), **options)
    told.append(True)
    with pytest.raises(SIGTERMException):
        fit(tmp_path, CnrCheckpoint(url, 4), rates, module=ValidatedOnPlateau(interval), **options)
    fit(tmp_path, CnrCheckpoint(url, 4, resume=True), rates, module=ValidatedOnPlateau(interval), **options)
    assert rates.seen == whole.seen


def test_a_development_run_saves_nothing(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 1, resume=True), fast_dev_run=True, enable_checkpointing=True)
    assert cnr_store.versions(url) == []
