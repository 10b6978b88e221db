"""Versions have the metrics of their own weights, and the best of them is kept."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, TensorDataset

import cnr_store
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

pytestmark = pytest.mark.filterwarnings(*WARNINGS)

SCORES = (0.5, 0.9, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


class Scored(Module):
    """Each validation has the next score. Keeps the weights that it is of."""

    def __init__(self, scores: tuple[float, ...] = SCORES) -> None:
        super().__init__()
        self._scores = iter(scores)
        self.validated: dict[int, tuple[float, dict[str, torch.Tensor]]] = {}

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        torch.rand(3)  # random numbers that training goes on with

    def on_validation_epoch_end(self) -> None:
        score = next(self._scores)
        self.log("score", score)
        weights = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.validated[self.global_step] = score, weights


def validated(folder: Path, *callbacks: Callback, module: Module | None = None, **options: Any) -> Any:
    validation = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, generator=torch.Generator())
    everything: dict[str, Any] = {"num_sanity_val_steps": 0, "validation": validation} | options
    return fit(folder, *callbacks, module=module or Scored(), **everything)[0]


@pytest.mark.slow
@pytest.mark.some_by_day(8)
@pytest.mark.parametrize("check", [{"val_check_interval": 4}, {"val_check_interval": 3}, {}])
@pytest.mark.parametrize("every", [2, 3, 4, 5, 100])
@pytest.mark.parametrize("policy", ["consecutive", "full"])
def test_the_best_version_holds_the_weights_that_were_validated(
    tmp_path: Path, every: int, policy: str, check: dict[str, Any]
) -> None:
    url = str(tmp_path / "store")
    options: dict[str, Any] = {
        "policy": policy,
        "bits": 32,
        "keep_last": 1,
        "retention": cnr_store.Retention(max_chain=None),
    }
    callback = CnrCheckpoint(url, every, monitor="score", mode="max", save_top_k=1, **options)
    module = validated(tmp_path, callback, **check)
    best = max(module.validated, key=lambda step: module.validated[step][0])
    (kept,) = [one for one in cnr_store.versions(url) if one.metadata.get("score") == pytest.approx(0.9)]
    assert kept.step == best
    loaded = Module()
    cnr_store.load(url, loaded, version=kept)
    for name, tensor in module.validated[best][1].items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_version_has_no_metric_of_other_weights(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    module = validated(tmp_path, CnrCheckpoint(url, 3), val_check_interval=4)
    for version in cnr_store.versions(url):
        assert "loss" in version.metadata
        found, (score, _) = version.metadata.get("score"), module.validated.get(version.step, (None, {}))
        assert (found is None) == (score is None)
        assert found is None or found == pytest.approx(score)


def test_a_metric_that_is_logged_now_and_then_is_of_the_step_that_logged_it(tmp_path: Path) -> None:
    class Now(Module):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            if batch_idx % 4 == 0:
                self.log("now", float(batch_idx))
            return super().training_step(batch, batch_idx)

    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 3), module=Now(), max_epochs=1)
    assert [(one.step, one.metadata.get("now")) for one in cnr_store.versions(url)] == [
        (3, None),
        (6, None),
        (8, None),
    ]


@pytest.mark.slow
def test_the_step_of_each_save_is_saved_once(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    validated(tmp_path, CnrCheckpoint(url, 2, monitor="score"), val_check_interval=4)
    steps = [version.step for version in cnr_store.versions(url)]
    assert steps == [*range(2, EPOCHS * BATCHES + 1, 2)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Total length of `DataLoader` across ranks is zero")
def test_validations_that_never_come_hold_up_no_save(tmp_path: Path) -> None:
    url, nothing = str(tmp_path / "store"), DataLoader(TensorDataset(torch.arange(0)))
    validated(tmp_path, CnrCheckpoint(url, 1, monitor="score"), validation=nothing, val_check_interval=1)
    steps = [version.step for version in cnr_store.versions(url)]
    assert steps == list(range(1, EPOCHS * BATCHES + 1))


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("stop", [5, 6, 13, 21])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_fit_goes_on_behind_the_validation(tmp_path: Path, stop: int, averaged: bool) -> None:
    """Random numbers, the state of callbacks, and schedulers that go by the metric are those behind it."""

    class OnPlateau(Scored):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0, factor=0.5)
            plateau = {"scheduler": scheduler, "interval": "step", "frequency": 4, "monitor": "score"}
            return {"optimizer": optimizer, "lr_scheduler": plateau}

    def others() -> list[Callback]:
        callbacks: list[Callback] = [EarlyStopping("score", mode="max", patience=100)]
        return [*callbacks, EMAWeightAveraging(decay=0.9)] if averaged else callbacks

    url, options = str(tmp_path / "store"), {"val_check_interval": 4}
    whole = validated(tmp_path, *(stopping := others()), module=OnPlateau(), **options)
    saves = CnrCheckpoint(url, 100, bits=32, monitor="score")
    with pytest.raises(StopsError):
        validated(tmp_path, saves, *others(), StopsAt(stop), module=OnPlateau(), **options)
    loads = CnrCheckpoint(url, 100, bits=32, monitor="score", resume=True)
    rest = OnPlateau(SCORES[(stop - 1) // 4 :])
    validated(tmp_path, loads, *(resumed := others()), module=rest, **options)
    assert sorted(rest.validated) == [step for step in whole.validated if step >= stop]
    assert resumed[0].state_dict() == stopping[0].state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[name], tensor), name


def test_what_hooks_change_at_the_end_is_saved_whatever_it_is(tmp_path: Path) -> None:
    class History:
        def __init__(self) -> None:
            self.seen = [0]

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    class Fills(Callback):
        def on_train_end(self, *_: Any) -> None:
            history.seen.append(1)

    url, history, loaded = str(tmp_path / "store"), History(), History()
    fit(tmp_path, CnrCheckpoint(url, BATCHES, state={"history": history}), Fills(), max_epochs=1)
    fit(tmp_path, CnrCheckpoint(url, BATCHES, state={"history": loaded}, resume=True), max_epochs=1)
    assert loaded.seen == [0, 1]


def test_a_finder_of_learning_rates_does_not_hinder_a_resume(tmp_path: Path) -> None:
    class WithRate(Module):
        lr = 0.1

    url = str(tmp_path / "store")
    for epochs in (1, 2):
        finder = LearningRateFinder(num_training_steps=5, update_attr=False)
        fit(tmp_path, CnrCheckpoint(url, BATCHES, resume=True), finder, module=WithRate(), max_epochs=epochs)
    assert [version.step for version in cnr_store.versions(url)] == [BATCHES, 2 * BATCHES]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [5, 6, 13])
def test_random_numbers_go_on_though_the_iterator_of_the_validation_draws(tmp_path: Path, stop: int) -> None:
    validation = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)  # which draws from the global ones
    options: dict[str, Any] = {"val_check_interval": 4, "validation": validation}
    url, whole = str(tmp_path / "store"), validated(tmp_path, **options)
    saves = CnrCheckpoint(url, 100, bits=32, monitor="score")
    with pytest.raises(StopsError):
        validated(tmp_path, saves, StopsAt(stop), **options)
    loads = CnrCheckpoint(url, 100, bits=32, monitor="score", resume=True)
    rest = validated(tmp_path, loads, module=Scored(SCORES[(stop - 1) // 4 :]), **options)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[name], tensor), name


class Slow(CSVLogger):
    """Takes seconds between the end of a batch and the moment at which Lightning decides on a validation."""

    def __init__(self, folder: Path, now: list[float]) -> None:
        super().__init__(folder)
        self._now = now

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._now[0] += 1


def test_a_validation_that_comes_by_the_clock_is_saved_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("lightning.pytorch.loops.training_epoch_loop.time.monotonic", lambda: now[0])
    url = str(tmp_path / "store")
    options: dict[str, Any] = {
        "val_check_interval": timedelta(seconds=3),
        "max_epochs": 1,
        "log_every_n_steps": 1,
    }
    callback = CnrCheckpoint(url, 2, bits=32, monitor="score", mode="max", save_top_k=1, keep_last=1)
    module = validated(tmp_path, callback, logger=Slow(tmp_path, now), **options)
    assert len(module.validated) > 1
    best = max(module.validated, key=lambda step: module.validated[step][0])
    (kept,) = [one for one in cnr_store.versions(url) if one.metadata.get("score") == pytest.approx(0.9)]
    assert kept.step == best


def test_a_fit_that_resumes_at_its_end_claims_the_metric_of_its_own_validation(tmp_path: Path) -> None:
    class Ends(Callback):
        def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == EPOCHS * BATCHES:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.received_sigterm:
                raise SIGTERMException  # as Lightning does between batches

    url = str(tmp_path / "store")
    options: dict[str, Any] = {
        "monitor": "score",
        "mode": "max",
        "save_top_k": 1,
        "keep_last": 1,
        "policy": "full",
    }
    with pytest.raises(SIGTERMException):
        validated(tmp_path, CnrCheckpoint(url, 100, **options), Ends())
    assert cnr_store.versions(url)[-1].step == EPOCHS * BATCHES
    validated(tmp_path, CnrCheckpoint(url, 100, resume=True, **options))
    scores = {one.step: one.metadata["score"] for one in cnr_store.versions(url) if "score" in one.metadata}
    assert scores == {2 * BATCHES: pytest.approx(0.9), EPOCHS * BATCHES: pytest.approx(0.5)}


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_end_of_an_average_has_no_metric_of_the_weights_before(tmp_path: Path) -> None:
    url, scores = str(tmp_path / "store"), (0.1, 0.2, 0.9)
    options: dict[str, Any] = {"monitor": "score", "mode": "max", "save_top_k": 1, "keep_last": 1, "bits": 32}
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
    module = Scored(scores)
    validated(tmp_path, CnrCheckpoint(url, 100, policy="full", **options), average, module=module)
    best, end = cnr_store.versions(url)
    assert (best.metadata["score"], "score" in end.metadata) == (pytest.approx(0.9), False)
    found = cnr_store.state_dict(url, best)["table.weight"]
    assert torch.equal(torch.from_numpy(found), module.validated[EPOCHS * BATCHES][1]["table.weight"])


def test_a_module_that_swaps_weights_for_validation_is_saved_with_its_own(tmp_path: Path) -> None:
    class Swaps(Scored):
        kept: torch.Tensor

        def on_validation_model_eval(self) -> None:
            self.kept = self.table.weight.detach().clone()
            with torch.no_grad():
                self.table.weight.mul_(0.5)
            super().on_validation_model_eval()

        def on_validation_model_train(self) -> None:
            with torch.no_grad():
                self.table.weight.copy_(self.kept)
            super().on_validation_model_train()
            trained[self.global_step] = self.kept

    trained: dict[int, torch.Tensor] = {}
    url = str(tmp_path / "store")
    validated(
        tmp_path, CnrCheckpoint(url, 100, bits=32, monitor="score"), module=Swaps(), val_check_interval=4
    )
    for version in cnr_store.versions(url):
        found = cnr_store.state_dict(url, version)["table.weight"]
        assert torch.equal(torch.from_numpy(found), trained[version.step]), version.step
