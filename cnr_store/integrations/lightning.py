"""A Lightning callback that saves checkpoints during `Trainer.fit` and resumes it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cnr_store.catalog.catalog import Url
from cnr_store.errors import CheckpointError, EmptyStoreError, OptionError
from cnr_store.training.checkpointer import Checkpointer
from cnr_store.training.data.loader_replay import length_of
from cnr_store.training.data.tracked_reader import TrackedReader
from cnr_store.training.model.arguments import Overlap, check_count
from cnr_store.training.model.rng_state import rng_state, set_rng_state

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.exceptions import SIGTERMException
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.exceptions import SIGTERMException
else:
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.utilities.exceptions import SIGTERMException
    except ModuleNotFoundError:
        from pytorch_lightning import Callback
        from pytorch_lightning.utilities.exceptions import SIGTERMException

log = logging.getLogger("cnr_store")


class CnrCheckpoint(Callback):
    """Saves the module in training, all its optimizers and schedulers, and the progress of `fit`.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    every_n_steps
        Optimizer steps between two saves. A save comes at the end of a batch, and never while gradients are being
        accumulated. The end of `fit` is saved too, also if a SIGTERM causes it.
    resume
        Whether `fit` continues from the newest version, if there is one. Then give no `ckpt_path`.
    options
        Those of `Checkpointer`, such as ``policy``, ``bits`` and ``state``.

    Raises
    ------
    OptionError
        `every_n_steps` is not a positive integer; or, when `fit` starts, it has more than one process or a
        `TrackedReader` among its loaders.
    """

    def __init__(self, url: Url, every_n_steps: int, *, resume: bool = False, **options: Any) -> None:
        self._url = url
        self._every = check_count("every_n_steps", every_n_steps, minimum=1)
        self._resume = resume
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._saved_step: int | None = None  # the newest step saved or loaded
        self._step_before_batch = 0
        self._loaded_rng: dict[str, Any] | None = None  # until the first batch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the checkpointer and resume. Optimizers and schedulers exist by now."""
        if trainer.world_size != 1:
            raise OptionError(
                f"CnrCheckpoint saves from one process, and this trainer has {trainer.world_size}: give it devices=1 "
                "and num_nodes=1"
            )
        self._step_before_batch = trainer.global_step
        state = {
            **(self._options.get("state") or {}),
            "lightning.loops": trainer.fit_loop,
            "lightning.precision": trainer.precision_plugin,
            **{
                f"lightning.scheduler.{position}": config.scheduler
                for position, config in enumerate(trainer.lr_scheduler_configs)
            },
        }
        self._saved_step = None
        options = {**self._options, "state": state}
        self._checkpointer = Checkpointer(self._url, pl_module, trainer.optimizers, **options)
        if self._resume:
            with contextlib.suppress(EmptyStoreError):  # nothing was saved yet
                self._saved_step = self._checkpointer.load().step
                self._loaded_rng = rng_state()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the loaders. They exist by now."""
        _check_loaders(trainer.train_dataloader)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore the random number generators again, because making the loaders has drawn from them."""
        self._step_before_batch = trainer.global_step
        state, self._loaded_rng = self._loaded_rng, None
        if state is not None and self._options.get("rng", True):
            set_rng_state(state)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if due. After the last batch the save waits for `on_train_epoch_end`: `fit` can't resume in between."""
        if self._is_due(trainer) and not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if due after the last batch."""
        if self._is_due(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of training, after waiting for the save before it."""
        self._save(trainer, overlap="wait")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the save under way, and stop tracking."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the end of training if a SIGTERM causes it, but nothing after an error, and wait for the save."""
        try:
            # Lightning acts on the signal between batches. A last batch without a step only accumulated gradients.
            if isinstance(exception, SIGTERMException) and trainer.global_step > self._step_before_batch:
                self._save(trainer, overlap="wait")
        except CheckpointError as error:  # only logged: the exception that ends training is the one to raise
            log.error("the last save, of step %d, was not begun: %s", trainer.global_step, error)
        with contextlib.suppress(CheckpointError):  # logged when the save failed
            self._close()

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether this batch reached or passed the next multiple of `every_n_steps`.

        A batch may take several steps, or none while it accumulates gradients, which are not saved.
        """
        step = trainer.global_step
        return step > self._step_before_batch and step // self._every > (self._saved_step or 0) // self._every

    def _save(self, trainer: Trainer, overlap: Overlap | None = None) -> None:
        step = trainer.global_step
        if self._checkpointer is None or step == self._saved_step:
            return
        pending = self._checkpointer.save(step, metadata={"epoch": trainer.current_epoch}, overlap=overlap)
        if not pending.skipped:
            self._saved_step = step

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()


def _check_loaders(loaders: Any) -> None:
    """Refuse readers that Lightning would read ahead of, and warn about other loaders that it reads ahead of.

    Raises
    ------
    OptionError
        There is a `TrackedReader` among them.
    """
    for loader in _flat(loaders):
        if isinstance(loader, TrackedReader):
            raise OptionError(
                "a TrackedReader counts a batch as trained once it is read, and Lightning takes batches ahead, so a "
                "resumed fit would skip samples: give the trainer torchdata's StatefulDataLoader"
            )
        if callable(getattr(loader, "state_dict", None)) and length_of(loader) is None:
            log.warning(
                "a %s has no length, so Lightning takes one batch ahead, and a fit resumed within an epoch skips one "
                "batch: give its dataset a __len__",
                type(loader).__name__,
            )


def _flat(loaders: Any) -> Iterator[Any]:
    """Loaders in lists, dicts and Lightning's CombinedLoader, nested in any way."""
    parts = getattr(loaders, "flattened", loaders)
    if isinstance(parts, Mapping):
        parts = list(parts.values())
    if isinstance(parts, list | tuple):
        for part in parts:
            yield from _flat(part)
    else:
        yield loaders
