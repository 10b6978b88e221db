"""A Lightning callback that checkpoints while `Trainer.fit` runs, and resumes it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cnr_store.errors import CheckpointError, EmptyStoreError, OptionError
from cnr_store.reading.opening import Url
from cnr_store.training.checkpointer import Checkpointer
from cnr_store.training.data.tracked_reader import TrackedReader
from cnr_store.training.model.arguments import Overlap, count
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


class _Loops:
    """Where `Trainer.fit` stands: epochs, steps, batches, and the state of loaders that have one."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state)


class CnrCheckpoint(Callback):
    """Saves the module that is trained, all its optimizers and schedulers, and where `fit` stands.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    every_n_steps
        Optimizer steps between two saves; a save waits for the end of its batch, and is never in the middle of an
        accumulation of gradients. The end of `fit` is saved, too, also where a SIGTERM ends it.
    resume
        Whether `fit` goes on from the newest version, if there is one. Then give no `ckpt_path`.
    options
        Those of `Checkpointer`, such as ``policy``, ``bits`` and ``state``.

    Raises
    ------
    OptionError
        Also when `fit` starts: with a `TrackedReader` among its loaders, or more than one process.
    """

    def __init__(self, url: Url, every_n_steps: int, *, resume: bool = False, **options: Any) -> None:
        self._url = url
        self._every = count("every_n_steps", every_n_steps, least=1)
        self._resume = resume
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._saved_step: int | None = None  # or loaded
        self._step_before = 0  # this batch
        self._random: dict[str, Any] | None = None  # of the version, until the first batch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the checkpointer and resume; optimizers and schedulers are there by now."""
        if trainer.world_size != 1:
            raise OptionError(
                f"CnrCheckpoint saves from one process, and this trainer has {trainer.world_size}"
            )
        self._step_before = trainer.global_step
        state = dict(self._options.get("state") or {})
        state |= {"lightning.loops": _Loops(trainer), "lightning.precision": trainer.precision_plugin}
        for position, config in enumerate(trainer.lr_scheduler_configs):
            state[f"lightning.scheduler.{position}"] = config.scheduler
        self._saved_step = None
        options = {**self._options, "state": state}
        self._checkpointer = Checkpointer(self._url, pl_module, trainer.optimizers, **options)
        if self._resume:
            with contextlib.suppress(EmptyStoreError):  # the first start of this job
                self._saved_step = self._checkpointer.load().step
                self._random = rng_state()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the loaders; they are there by now."""
        _check_loaders(trainer.train_dataloader)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the random numbers again: making loaders has drawn some since they were restored."""
        self._step_before = trainer.global_step
        random, self._random = self._random, None
        if random is not None and self._options.get("rng", True):
            set_rng_state(random)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time; behind the last batch only when Lightning has ended the epoch, or it could not resume."""
        if self._is_due(trainer) and not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the last batch's step was due."""
        if self._is_due(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end, if need be after the save before it."""
        self._save(trainer, overlap="wait")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for what is being written, and stop tracking."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish what is being written; save the end where a SIGTERM came, and nothing of a step that failed."""
        try:
            # Lightning heeds the signal between batches: if the last one took no step, gradients are being gathered.
            if isinstance(exception, SIGTERMException) and trainer.global_step > self._step_before:
                self._save(trainer, overlap="wait")
        except CheckpointError as error:  # the exception that ends training is the one to be raised
            log.error("the save before this process ends was not begun: %s", error)
        with contextlib.suppress(CheckpointError):  # logged; the exception that ends training says more
            self._close()

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether this batch took a step, and one that comes to or goes beyond the next multiple.

        One batch can take several steps, and several batches take one: between them gradients are not saved.
        """
        step = trainer.global_step
        return step > self._step_before and step // self._every > (self._saved_step or 0) // self._every

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
    """Refuse readers that count what they give out, and tell of other loaders that Lightning takes batches ahead of.

    Raises
    ------
    OptionError
    """
    for loader in _flat(loaders):
        if isinstance(loader, TrackedReader):
            raise OptionError(
                "a TrackedReader counts batches as trained once they are given out, and Lightning takes batches ahead: "
                "a resumed fit would skip samples. Give the trainer torchdata's StatefulDataLoader"
            )
        if callable(getattr(loader, "state_dict", None)) and not _has_length(loader):
            log.warning(
                "a %s has no length, so Lightning takes a batch ahead, and a fit resumed within an epoch skips one: "
                "give its dataset a __len__",
                type(loader).__name__,
            )


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):  # as Lightning asks
        return False
    return True


def _flat(loaders: Any) -> Iterator[Any]:
    """Loaders from lists, dicts and Lightning's CombinedLoader, which may hold each other."""
    parts = getattr(loaders, "flattened", loaders)
    if isinstance(parts, Mapping):
        parts = list(parts.values())
    if isinstance(parts, list | tuple):
        for part in parts:
            yield from _flat(part)
    else:
        yield loaders
