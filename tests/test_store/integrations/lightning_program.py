"""The process that runs one life of a random program under Lightning, with our checkpoints, Lightning's, or none."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it ships no types

from cnr_store.integrations.lightning import CnrCheckpoint
from tests.test_store.integrations.lightning_fit import Behind
from tests.test_store.support.fork_server import fork_jobs

ROWS, DIM, SIZE = 120, 4, 8
MAX_STEPS = 60

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: Adam(parameters, lr=0.02),
    "adamw": lambda parameters: AdamW(parameters, lr=0.02, amsgrad=True),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.01, momentum=0.5),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
}
SCHEDULERS: dict[str, Any] = {
    "step": lambda optimizer: {"scheduler": StepLR(optimizer, 3, 0.7), "interval": "step"},
    "epoch": lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.7), "interval": "epoch"},
    "cosine": lambda optimizer: {"scheduler": CosineAnnealingLR(optimizer, 6), "interval": "step"},
    "cycle": lambda optimizer: {
        "scheduler": OneCycleLR(optimizer, 0.05, total_steps=MAX_STEPS, cycle_momentum=False),
        "interval": "step",
    },
    "plateau": lambda optimizer: {
        "scheduler": ReduceLROnPlateau(optimizer, patience=0),
        "monitor": "loss",
        "strict": False,  # an epoch may have no validation
    },
    "steep": lambda optimizer: {
        "scheduler": ReduceLROnPlateau(optimizer, patience=1),
        "monitor": "trained",
        "interval": "step",
    },
}
AVERAGES: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "late ema": lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=2, update_starting_at_step=5),
    "mean": WeightAveraging,
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2),
}
HOOKS = [
    "on_train_batch_start",
    "on_train_batch_end",
    "behind_batch",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
]


class Plan:
    """What a seed draws."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.seed, self.is_manual = seed, random.random() < 0.25
        self.optimizers = random.choices([*OPTIMIZERS], k=random.randint(2, 3) if self.is_manual else 1)
        self.is_sparse = random.random() < 0.4
        self.scheduler = random.choice([None, *SCHEDULERS])
        averages = [None, None, *AVERAGES]
        self.average = random.choice(averages[:-1] if self.is_manual else averages)
        self.batches, self.epochs = random.randint(5, 8), random.randint(2, 4)
        self.validation: dict[str, Any] | None = random.choice(
            [
                None,
                {},
                {"val_check_interval": 3},
                {"val_check_interval": 4},
                {"check_val_every_n_epoch": 2},
                {"val_check_interval": 7, "check_val_every_n_epoch": None},
            ]
        )
        self.accumulates = 1 if self.is_manual else random.choice([1, 1, 2, 3])
        self.precision: Any = random.choice(["32-true", "32-true", "bf16-mixed"])
        self.clips = not self.is_manual and not self.is_sparse and random.random() < 0.3
        self.loader = random.choice(["stateful", "stateful", "stateful", "shuffled"])
        self.max_steps = random.choice([-1, -1, random.randint(9, 20)])
        self.drops = random.random() < 0.5
        self.normalizes = self.average in (None, "swa") and random.random() < 0.3
        self.stops_early = random.random() < 0.3
        self.unfreezes = not self.is_manual and self.average is None and random.random() < 0.25
        self.every, self.monitors = (
            random.randint(1, 9),
            self.validation is not None and random.random() < 0.4,
        )
        self.policy: Any = random.choice(["consecutive", "intermittent", "full", "auto"])
        self.way = random.choice(["resume", "resume", "last", "marker"])
        self.kept: dict[str, Any] | None = random.choice(
            [
                {"every_n_train_steps": random.randint(1, 5), "save_top_k": -1},
                {"every_n_epochs": 1, "save_top_k": 1},
                {"monitor": "trained", "save_top_k": 2, "every_n_train_steps": 2},
                {"monitor": "loss", "save_top_k": 2} if self.validation is not None else {"save_last": True},
            ]
        )
        if self.way == "resume" and random.random() < 0.5:
            self.kept = None
        self.is_first = random.random() < 0.5
        steps = self.batches * self.epochs * len(self.optimizers) // self.accumulates
        ends = sorted(random.sample(range(1, steps + 1), random.randint(1, 2)))
        self.ends = [(step, random.choice(HOOKS), random.choice(["SIGKILL", "SIGTERM"])) for step in ends]
        # An order that was shuffled, and Lightning's finetuning, go on from the end of an epoch alone.
        if self.loader == "shuffled" or self.unfreezes:
            self.every, self.monitors = self.steps_of_epoch, False
            self.kept = self.kept and {
                "every_n_epochs": 1,
                "save_top_k": -1,
                "save_on_train_epoch_end": True,
            }
            self.ends = [(step, hook, "SIGKILL") for step, hook, _ in self.ends]

    @property
    def steps_of_epoch(self) -> int:
        if self.is_manual:
            others = sum(number % 3 > 0 for number in range(self.batches))
            return self.batches + others * (len(self.optimizers) - 1)
        return -(-self.batches // self.accumulates)

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items())


