"""Lightning's own trainer is told to end, and takes batches ahead of training."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, TensorDataset

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store import OptionError, TrackedReader
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


class ToldToEnd(Callback):
    """Sends this process a SIGTERM at a hook, once so many steps were taken."""

    def __init__(self, hook: str, step: int) -> None:
        setattr(self, hook, self._send)
        self._step = step

    def _send(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step and not trainer.received_sigterm:
            os.kill(os.getpid(), signal.SIGTERM)


class Validated(Module):
    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        pass


def plain_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8)), batch_size=2)


def told_to_end(folder: Path, hook: str, step: int, **options: Any) -> tuple[Validated, Validated, list[int]]:
    """What a run took up to its signal, what the one that resumed it did, and the steps saved by the first."""
    url = str(folder / "store")
    options |= {"validation": plain_loader(), "num_sanity_val_steps": 0}
    first = Validated()
    with pytest.raises(SIGTERMException):
        fit(folder, CnrCheckpoint(url, 100, bits=32), ToldToEnd(hook, step), module=first, **options)
    saved = [version.step for version in cnr_store.versions(url)]
    second = Validated()  # it sets the random numbers
    fit(folder, CnrCheckpoint(url, 100, bits=32, resume=True), module=second, **options)
    return first, second, saved


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_what_a_sigterm_ends_is_saved_and_gone_on_with(tmp_path: Path, hook: str) -> None:
    undisturbed, _ = fit(tmp_path, module=Validated(), validation=plain_loader(), num_sanity_val_steps=0)
    first, second, saved = told_to_end(tmp_path, hook, step=11)
    assert saved == [11 + (hook == "on_train_batch_start")]
    assert first.seen + second.seen == undisturbed.seen
    for name, tensor in undisturbed.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_no_sample_is_lost_if_a_sigterm_comes_behind_the_batches_of_an_epoch(
    tmp_path: Path, hook: str
) -> None:
    first, second, saved = told_to_end(tmp_path, hook, step=BATCHES)
    assert saved == [BATCHES]
    seen = first.seen + second.seen
    epochs = [sorted(seen[start : start + BATCHES * 16]) for start in range(0, len(seen), BATCHES * 16)]
    assert epochs == [sorted(first.seen)] * EPOCHS


def test_a_sigterm_does_not_wait_for_storage_that_is_away(tmp_path: Path) -> None:
    """It would take a day here."""
    is_away = False
    backend = FaultyBackend(open_backend(tmp_path / "store"), lambda *_: "unreachable" if is_away else None)

    class GoesAway(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            nonlocal is_away
            is_away = trainer.global_step > 5

    checkpoint = CnrCheckpoint(
        backend,
        5,
        bits=32,
        failures=cnr_store.Failures(retry_seconds=86_400),
        limits=cnr_store.Limits(overlap="skip"),
    )
    with pytest.raises(SIGTERMException):
        fit(tmp_path, checkpoint, GoesAway(), ToldToEnd("on_train_batch_end", 12))
    assert {version.step for version in cnr_store.versions(tmp_path / "store")} <= {5}


class Measured(Module):
    """Its metric is better at each validation, of which it notes the steps and the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)
        torch.rand(1)  # training draws others then
        self.log("loss", 1.0 / (1 + self.trainer.global_step))


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
@pytest.mark.parametrize(
    ("step", "options"),
    [(BATCHES, {}), (2 * BATCHES, {}), (BATCHES + 4, {"val_check_interval": 4})],
)
def test_a_validation_that_a_sigterm_cut_off_is_run_first(
    tmp_path: Path, hook: str, step: int, options: dict[str, Any]
) -> None:
    url, (undisturbed, first, second) = str(tmp_path / "store"), (Measured() for _ in range(3))
    options |= {"validation": plain_loader(), "num_sanity_val_steps": 0}
    torch.manual_seed(1)
    fit(tmp_path, module=undisturbed, **options)
    torch.manual_seed(1)
    stopping = [EarlyStopping("loss", patience=1) for _ in range(2)]
    with pytest.raises(SIGTERMException):
        callbacks = CnrCheckpoint(url, 100, bits=32, monitor="loss"), ToldToEnd(hook, step), stopping[0]
        fit(tmp_path, *callbacks, module=first, **options)
    again = CnrCheckpoint(url, 100, bits=32, monitor="loss", resume=True)
    _, trainer = fit(tmp_path, again, stopping[1], module=second, **options)
    each = options.get("val_check_interval", BATCHES)
    best = [version.step for version in cnr_store.versions(url) if "loss" in version.metadata]
    assert best == list(range(each, EPOCHS * BATCHES + 1, each))
    assert second.validated == [at for at in range(step, EPOCHS * BATCHES + 1, each) for _ in range(4)]
    assert trainer.global_step == EPOCHS * BATCHES
    assert stopping[1].wait_count == 0
    for name, tensor in undisturbed.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(("step", "options"), [(4, {"val_check_interval": 4}), (BATCHES, {})])
