"""A small module, and Lightning's own trainer that fits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it ships no types

BATCHES, EPOCHS = 8, 3
WARNINGS = (
    "ignore:.*does not have many workers.*",
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning",  # Lightning makes them
    "ignore:'set_vital' is deprecated",  # torchdata calls it
)


class Behind(Callback):
    """Calls `behind_batch` behind all hooks of a batch's end, also of callbacks listed before it that come last."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        hook = loop.on_advance_end

        def behind(*args: Any) -> None:
            hook(*args)
            self.behind_batch(trainer)

        loop.on_advance_end = behind

    def behind_batch(self, trainer: Any) -> None:
        raise NotImplementedError


class StopsError(Exception):
    pass


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step >= self._step:
            raise StopsError


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


def fit(
    folder: Path,
    *callbacks: Callback,
    max_epochs: int = EPOCHS,
    module: Module | None = None,
    validation: Any = None,
    logger: Any = False,
    enable_checkpointing: bool = False,
    shuffle: bool = True,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[Module, Trainer]:
    module = module or Module()
    ids = torch.arange(BATCHES * 16) * 3 % 200
    loader = StatefulDataLoader(TensorDataset(ids, ids / 200), batch_size=16, shuffle=shuffle)
    trainer = Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=logger,
        enable_checkpointing=enable_checkpointing,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return module, trainer
