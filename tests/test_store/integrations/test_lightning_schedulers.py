"""Learning-rate schedulers that a program replaces or adds in a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging

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


@pytest.mark.slow
def test_a_scheduler_that_took_the_place_of_another_is_saved(tmp_path: Path) -> None:
    url, (whole, trainer) = str(tmp_path / "store"), fit(tmp_path, module=Restarts())
    with pytest.raises(StopsError):
        fit(tmp_path, CnrCheckpoint(url, 1, bits=32), StopsAt(BATCHES + 3), module=Restarts())
    again = CnrCheckpoint(url, 1, bits=32, resume=True)
    resumed, other = fit(tmp_path, again, module=Restarts())
    assert_equal(whole, resumed)
    assert other.optimizers[0].param_groups[0]["lr"] == trainer.optimizers[0].param_groups[0]["lr"]


class WarmsUp(Module):
    """Has a scheduler whose state no other class has."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [BATCHES + 3, 2 * BATCHES + 3])
def test_averaging_in_the_place_of_a_scheduler_goes_on(tmp_path: Path, stop: int) -> None:
    def run(*callbacks: Callback) -> Module:
        average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2)
        return fit(tmp_path, average, *callbacks, module=WarmsUp())[0]

    url, whole = str(tmp_path / "store"), run()
    with pytest.raises(StopsError):
        run(CnrCheckpoint(url, 1, bits=32), StopsAt(stop))
    assert_equal(run(CnrCheckpoint(url, 1, bits=32, resume=True)), whole)