def test_a_validation_that_follows_a_marker_is_run_first(
    tmp_path: Path, step: int, options: dict[str, Any]
) -> None:
    url, (undisturbed, first, second) = str(tmp_path / "store"), (Measured() for _ in range(3))
    options |= {"validation": plain_loader(), "num_sanity_val_steps": 0}
    kept = [
        ModelCheckpoint(tmp_path / "kept", every_n_train_steps=step, save_on_train_epoch_end=False)
        for _ in range(2)
    ]
    torch.manual_seed(1)
    fit(tmp_path, module=undisturbed, **options)
    torch.manual_seed(1)
    options["enable_checkpointing"] = True
    with pytest.raises(StopsError):
        fit(tmp_path, CnrCheckpoint(url, 100, bits=32), kept[0], StopsAt(step + 2), module=first, **options)
    fit(tmp_path, CnrCheckpoint(url, 100, bits=32, resume=True), kept[1], module=second, **options)
    assert second.validated == [at for at in undisturbed.validated if at >= step]
    for name, tensor in undisturbed.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


@pytest.mark.parametrize("hook", ["on_sanity_check_start", "on_validation_batch_end"])
def test_a_sigterm_before_the_first_batch_of_a_resumed_fit_saves_nothing(tmp_path: Path, hook: str) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 100), module=Measured(), validation=plain_loader(), max_epochs=1)
    saved = [version.id for version in cnr_store.versions(url)]
    callbacks = (
        ToldToEnd(hook, 0 if hook == "on_fit_start" else BATCHES),
        CnrCheckpoint(url, 100, resume=True),
    )
    with pytest.raises(SIGTERMException):
        fit(tmp_path, *callbacks, module=Measured(), validation=plain_loader())
    assert [version.id for version in cnr_store.versions(url)] == saved


def test_a_sigterm_in_the_middle_of_an_accumulation_saves_nothing(tmp_path: Path) -> None:
    first, second, saved = told_to_end(tmp_path, "on_train_batch_start", step=2, accumulate_grad_batches=3)
    assert saved == []
    assert second.seen[: len(first.seen)] == first.seen


def test_a_last_save_that_fails_leaves_lightnings_exception(tmp_path: Path) -> None:
    backend = FaultyBackend(open_backend(str(tmp_path / "store")), lambda operation, key, index: "before")
    with pytest.raises(SIGTERMException):
        fit(tmp_path, CnrCheckpoint(backend, 100), ToldToEnd("on_train_batch_end", 5))


def combined(reader: TrackedReader[Any]) -> CombinedLoader:
    return CombinedLoader({"liked": [reader], "seen": plain_loader()})


@pytest.mark.parametrize(
    "within",
    [lambda reader: reader, lambda reader: [reader], lambda reader: {"a": reader}, combined],
    ids=["alone", "list", "dict", "combined"],
)
def test_readers_that_lightning_takes_ahead_of_training_are_refused(
    tmp_path: Path, within: Callable[[TrackedReader[Any]], Any]
) -> None:
    class Own(Module):
        def train_dataloader(self) -> Any:
            return within(TrackedReader(plain_loader()))

    url, module = str(tmp_path / "store"), Own()
    options: Any = {"logger": False, "enable_checkpointing": False, "callbacks": CnrCheckpoint(url, 1)}
    trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, **options)
    with pytest.raises(OptionError, match=r"takes batches ahead.*StatefulDataLoader"):
        trainer.fit(module)
    assert module.seen == []
    assert cnr_store.versions(url) == []


def test_a_callback_saves_one_fit_at_a_time(tmp_path: Path) -> None:
    callback = CnrCheckpoint(str(tmp_path / "store"), 2, bits=32)

    class FitsAnother(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            with pytest.raises(OptionError, match="give each trainer its own"):
                fit(tmp_path, callback, max_epochs=1)

    _, trainer = fit(tmp_path, callback, FitsAnother(), max_epochs=1)
    assert cnr_store.versions(tmp_path / "store")[-1].step == trainer.global_step
    fit(tmp_path, CnrCheckpoint(str(tmp_path / "other"), 2), max_epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "plateau"), [(None, False), (1, False), (1, True)])
def test_the_last_version_has_the_metric_of_its_weights(
    tmp_path: Path, stop: int | None, plateau: bool
) -> None:
    """Also where the fit resumed in its last epoch, and where Lightning steps a scheduler behind the save."""

    class Scored(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", self.table.weight.mean())

        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            if plateau:
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(found[0][0])
                found[1].append({"scheduler": scheduler, "monitor": "score"})
            return found

    url = str(tmp_path / "store")
    validation = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    options: dict[str, Any] = {"bits": 32, "monitor": "score", "save_top_k": 1, "keep_last": 2}
    given: dict[str, Any] = {"validation": validation, "num_sanity_val_steps": 0}
    if stop is not None:
        ends = StopsAt((EPOCHS - 1) * BATCHES + stop + 1)
        with pytest.raises(StopsError):
            fit(tmp_path, CnrCheckpoint(url, stop, **options), ends, module=Scored(), **given)
    again = CnrCheckpoint(url, 3, resume=True, **options)
    fit(tmp_path, again, module=Scored(), **given)
    versions = cnr_store.versions(url)
    assert versions[-1].step == EPOCHS * BATCHES
    assert "score" in versions[-1].metadata
    assert plateau or versions[-2].step < versions[-1].step
