"""A Lightning callback that saves checkpoints during `Trainer.fit` and resumes it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Literal

import torch

from cnr_store.catalog.catalog import Url
from cnr_store.errors import CheckpointError, EmptyStoreError, OptionError
from cnr_store.integrations import lightning_averages as averages
from cnr_store.integrations import lightning_metrics as logged
from cnr_store.integrations.lightning_hooks import HookBehind, LastHooks, last_hook_of_validation
from cnr_store.integrations.lightning_loaders import check_loaders, draw_again
from cnr_store.integrations.lightning_optimizers import LoadedOptimizers
from cnr_store.integrations.lightning_package import Callback, LightningModule, SIGTERMException, Trainer
from cnr_store.integrations.lightning_schedulers import scheduler_states
from cnr_store.integrations.lightning_state import (
    TrainerState,
    end_resumed_epoch,
    ends_by_hooks,
    forget_resumed,
    is_given,
    is_loaded_last,
)
from cnr_store.integrations.lightning_warnings import warn_of_no_steps
from cnr_store.integrations.metrics import figures
from cnr_store.integrations.saved_moment import SavedMoment
from cnr_store.maintenance.collection.rules import Rules
from cnr_store.policies.checks import integer, number
from cnr_store.training.checkpointer import Checkpointer
from cnr_store.training.model.arguments import Overlap
from cnr_store.training.model.rng_state import rng_state, set_rng_state
from cnr_store.training.saving.pending_save import PendingSave

log = logging.getLogger("cnr_store")


class CnrCheckpoint(Callback):
    """Saves the module in training, all its optimizers and schedulers, and the progress of `fit`.

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
        ``keep_best`` of `Checkpointer` does. Each validation, and each epoch, that logs it is followed by a save. Each
        version's metadata has the epoch, and all metrics of one number that the module has logged at its step.
    resume
        Whether `fit` continues from the newest version, if there is one, with the state of the other callbacks. Then
        give no `ckpt_path`.
    options
        Those of `Checkpointer`, such as ``policy``, ``bits`` and ``state``.

    Raises
    ------
    OptionError
        An option is out of range, or does not go with another; or, when `fit` starts, it has more than one process or
        a `TrackedReader` among its loaders.

    Notes
    -----
    The trainer's loggers get the figures of each save (``checkpoint/bytes``, ``checkpoint/seconds_stalled``, ...).
    """

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
        if save_top_k is not None:
            if monitor is None or "keep_best" in options:
                raise OptionError("save_top_k needs monitor=, which tells the best, and no keep_best=")
            options["keep_best"] = Rules(keep_best=(monitor, mode, save_top_k)).keep_best
        self._options = options
        if best := Rules(keep_best=options.get("keep_best")).keep_best:
            self._monitor = best[0]
        self._pending: PendingSave | None = None  # whose figures the loggers have not got yet
        self._saved_at = monotonic()
        self._checkpointer: Checkpointer | None = None
        self._saved_step: int | None = None  # the newest step saved or loaded
        self._moment: SavedMoment | None = None  # of that step, if the fit may end with it
        self._last = LastHooks(self._begin, self._end_epoch)
        self._behind: list[HookBehind] = []
        self._step_before_batch = 0
        self._waits_for_validation = self._monitor is not None
        self._validated_step: int | None = None  # the newest whose validation logged the monitored metric
        self._loaded_rng: dict[str, Any] | None = None  # until the first batch

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Let the hooks that save run behind those of all other callbacks, which may change what is saved."""
        if stage == "fit" and not trainer.fast_dev_run:
            trainer.callbacks = [*self._others(trainer), self._last]

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the checkpointer and resume. Optimizers and schedulers exist by now."""
        if trainer.world_size != 1:
            raise OptionError(
                f"CnrCheckpoint saves from one process, not {trainer.world_size}: give it devices=1 and num_nodes=1"
            )
        if self._saves_another(trainer):
            raise OptionError("this CnrCheckpoint saves a fit that still runs: give each trainer its own")
        self._trainer_state = TrainerState(trainer)
        self._metrics = logged.LoggedMetrics(trainer)
        state = {
            **(self._options.get("state") or {}),
            "lightning.precision": trainer.precision_plugin,
            **scheduler_states(trainer),
            # The last to load, because callbacks may change all others.
            "lightning.loops": self._trainer_state,
        }
        self._saved_step, self._saved_at = None, monotonic()
        self._has_hooks = ends_by_hooks(trainer)
        for name, call in (
            ("on_train_start", self._start_training),
            ("on_train_batch_end", self._end_batch),
            (last_hook_of_validation(pl_module), self._end_validation),
            ("on_train_end", self._end_training),
        ):
            self._behind.append(HookBehind(pl_module, name, partial(self._call_behind, call, trainer)))
        options = {**self._options, "state": state}
        self._checkpointer = Checkpointer(self._url, pl_module, trainer.optimizers, **options)
        if self._resume:
            own = rng_state()  # loaders are made from what the program has set, as at its first start
            with contextlib.suppress(EmptyStoreError):  # nothing was saved yet
                self._saved_step = self._checkpointer.load().step
                if is_given(trainer.ckpt_path):  # Lightning would load it over what was loaded
                    raise OptionError(
                        f"resume=True continues from step {self._saved_step} of {self._url}, and {trainer.ckpt_path} "
                        "(of ckpt_path= or OnExceptionCheckpoint) from another state: leave one of them out"
                    )
                self._loaded_rng = rng_state()
                set_rng_state(own)
                behind = partial(self._call_behind, LoadedOptimizers(trainer).restore, trainer)
                self._behind.append(HookBehind(pl_module, "on_fit_start", behind))
        self._step_before_batch = trainer.global_step

    def _call_behind(self, call: Callable[[Trainer], None], trainer: Any) -> None:
        """Call what comes behind a hook, but for fits within this one: of finders, or of another trainer."""
        now = trainer.lightning_module.trainer
        is_another = now is not trainer and now.state.status == "running"
        if self._last in trainer.callbacks and not is_another:
            call(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the loaders. They exist by now."""
        check_loaders(trainer.train_dataloader)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the step: a batch may take several, or none."""
        self._step_before_batch = trainer.global_step

    def _start_training(self, trainer: Trainer) -> None:
        """Restore the random number generators again, because making the loaders, and other things, drew from them.

        Where a validation follows the batch that was saved, Lightning makes its iterator later, but does not run it.
        """
        state, self._loaded_rng = self._loaded_rng, None
        if state is not None:
            averages.accumulate_as_scheduled(trainer)
            self._trainer_state.check_loaders()
            self._trainer_state.restore_metrics()
            self._metrics.note(is_of_now=False)
            if self._trainer_state.validates_first:
                self._behind.append(self._metrics.validation_first(self._trainer_state))
            if self._options.get("rng", True) and is_loaded_last(trainer, self._trainer_state):
                set_rng_state(state)
                draw_again(trainer, self._trainer_state.is_epoch_end)
                passing = trainer.fit_loop.epoch_loop.val_loop, "increment_progress_to_evaluation_end"
                self._behind.append(HookBehind(*passing, partial(set_rng_state, state)))

    def _end_batch(self, trainer: Trainer) -> None:
        """Save if due. After the last batch the save waits for the end of the epoch: `fit` can't resume in between.

        If a validation follows, from which the metric is awaited that tells the best, the save waits for it.
        """
        self._trainer_state.is_epoch_end = False
        self._log_figures(trainer)
        warn_of_no_steps(trainer)
        self._metrics.note_batch()  # also if nothing is saved: the next version is of other weights
        if self._trainer_state.holds_loops:  # no validation came behind the batch before
            self._trainer_state.release_loops()
            self._waits_for_validation = logged.goes_by_clock(trainer)
        may_wait = self._waits_for_validation and trainer.global_step > self._step_before_batch
        validates = may_wait and logged.will_validate(trainer)
        if self._is_due(trainer) and not trainer.is_last_batch and not validates:
            self._save(trainer, ends="step")
        if validates or (may_wait and logged.goes_by_clock(trainer) and not trainer.is_last_batch):
            self._trainer_state.hold_loops()

    def _end_validation(self, trainer: Trainer) -> None:
        """Save what was validated, if it has the metric or a save is due, with the loops as at the end of the batch."""
        if trainer.sanity_checking:
            return
        if self._monitor in self._metrics.note():
            self._validated_step = trainer.global_step
        if self._trainer_state.holds_loops:
            # Validation runs in inference mode, whose tensors training could not write.
            with torch.inference_mode(mode=False), torch.enable_grad():
                if self._validated_step == trainer.global_step:
                    self._saved_step = None  # if it is saved already, then without the metric
                    self._save(trainer, ends="step")
                elif self._is_due(trainer):
                    self._save(trainer, ends="step")
            self._trainer_state.release_loops()

    def _end_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if due after the last batch.

        At the end of an epoch in which `fit` resumed, Lightning does not step schedulers by a metric.
        """
        self._trainer_state.is_epoch_end = True
        end_resumed_epoch(trainer)
        is_logged = self._monitor in self._metrics.note() or self._validated_step == trainer.global_step
        if is_logged:
            self._saved_step = None  # if it is saved already, then without the metric
        if is_logged or self._is_due(trainer):
            self._save(trainer, ends=None if trainer.fit_loop.restarting else "epoch")

    def _end_training(self, trainer: Trainer) -> None:
        """Save the end of training, after waiting for the save before it.

        Averages are written in a way that torch does not count, so they are saved whole.
        """
        self._trainer_state.is_end = True
        self._save_last(trainer, full=bool(averages.averaging(trainer)))

    def _save_last(self, trainer: Trainer, full: bool = False) -> None:
        """Save, also a step that is saved already, unless nothing has changed since: any hook may change any state."""
        module, beside = trainer.lightning_module, self._trainer_state.beside_model
        was_saved = self._saved_step == trainer.global_step
        moment = None if full or self._has_hooks else self._moment
        if moment is None or not moment.is_still(module, beside()):
            self._saved_step = None
        # Hooks and averages may have made other weights than those that the metrics are of.
        is_same = moment is not None and moment.is_still_trained(module)
        is_other = (was_saved or full) and not is_same and not averages.validates_average(trainer)
        self._save(trainer, overlap="wait", full=full, with_metrics=not is_other)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the save under way, and stop tracking."""
        self._close(trainer)
        self._log_figures(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the end of training if a SIGTERM causes it, but nothing after an error, and wait for the save."""
        if self._saves_another(trainer):
            return
        if self._checkpointer is not None:
            self._checkpointer._saves.hurry()
        try:
            # Lightning acts on the signal between batches. A last batch without a step only accumulated gradients.
            is_ahead = trainer.global_step > self._step_before_batch and self._checkpointer is not None
            if isinstance(exception, SIGTERMException) and is_ahead:
                self._trainer_state.is_cut_off = self._metrics.is_cut_off()
                averages.restore_trained(trainer, exception)
                self._trainer_state.release_loops()
                self._save_last(trainer)
        except CheckpointError as error:  # only logged: the exception that ends training is the one to raise
            log.error("the last save, of step %d, was not begun: %s", trainer.global_step, error)
        with contextlib.suppress(CheckpointError):  # logged when the save failed
            self._close(trainer)

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether this batch reached or passed the next multiple of `every_n_steps`, or the minutes are over.

        A batch may take several steps, or none while it accumulates gradients, which are not saved.
        """
        step, every, seconds = trainer.global_step, self._every, self._every_seconds
        if step <= self._step_before_batch:
            return False
        is_late = seconds is not None and monotonic() - self._saved_at >= seconds
        return is_late or (every is not None and step // every > (self._saved_step or 0) // every)

    def _save(
        self,
        trainer: Trainer,
        overlap: Overlap | None = None,
        full: bool = False,
        ends: str | None = None,
        with_metrics: bool = True,
    ) -> None:
        step = trainer.global_step
        if self._checkpointer is None or step == self._saved_step:
            return
        self._trainer_state.ends = ends
        metrics = self._metrics.of_this_step() if with_metrics else {}
        if self._monitor is not None:
            self._metrics.warn_without(self._monitor)
        pending = self._checkpointer.save(
            step, metadata={**metrics, "epoch": trainer.current_epoch}, full=full, overlap=overlap
        )
        if not pending.skipped:
            self._log_figures(trainer)
            self._saved_step, self._saved_at, self._pending = step, monotonic(), pending
            module, beside = trainer.lightning_module, self._trainer_state.beside_model(saved=True)
            is_last = trainer.should_stop or 0 <= trainer.max_steps <= step
            may_end = is_last or self._trainer_state.is_epoch_end
            self._moment = SavedMoment(module, beside) if may_end else None

    def _log_figures(self, trainer: Trainer) -> None:
        """Hand the figures of the last save to the loggers once it is committed: they are for this thread alone."""
        pending = self._pending
        if pending is None or not pending.done():
            return
        self._pending = None
        for logger in trainer.loggers:
            logger.log_metrics(figures(pending), step=pending.step)

    def _saves_another(self, trainer: Any) -> bool:
        return self._checkpointer is not None and self._trainer_state.runs_beside(trainer)

    def _others(self, trainer: Any) -> list[Callback]:
        return [callback for callback in trainer.callbacks if callback is not self._last]

    def _close(self, trainer: Any) -> None:
        trainer.callbacks = self._others(trainer)
        forget_resumed(trainer)
        while self._behind:
            self._behind.pop().remove()
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()
