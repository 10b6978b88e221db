"""Hooks that change the checkpoints of Lightning: what they add goes on, and what they load is theirs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from cnr_store.integrations.lightning import CnrCheckpoint
from tests.test_store.integrations.lightning_fit import BATCHES, EPOCHS, WARNINGS, Module, fit

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


class InPlace(Module):
    """Changes in place what Lightning puts into its checkpoints."""

    def __init__(self, part: str = "state_dict") -> None:
        super().__init__()
        self.part = part
        self.loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.part == "state_dict":
            checkpoint["state_dict"]["mean"] = torch.arange(3)
        elif self.part == "loops":
            checkpoint["loops"]["fit_loop"]["own"] = 1
        else:
            checkpoint[self.part].append({})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.part == "state_dict":
            self.loaded = checkpoint["state_dict"].pop("mean", None)
        elif self.part == "loops":
            self.loaded = checkpoint["loops"]["fit_loop"].get("own")
        else:
            self.loaded = len(checkpoint[self.part]) - 1
        assert checkpoint["state_dict"]["table.weight"].data_ptr() == self.table.weight.data_ptr()


def test_what_hooks_change_in_the_state_of_the_model_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "store")
    trained, _ = fit(tmp_path, CnrCheckpoint(url, 2, bits=32), module=InPlace(), max_epochs=1)
    caplog.clear()
    again = InPlace()
    fit(tmp_path, CnrCheckpoint(url, 2, bits=32, resume=True), module=again, max_epochs=1)
    assert torch.equal(again.loaded, torch.arange(3))
    assert torch.equal(again.state_dict()["table.weight"], trained.state_dict()["table.weight"])
    assert "in place" not in caplog.text


@pytest.mark.parametrize("part", ["loops", "lr_schedulers"])
def test_what_hooks_change_in_small_parts_goes_on(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 2), module=InPlace(part), max_epochs=1)
    again = InPlace(part)
    fit(tmp_path, CnrCheckpoint(url, 2, resume=True), module=again, max_epochs=1)
    assert again.loaded == 1
    assert "in place" not in caplog.text


class Draws(Callback):
    """Draws random numbers at each save."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["drawn"] = torch.rand(1)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(torch.rand(1).item())


@pytest.mark.slow
def test_random_numbers_go_on_behind_an_epoch_whose_save_draws_some(tmp_path: Path) -> None:
    whole, first, second = Draws(), Draws(), Draws()
    for draws, url, last in ((whole, "whole", 0), (first, "parts", BATCHES + 1), (second, "parts", 0)):
        torch.manual_seed(3)
        saves = CnrCheckpoint(str(tmp_path / url), BATCHES, resume=True)
        with contextlib.suppress(Stopped):
            fit(tmp_path, draws, StopsAt(last), saves, shuffle=False)
    assert first.seen == whole.seen[: BATCHES + 1]
    assert second.seen == whole.seen[BATCHES:]


class Stopped(Exception):  # noqa: N818 - not an error
    pass


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Stopped


class Counts(Callback):
    """Adds to its state in place."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.total += 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]


class Sums(Counts):
    """Keeps what it finds in the checkpoint."""

    found: torch.Tensor

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["callbacks"][self.state_key]["total"]


def test_what_a_hook_finds_of_a_callback_is_not_its_state_itself(tmp_path: Path) -> None:
    url, again = str(tmp_path / "store"), Sums()
    fit(tmp_path, Sums(), CnrCheckpoint(url, 2), max_epochs=1)
    fit(tmp_path, again, CnrCheckpoint(url, 2, resume=True), max_epochs=2)
    assert (again.found.item(), again.total.item()) == (BATCHES, 2 * BATCHES)


class SetsRates(Module):
    """Sets a rate, and a scheduler's, for the first steps."""

    def on_fit_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.5
        self.trainer.lr_scheduler_configs[0].scheduler.last_epoch = 1


@pytest.mark.slow
def test_rates_that_a_fit_begins_with_are_those_of_the_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, one = fit(tmp_path, module=SetsRates(), shuffle=False)

    def saves() -> CnrCheckpoint:
        return CnrCheckpoint(str(tmp_path / "store"), 4, bits=32, resume=True)

    with pytest.raises(Stopped):
        fit(tmp_path, StopsAt(BATCHES + 4), saves(), module=SetsRates(), shuffle=False)
    again, other = fit(tmp_path, saves(), module=SetsRates(), shuffle=False)
    assert torch.equal(again.state_dict()["table.weight"], whole.state_dict()["table.weight"])
    rates = [trainer.optimizers[0].param_groups[0]["lr"] for trainer in (one, other)]
    assert rates[0] == rates[1]
    assert "on_fit_start" not in caplog.text


class KeepsInference(Module):
    """Its scheduler keeps a tensor of inference mode, as made in a validation, of which torch counts no changes."""

    def on_train_start(self) -> None:
        scheduler: Any = self.trainer.lr_scheduler_configs[0].scheduler
        with torch.inference_mode():
            scheduler.best = torch.ones(2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = 1


def test_tensors_of_inference_mode_are_given_to_hooks(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 4), module=KeepsInference(), max_epochs=1)
    _, trainer = fit(tmp_path, CnrCheckpoint(url, 4, resume=True), module=KeepsInference())
    assert trainer.global_step == EPOCHS * BATCHES
