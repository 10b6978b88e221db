"""Resumed fits read the samples that are left, in the order that they would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it ships no types

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
from tests.test_store.integrations.test_lightning_hooks import assert_equal

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stop", [2 * BATCHES, 2 * BATCHES + 2])
@pytest.mark.parametrize("hook", [None, "on_train_epoch_start", "on_train_epoch_end"])
def test_a_plain_loader_draws_the_order_of_the_next_epoch_once(
    tmp_path: Path, stop: int, workers: int, hook: str | None
) -> None:
    class Draws(Callback):
        """Draws random numbers before the order of an epoch is drawn."""

    if hook is not None:
        setattr(Draws, hook, lambda *_: torch.rand(3))

    ids = torch.arange(BATCHES * 16) * 3 % 200

    def plain(*callbacks: Callback) -> Module:
        loader = DataLoader(TensorDataset(ids, ids / 200), batch_size=16, shuffle=True, num_workers=workers)
        module = Module()
        options: Any = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        options |= {"enable_progress_bar": False, "enable_model_summary": False}
        Trainer(max_epochs=4, default_root_dir=tmp_path, callbacks=[Draws(), *callbacks], **options).fit(
            module, loader
        )
        return module

    url, whole = str(tmp_path / "store"), plain()
    with pytest.raises(StopsError):
        plain(CnrCheckpoint(url, BATCHES, bits=32), StopsAt(stop))
    rest = plain(CnrCheckpoint(url, BATCHES, bits=32, resume=True))
    assert rest.seen == whole.seen[-len(rest.seen) :]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[name], tensor), name


@pytest.mark.slow
def test_loaders_are_made_with_the_numbers_that_the_program_has_set(tmp_path: Path) -> None:
    class Splits(Module):
        def train_dataloader(self) -> Any:
            self.split = torch.randperm(16).tolist()  # as random_split draws one
            return StatefulDataLoader(TensorDataset(ids, ids / 200), batch_size=16)

    ids = torch.arange(BATCHES * 16) * 3 % 200
    url, splits = str(tmp_path / "store"), []
    for epochs in (1, 2):
        module = Splits()
        options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        options |= {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": epochs}
        saves = CnrCheckpoint(url, BATCHES, bits=32, resume=True)
        Trainer(default_root_dir=tmp_path, callbacks=[saves], **options).fit(module)
        splits.append(module.split)
    assert splits[0] == splits[1]


@pytest.mark.slow
def test_what_a_dataset_draws_goes_on(tmp_path: Path) -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, row: int) -> Any:
            return self.tensors[0][row], self.tensors[1][row] + torch.rand(())

    def trained(*callbacks: Callback) -> Module:
        torch.manual_seed(3)
        module, ids = Module(), torch.arange(BATCHES * 16) * 3 % 200
        options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(
            max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, callbacks=list(callbacks), **options
        )
        trainer.fit(module, StatefulDataLoader(Noisy(ids, ids / 200), batch_size=16))
        return module

    url = str(tmp_path / "store")
    undisturbed = trained()
    for stop in (3, BATCHES + 2):
        with pytest.raises(StopsError):
            trained(CnrCheckpoint(url, 1, bits=32, resume=True), StopsAt(stop))
    assert_equal(undisturbed, trained(CnrCheckpoint(url, 1, bits=32, resume=True)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_steps": 30},
        {"max_steps": 100, "max_epochs": 4},
        {"max_steps": 100, "max_epochs": 4, "limit_train_batches": BATCHES - 1},
    ],
)
def test_a_limit_of_steps_skips_no_epoch_and_repeats_no_batch(
    tmp_path: Path, kind: Any, limits: dict[str, Any]
) -> None:
    """Lightning takes an epoch that has ended for one to restart if there is a limit of steps."""
    ids = torch.arange(BATCHES * 16) * 3 % 200
    batches = limits.get("limit_train_batches", BATCHES)

    def trained(*callbacks: Callback) -> tuple[Module, int]:
        options: Any = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        options |= {"enable_progress_bar": False, "enable_model_summary": False}
        module, trainer = Module(), Trainer(callbacks=list(callbacks), **limits, **options)
        trainer.fit(module, kind(TensorDataset(ids, ids / 200), batch_size=16))
        return module, trainer.global_step

    url, (whole, steps) = str(tmp_path / "store"), trained()
    for stop in (batches, 2 * batches):
        with pytest.raises(StopsError):
            trained(CnrCheckpoint(url, batches, bits=32, resume=True), StopsAt(stop))
    rest, last = trained(CnrCheckpoint(url, batches, bits=32, resume=True))
    assert (last, rest.seen) == (steps, whole.seen[-len(rest.seen) :])
    assert_equal(rest, whole)


class OneCycle(Module):
    """Asks how many steps there will be, for which Lightning makes the loaders."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.2, total_steps=total, cycle_momentum=False
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("stop", [BATCHES, BATCHES + 3])
@pytest.mark.parametrize(("shuffle", "reload"), [(False, 0), (True, 0)])
def test_loaders_made_before_the_resume_go_on(tmp_path: Path, stop: int, shuffle: bool, reload: int) -> None:
    def run(*callbacks: Callback) -> tuple[Module, Trainer]:
        options: Any = {"shuffle": shuffle, "reload_dataloaders_every_n_epochs": reload}
        return fit(tmp_path, *callbacks, module=OneCycle(), **options)

    url, whole = str(tmp_path / "store"), run()[0]
    with pytest.raises(StopsError):
        run(CnrCheckpoint(url, 1, bits=32), StopsAt(stop))
    rest, trainer = run(CnrCheckpoint(url, 1, bits=32, resume=True))
    assert trainer.global_step == BATCHES * EPOCHS
    epoch = BATCHES * 16
    left = whole.seen[stop * 16 :]
    if shuffle and stop % BATCHES == 0:  # another order, of the same samples
        assert [*map(sorted, _epochs(rest.seen, epoch))] == [*map(sorted, _epochs(left, epoch))]
    else:
        assert rest.seen == left
        assert_equal(rest, whole)


@pytest.mark.slow
def test_a_finder_does_not_move_the_loaders_of_a_resume(tmp_path: Path) -> None:
    def finds() -> Callback:
        return LearningRateFinder(num_training_steps=5, update_attr=False)

    class Found(Module):
        lr = 0.1

    url, whole = str(tmp_path / "store"), fit(tmp_path, shuffle=False)[0]
    with pytest.raises(StopsError):
        fit(tmp_path, CnrCheckpoint(url, 3, bits=32), StopsAt(BATCHES + 4), shuffle=False)
    again = CnrCheckpoint(url, 3, bits=32, resume=True)
    rest, _ = fit(tmp_path, finds(), again, module=Found(), shuffle=False, enable_checkpointing=True)
    left = whole.seen[(BATCHES + 4) * 16 :]
    assert rest.seen[-len(left) :] == left
    assert_equal(rest, whole)


def _epochs(seen: list[int], epoch: int) -> list[list[int]]:
    return [seen[at : at + epoch] for at in range(0, len(seen), epoch)]
