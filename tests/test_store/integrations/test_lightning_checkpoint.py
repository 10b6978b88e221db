"""Hooks that change the checkpoints of Lightning: what they add goes on, and what they load is theirs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

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
            del checkpoint["state_dict"]["table.weight"]
        elif self.part == "loops":
            checkpoint["loops"]["fit_loop"]["own"] = 1
        else:
            checkpoint[self.part].append(1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.part == "state_dict":
            self.loaded = checkpoint["state_dict"].pop("mean", None)
        elif self.part == "loops":
            self.loaded = checkpoint["loops"]["fit_loop"].get("own")
        else:
            self.loaded = checkpoint[self.part][-1]
        assert ("table.weight" in checkpoint["state_dict"]) == (self.part != "state_dict")


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


def test_what_hooks_change_in_the_state_of_optimizers_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, CnrCheckpoint(tmp_path, 2), module=InPlace("optimizer_states"), max_epochs=1)
    assert caplog.text.count("hooks have changed optimizer_states of the checkpoint in place") == 1


class Replaces(Module):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["table.weight"] = torch.zeros(3)


def test_what_a_hook_changes_too_late_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 2), module=Replaces(), max_epochs=1)
    fit(tmp_path, CnrCheckpoint(url, 2, resume=True), module=Replaces(), max_epochs=1)
    assert "on_load_checkpoint has changed table.weight in the checkpoint" in caplog.text


class WritesLoaded(Module):
    """Keeps what it found in the checkpoint, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = nn.ModuleDict({"own": WithExtraState()})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for tensor in (
            checkpoint["state_dict"]["table.weight"],
            *flat_tensors(checkpoint["optimizer_states"]),
        ):
            tensor.fill_(7)


class WithExtraState(nn.Module):
    def get_extra_state(self) -> Any:
        return {"a": [1]}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"a": [1]}


def flat_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in flat_tensors(item)]


def test_what_hooks_change_in_what_is_loaded_has_no_effect_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "store")
    trained, _ = fit(tmp_path, CnrCheckpoint(url, 2, bits=32), module=WritesLoaded(), max_epochs=1)
    again, trainer = fit(
        tmp_path, CnrCheckpoint(url, 2, bits=32, resume=True), module=WritesLoaded(), max_epochs=1
    )
    assert torch.equal(again.state_dict()["table.weight"], trained.state_dict()["table.weight"])
    assert not any(
        (tensor == 7).all() for tensor in flat_tensors([one.state_dict() for one in trainer.optimizers])
    )
    assert "on_load_checkpoint has changed table.weight, optimizer_states in the checkpoint" in caplog.text


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


class Forgets(Module):
    """Lets a callback begin anew, and changes what was loaded from optimizers and schedulers."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["callbacks"] = {}
        for optimizer in checkpoint["optimizer_states"]:
            for group in optimizer["param_groups"]:
                group["lr"] = 0.001
        checkpoint["lr_schedulers"] = []


def test_what_a_hook_changes_in_vain_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url, again = str(tmp_path / "store"), Counts()
    fit(tmp_path, Counts(), CnrCheckpoint(url, 2), max_epochs=1)
    assert "on_load_checkpoint" not in caplog.text
    fit(tmp_path, again, CnrCheckpoint(url, 2, resume=True), module=Forgets(), max_epochs=2)
    assert again.total == BATCHES
    assert "on_load_checkpoint has changed optimizer_states, lr_schedulers in" in caplog.text


class SetsRates(Module):
    """Sets a rate, and a scheduler's, for the first steps."""

    def on_fit_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.5
        self.trainer.lr_scheduler_configs[0].scheduler.last_epoch = 1


class Clears(Module):
    def on_fit_start(self) -> None:
        self.trainer.optimizers[0].state.clear()


@pytest.mark.slow
def test_rates_that_a_fit_begins_with_are_those_of_the_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, one = fit(tmp_path, module=SetsRates(), shuffle=False)

    def saves() -> list[CnrCheckpoint]:
        return [CnrCheckpoint(str(tmp_path / name), 4, bits=32, resume=True) for name in "ab"]

    with pytest.raises(Stopped):
        fit(tmp_path, StopsAt(BATCHES + 4), *saves(), module=SetsRates(), shuffle=False)
    again, other = fit(tmp_path, *saves(), module=SetsRates(), shuffle=False)
    assert torch.equal(again.state_dict()["table.weight"], whole.state_dict()["table.weight"])
    rates = [trainer.optimizers[0].param_groups[0]["lr"] for trainer in (one, other)]
    assert rates[0] == rates[1]
    assert "on_fit_start" not in caplog.text


def test_state_that_a_fit_begins_without_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 4), max_epochs=1)
    fit(tmp_path, CnrCheckpoint(url, 4, resume=True), module=Clears())
    assert caplog.text.count("on_fit_start has changed the state of an optimizer") == 1


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


class Early(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pass


def test_callbacks_that_look_before_the_load_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, Early(), Sums(), CnrCheckpoint(url, 4), max_epochs=1)
    assert "on_fit_start" not in caplog.text
    fit(tmp_path, Early(), Sums(), CnrCheckpoint(url, 4, resume=True))
    assert caplog.text.count("on_fit_start of Early ran before the version was loaded") == 1