class Module(LightningModule):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(plan.seed)
        self._plan, self.automatic_optimization = plan, not plan.is_manual
        self.table = nn.Embedding(ROWS, DIM, sparse=plan.is_sparse)
        normalizing = [nn.BatchNorm1d(DIM)] if plan.normalizes else []
        self.top = nn.Sequential(*normalizing, nn.Dropout(0.2 if plan.drops else 0.0), nn.Linear(DIM, 1))
        self.bias = nn.Linear(DIM, 1)

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        found = self.table(batch[0])
        return nn.functional.mse_loss((self.top(found) + self.bias(found)).squeeze(1), batch[1])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("trained", loss)
        if self._plan.is_manual:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward(loss)
            for place, optimizer in enumerate(self.optimizers()):
                if place == 0 or batch_idx % 3:
                    optimizer.step()
            schedulers = self.lr_schedulers() or []
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step(*[float(loss)] * isinstance(scheduler, ReduceLROnPlateau))  # type: ignore[arg-type]
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        plan = self._plan
        parts: list[Any] = [self.table.parameters(), self.top.parameters(), self.bias.parameters()]
        if len(plan.optimizers) == 1:
            parts = [[one for one in self.parameters() if one.requires_grad]]
        elif len(plan.optimizers) == 2:
            parts[1:] = [[*self.top.parameters(), *self.bias.parameters()]]
        kinds = [OPTIMIZERS[name] for name in plan.optimizers]
        if plan.is_sparse:  # those that take sparse gradients
            kinds[0] = OPTIMIZERS["adagrad"] if len(parts) == 1 else lambda some: SparseAdam(some, lr=0.02)
        optimizers = [kind(part) for kind, part in zip(kinds, parts, strict=True)]
        scheduled = [] if plan.scheduler is None else optimizers
        if plan.scheduler == "plateau" and plan.validation is None and not plan.is_manual:
            scheduled = []  # nothing to monitor
        if plan.unfreezes and plan.scheduler in ("cycle", "cosine"):
            scheduled = []  # they know their groups from the beginning
        return optimizers, [SCHEDULERS[plan.scheduler or "step"](one) for one in scheduled]


class Notes(Callback):
    """Keeps what was trained and validated."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append([trainer.current_epoch, batch_idx, trainer.global_step, batch[0].tolist()])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append([trainer.global_step, float(trainer.callback_metrics["loss"])])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [*self.seen]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


class Unfreezes(BaseFinetuning):
    """Trains a part from the second epoch on, as another group of the optimizer."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.bias)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.bias, optimizer, lr=0.02)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch >= 1:  # Lightning resumes with its parameters frozen
            self.make_trainable(pl_module.bias)


