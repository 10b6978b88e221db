"""A Lightning callback that saves checkpoints during `Trainer.fit` and resumes it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Literal

import cnr_store
from cnr_store.catalog.catalog import Url
from cnr_store.errors import (
    CheckpointError,
    EmptyStoreError,
    OptionError,
)
from cnr_store.integrations.lightning_hooks import (
    HookBehind,
    LastHooks,
    averaging,
    end_normalizing,
    ends_by_hooks,
    go_on_averaging,
    last_hook_of_validation,
    normalizes,
    position,
    restore_trained,
    swapping,
)
from cnr_store.integrations.lightning_io import REMARKS, StoreIO
from cnr_store.integrations.lightning_package import (
    Callback,
    LightningModule,
    SIGTERMException,
    Trainer,
)
from cnr_store.options import Job, Retention, given_group, own_keywords
from cnr_store.policies.checks import integer, number
from cnr_store.training.model.rng_state import rng_state, set_rng_state

log = logging.getLogger("cnr_store")

_BATCHES_TO_STEP = 1000


class CnrCheckpoint(Callback):
    """Saves the module in training, all its optimizers, and what Lightning keeps of a fit.

    Lightning's own checkpoints become versions of the store, too: of a `ModelCheckpoint`, and what `ckpt_path` names.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    every_n_steps, every_n_minutes
        Optimizer steps, and minutes, between two saves: one of them, or both. A save comes at the end of a batch in
        which an optimizer took a step, behind the hooks of all callbacks and of the module. The end of `fit` is saved
        too, behind their `on_train_end`, also if a SIGTERM causes it.
    monitor, mode, save_top_k
        Keep the versions in which the metric `monitor` is best (``"min"`` or ``"max"``), so many of them, as
        `cnr_store.Retention.keep_best` does. Each validation, and each epoch, that logs it is followed by a save. Each
        version's metadata has the epoch, and all metrics of one number that the module has logged at its step.
    resume
        Whether `fit` continues from the newest version, if there is one. Then give no `ckpt_path`.
    options
        Those of `Checkpointer`, such as ``policy``, ``bits`` and ``limits``.

    Raises
    ------
    OptionError
        An option is out of range, or does not go with another; or, when `fit` starts, it has more than one process or
        a `TrackedReader` among its loaders.
    StateError
        When `fit` starts: a callback, a scheduler or a hook keeps something that can't be stored.

    Notes
    -----
    The trainer's loggers get the figures of each save (``checkpoint/bytes``, ``checkpoint/seconds_stalled``, ...).
    """

    @own_keywords(cnr_store.Checkpointer)
    def __init__(
        self,
        url: Url,
        every_n_steps: int | None = None,
        *,
        every_n_minutes: float | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int | None = None,
        resume: bool = False,
        **options: Any,
    ) -> None:
        if every_n_steps is None and every_n_minutes is None:
            raise OptionError("give every_n_steps or every_n_minutes: how often to save")
        self._url = url
        self._every = None if every_n_steps is None else integer("every_n_steps", every_n_steps, minimum=1)
        self._every_seconds = (
            None if every_n_minutes is None else 60 * number("every_n_minutes", every_n_minutes)
        )
        self._resume, self._monitor = resume, monitor
        retention = given_group(Retention, options.get("retention", Retention()))
        if save_top_k is not None:
            if monitor is None or retention.keep_best is not None:
                raise OptionError(
                    "save_top_k needs monitor=, which tells the best, and no keep_best= in retention="
                )
            retention = replace(retention, keep_best=(monitor, mode, save_top_k))
        self._options = {**options, "retention": retention}
        if retention.keep_best is not None:
            self._monitor = retention.keep_best[0]
        self._trainer: Any = None
        self._io: Any = None  # the plugin of the trainer that this callback was made for
        self._last = LastHooks(self._begin, self._before_end_of_epoch)
        self._behind: list[HookBehind] = []

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Take the place of the plugin that saves and loads, and let hooks run behind those of all others."""
        if self._saves():
            raise OptionError("this CnrCheckpoint saves a fit that still runs: give each trainer its own")
        if self._trainer is not trainer:
            self._trainer, self._io = trainer, StoreIO(trainer, self._url, self._options)
        self._io.forget()
        if stage == "fit" and not trainer.fast_dev_run:
            # The first to begin: others go by their state at once.
            trainer.callbacks = [self, *(one for one in self._others(trainer) if one is not self), self._last]

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Give Lightning what the newest version holds of the fit. Optimizers and schedulers exist by now."""
        if trainer.world_size != 1:
            raise OptionError(
                f"CnrCheckpoint saves from one process, not {trainer.world_size}: give it devices=1 and num_nodes=1"
            )
        if self._resume and self._last in trainer.callbacks:
            with contextlib.suppress(EmptyStoreError):  # nothing was saved yet
                self._resume_by(trainer._checkpoint_connector, self._io.restored("latest"))

    def _resume_by(self, connector: Any, checkpoint: dict[str, Any]) -> None:
        if connector._loaded_checkpoint:
            raise OptionError(
                f"resume=True continues from step {checkpoint['global_step']} of {self._url}, and "
                f"{connector._ckpt_path or 'another CnrCheckpoint'} (of ckpt_path= or OnExceptionCheckpoint) from "
                "another state: leave one of them out"
            )
        connector._loaded_checkpoint = checkpoint
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()

    def _begin(self, trainer: Any, pl_module: LightningModule) -> None:
        """Make the checkpointer, and fill the model and the optimizers: callbacks may have changed both."""
        self._validated_step: int | None = None  # the newest whose validation logged the monitored metric
        self._rng_before_validation: dict[str, Any] | None = None
        self._is_end, self._io.remarks = False, {}
        loop = trainer.fit_loop
        for place, name, call in (
            (pl_module, "on_train_start", self._start_training),
            (loop.epoch_loop, "on_advance_end", self._end_batch),
            (pl_module, last_hook_of_validation(pl_module), self._end_validation),
            (loop, "on_advance_end", self._end_epoch),
            (pl_module, "on_train_end", self._end_training),
            (loop, "load_state_dict", self._position),
        ):
            self._behind.append(HookBehind(place, name, partial(self._call_behind, call, trainer)))
        self._loaded_rng = self._io.begin()  # until the first batch
        self._step_before_batch, self._saved_at = self._io.saved_step or 0, monotonic()

    def _call_behind(self, call: Callable[[Any], None], trainer: Any) -> None:
        """Call what comes behind a hook, but for fits within this one: of finders, or of another trainer."""
        now = trainer.lightning_module.trainer
        is_another = now is not trainer and now.state.status == "running"
        if self._last in trainer.callbacks and not is_another:
            call(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the step: a batch may take several, or none."""
        self._step_before_batch = trainer.global_step

    def _start_training(self, trainer: Any) -> None:
        """Check what is to be stored, and restore the random number generators: making the loaders drew from them."""
        for loader in trainer.fit_loop._combined_loader.flattened:
            if isinstance(loader, cnr_store.TrackedReader):
                raise OptionError(
                    "a TrackedReader counts a batch as trained once it is read, and Lightning takes batches ahead, so "
                    "a resumed fit would skip samples: give the trainer torchdata's StatefulDataLoader"
                )
        self._io.check()
        if self._io.version is not None:
            ours = self._io.checkpoint[REMARKS]
            self._io.metrics.restore(ours["metrics"])
            if ours.get("cut_off"):
                loop = trainer.fit_loop.epoch_loop
                self._behind.append(HookBehind(loop, "advance", partial(self._validate_first, loop)))
            if ours.get("averaged_by"):
                log.warning(
                    "version %s is the end of a fit, where %s put the average into the model: training continues from "
                    "the average, not from the weights that were trained",
                    *(self._io.version, ", ".join(ours["averaged_by"])),
                )
            if trainer.fit_loop.restarting:
                go_on_averaging(trainer)
        self._io.forget()
        if self._loaded_rng is not None:
            set_rng_state(self._loaded_rng)
            if not trainer.fit_loop.restarting:
                # Lightning then draws the order of the next epoch from these.
                trainer.fit_loop._resuming_from_checkpoint = False

    def _position(self, trainer: Any) -> None:
        position(trainer, bool(self._io.checkpoint.get(REMARKS, {}).get("cut_off")))

    def _validate_first(self, loop: Any) -> None:
        """Let a fit that resumes where a validation was cut off run it, whole. Lightning would leave it out."""
        if loop._skip_next_val:
            loop._skip_next_val = loop.val_loop.restarting = False
            self._step_before_batch = -1

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Note the random numbers before a validation: if a SIGTERM cuts it off, a resumed fit runs all of it."""
        loop = trainer.fit_loop
        self._io.validates = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        if self._io.validates and self._options.get("job", Job()).rng:
            self._rng_before_validation = rng_state()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What is saved from here on is behind the validation, or cut it off."""
        self._io.validates = False

    def _end_validation(self, trainer: Any) -> None:
        """Save what was validated, if it has the metric or a save is due. Lightning goes on behind it."""
        if trainer.sanity_checking:
            return
        if self._monitor in self._io.metrics.note():
            self._validated_step = trainer.global_step
        is_best = self._validated_step == trainer.global_step > self._step_before_batch
        if (is_best or self._is_due(trainer)) and not trainer.is_last_batch:
            self._save(trainer, again=is_best)

    def _end_batch(self, trainer: Any) -> None:
        """Save if due. After the last batch the save waits for the end of the epoch."""
        self._io.note_saved()
        self._io.metrics.note()  # also if nothing is saved: the next version is of other weights
        batches = trainer.fit_loop.total_batch_idx + 1
        if trainer.global_step == 0 and (batches == _BATCHES_TO_STEP or trainer.is_last_batch):
            self._io.tell(
                f"{batches} batches were trained without an optimizer step that Lightning counts, so nothing is saved "
                "before the end: with manual optimization, step the optimizers of self.optimizers()",
            )
        if self._is_due(trainer) and not trainer.is_last_batch:
            self._save(trainer)

    def _before_end_of_epoch(self, trainer: Any, pl_module: LightningModule) -> None:
        """Do what Lightning leaves out in an epoch in which a fit resumed, for want of metrics."""
        end_normalizing(trainer)
        if trainer.fit_loop.restarting and trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def _end_epoch(self, trainer: Any) -> None:
        """Save if due after the last batch, behind the step of schedulers that follow a metric."""
        is_best = self._monitor in self._io.metrics.note() or self._validated_step == trainer.global_step
        if is_best or self._is_due(trainer):
            self._save(trainer, again=is_best)

    def _end_training(self, trainer: Any) -> None:
        """Save the end of training, after waiting for the save before it.

        Averages are written in a way that torch does not count, so they are saved whole.
        """
        averages, has_hooks = bool(averaging(trainer)), ends_by_hooks(trainer)
        self._is_end, self._io.remarks = True, {"averaged_by": [one.state_key for one in averaging(trainer)]}
        # Hooks and averages may have made other weights than those that the metrics are of.
        is_other = averages or (has_hooks and self._io.saved_step == trainer.global_step)
        self._save(
            trainer,
            again=averages or has_hooks,
            overlap="wait",
            full=averages,
            with_metrics=bool(swapping(trainer)) or not is_other,
        )

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Wait for the save under way, and stop tracking."""
        if not self._saves():
            return
        if not self._is_end and (left := [one for one in averaging(trainer) if not normalizes(one)]):
            log.warning(
                "the fit was cut off between its last step and its end, and Lightning trains no more: %s will not put "
                "the average into the model",
                ", ".join(one.state_key for one in left),
            )
        self._close(trainer)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the end of training if a SIGTERM causes it, but nothing after an error, and wait for the save."""
        if trainer is not self._trainer:
            return
        try:
            if self._saves():
                self._io.checkpointer._saves.hurry()
                self._save_of_signal(trainer, exception)
        except CheckpointError as error:  # only logged: the exception that ends training is the one to raise
            log.error("the last save, of step %d, was not begun: %s", trainer.global_step, error)
        with contextlib.suppress(CheckpointError):  # logged when the save failed
            self._close(trainer)

    def _save_of_signal(self, trainer: Any, exception: BaseException) -> None:
        # Lightning acts on the signal between batches. A last batch without a step only accumulated gradients.
        if isinstance(exception, SIGTERMException) and trainer.global_step > self._step_before_batch:
            if trainer.validating:  # the resumed fit runs all of this validation
                self._io.remarks = {"cut_off": True}
                restore_trained(trainer, exception)
                if self._rng_before_validation is not None:
                    set_rng_state(self._rng_before_validation)
            self._save(trainer, again=True, overlap="wait")

    def _is_due(self, trainer: Any) -> bool:
        """Whether this batch reached or passed the next multiple of `every_n_steps`, or the minutes are over.

        A batch may take several steps, or none while it accumulates gradients, which are not saved.
        """
        step, every, seconds = trainer.global_step, self._every, self._every_seconds
        if step <= self._step_before_batch:
            return False
        is_late = seconds is not None and monotonic() - self._saved_at >= seconds
        return is_late or (every is not None and step // every > (self._io.saved_step or 0) // every)

    def _save(self, trainer: Any, again: bool = False, **how: Any) -> None:
        if not self._saves() or (trainer.global_step == self._io.saved_step and not again):
            return
        if self._monitor is not None and self._monitor not in trainer.callback_metrics:
            self._io.tell(
                f"step {trainer.global_step} is saved without the metric {self._monitor!r}, so it can't be one of the "
                "best, nor can those before the first validation that logs it: the module has logged "
                f"{', '.join(self._io.metrics.of_this_step()) or 'nothing'}",
            )
        if self._io.store(trainer._checkpoint_connector.dump_checkpoint(False), **how):
            self._saved_at = monotonic()

    def _saves(self) -> bool:
        return self._io is not None and self._io.checkpointer is not None

    def _others(self, trainer: Any) -> list[Callback]:
        return [callback for callback in trainer.callbacks if callback is not self._last]

    def _close(self, trainer: Any) -> None:
        trainer.callbacks = self._others(trainer)
        while self._behind:
            self._behind.pop().remove()
        self._io.close()
