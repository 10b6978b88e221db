"""Learning-rate schedulers that a program replaces or adds in a fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cnr_store.integrations.lightning import CnrCheckpoint
from tests.test_store.integrations.lightning_fit import (
    BATCHES,
    WARNINGS,
    Module,
    StopsAt,
    StopsError,
    fit,
)
from tests.test_store.integrations.test_lightning_hooks import assert_equal

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


class Restarts(Module):
    """Takes another scheduler in the second epoch, as a warm restart does."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1 and self.trainer.global_step == BATCHES:
            (optimizer,), (config,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = 0.1
            config.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7)


def test_a_scheduler_that_took_the_place_of_another_is_saved(tmp_path: Path) -> None:
    url, (whole, trainer) = str(tmp_path / "store"), fit(tmp_path, module=Restarts())
    with pytest.raises(StopsError):
        fit(tmp_path, CnrCheckpoint(url, 1, bits=32), StopsAt(BATCHES + 3), module=Restarts())
    again = CnrCheckpoint(url, 1, bits=32, resume=True)
    resumed, other = fit(tmp_path, again, module=Restarts())
    assert_equal(whole, resumed)
    assert other.optimizers[0].param_groups[0]["lr"] == trainer.optimizers[0].param_groups[0]["lr"]


class AddsScheduler(Module):
    def on_train_epoch_start(self) -> None:
        configs = self.trainer.lr_scheduler_configs
        if len(configs) == 1:
            scheduler = torch.optim.lr_scheduler.StepLR(self.trainer.optimizers[0], 7)
            configs.append(replace(configs[0], scheduler=scheduler))


def test_a_scheduler_that_came_in_the_fit_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, CnrCheckpoint(str(tmp_path / "store"), 2, bits=32), module=AddsScheduler())
    assert caplog.text.count("the trainer had 1 schedulers when the fit started and has 2") == 1