class Ends(Behind):
    """Sends this process a signal at a hook, once so many steps were taken. Notes with which step it began."""

    def __init__(self, folder: Path, end: tuple[int, str, str] | None) -> None:
        self._folder, self._step = folder, end[0] if end else MAX_STEPS * 9
        self._signal = getattr(signal, end[2]) if end else None
        if end:
            setattr(self, end[1], self._send)

    def _send(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step >= self._step and not trainer.sanity_checking and self._signal:
            number, self._signal = self._signal, None
            os.kill(os.getpid(), number)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        (self._folder / "began").write_text(position(trainer))

    def behind_batch(self, trainer: Any) -> None:
        pass


def position(trainer: Any) -> str:
    """Where a fit stands: the steps, batches and epochs that are behind it."""
    done = (trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop.epoch_progress)
    return "-".join(map(str, (trainer.global_step, *(one.total.processed for one in done))))


class Own(Callback):
    """Saves wherever a fit may have been saved, by Lightning's own means, with the random numbers that these lack."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rng: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rng = state_dict["rng"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._rng is not None:
            torch.set_rng_state(self._rng)

    def _save(self, trainer: Trainer, place: str) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self._folder / f"{position(trainer)}.{place}")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "batch")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer, "epoch")


def loaders(plan: Plan) -> tuple[Any, Any]:
    ids = torch.arange(plan.batches * SIZE) * 7 % ROWS
    kind = DataLoader if plan.loader == "shuffled" else StatefulDataLoader
    data = TensorDataset(ids, ids / ROWS)
    validation = DataLoader(TensorDataset(ids[:16], ids[:16] / ROWS), batch_size=8)
    return kind(data, batch_size=SIZE, shuffle=plan.loader == "shuffled"), validation


def live(command: dict[str, Any]) -> None:
    """One life: until a signal, or the end, whose state goes to the file ``end``."""
    plan, folder = Plan(command["seed"]), Path(command["side"])
    notes, module = Notes(), Module(plan)
    ends = command["end"]
    callbacks: list[Callback] = [notes]
    if plan.average:
        callbacks.append(AVERAGES[plan.average]())
    if plan.stops_early:
        callbacks.append(EarlyStopping("trained", patience=50, check_on_train_epoch_end=True))
    if plan.unfreezes:
        callbacks.append(Unfreezes())
    if plan.kept is not None:
        callbacks.append(ModelCheckpoint(folder / "kept", enable_version_counter=False, **plan.kept))
    resumes_at: Any = None
    if command["way"] == "store":
        options: dict[str, Any] = {
            "policy": plan.policy,
            "budget": 0,
            "resume": plan.way == "resume",
        }
        if plan.monitors:
            options |= {"monitor": "loss", "save_top_k": 2, "keep_last": 3}
        saves = CnrCheckpoint(folder / "store", plan.every, **options)
        callbacks = [saves, *callbacks] if plan.is_first else [*callbacks, saves]
        if plan.way == "last":
            resumes_at = "last"
        elif plan.way == "marker":
            markers = sorted((folder / "kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
            resumes_at = markers[-1] if markers else None
    elif command["way"] == "own":
        callbacks.append(Own(folder))
        places = [folder / f"{command['at']}.{place}" for place in command["places"]]
        resumes_at = next((one for one in places if one.exists()), None)
    callbacks.append(Ends(folder, tuple(ends) if ends else None))
    trainer = Trainer(
        max_epochs=plan.epochs,
        max_steps=plan.max_steps,
        accelerator="cpu",
        precision=plan.precision,
        accumulate_grad_batches=plan.accumulates,
        gradient_clip_val=0.5 if plan.clips else None,
        logger=False,
        enable_checkpointing=plan.kept is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **(plan.validation or {}),
    )
    training, validation = loaders(plan)
    (folder / "began").unlink(missing_ok=True)
    try:
        trainer.fit(
            module, training, validation if plan.validation is not None else None, ckpt_path=resumes_at
        )
    except SIGTERMException:
        return
    if not (folder / "began").exists():  # nothing was left to train
        (folder / "began").write_text(position(trainer))
    torch.save(state(trainer, module), folder / "end")


def state(trainer: Any, module: Module) -> dict[str, Any]:
    """What two programs that end alike have in common."""
    found = {
        "model": module.state_dict(),
        "optimizers": [one.state_dict() for one in trainer.optimizers],
        "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        "counts": {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "epochs": vars(trainer.fit_loop.epoch_progress.total),
            "batches": vars(trainer.fit_loop.epoch_loop.batch_progress.total),
        },
    }
    for one in trainer.callbacks:
        if isinstance(one, ModelCheckpoint):  # its paths are those of this life
            scores = sorted(map(float, one.best_k_models.values()))
            found["kept"] = [one.best_model_score, scores]
        elif isinstance(one, WeightAveraging | StochasticWeightAveraging):
            average = one._average_model
            found["average"] = [one.state_dict(), average and average.state_dict()]
        elif isinstance(one, EarlyStopping | Notes):
            found[type(one).__name__] = one.state_dict()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "cnr_store"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    fork_jobs(live)
