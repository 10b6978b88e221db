"""What a Lightning trainer keeps besides model and optimizers: its loops, and the state of its callbacks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from copy import deepcopy
from inspect import unwrap
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from cnr_store.errors import StateError, UnsupportedModelError
from cnr_store.format.state import encode_state
from cnr_store.format.state_arrays import ArrayLeaf, Leaf
from cnr_store.integrations.lightning_averages import averaging, go_on_averaging, resume_normalizing
from cnr_store.integrations.lightning_checkpoint import (
    MODEL,
    LoadedParts,
    WatchedCheckpoint,
    copied,
    lightning_parts,
)
from cnr_store.integrations.lightning_loaders import position_loaders, warn_of_moved_loaders
from cnr_store.integrations.lightning_package import KNOWN_MODULES, Callback, LightningModule, callbacks
from cnr_store.integrations.lightning_warnings import warn_of_early_hooks, warn_of_parts, warn_of_rest
from cnr_store.training.model.object_state import tensor_leaf
from cnr_store.training.model.rng_state import rng_state, set_rng_state
from cnr_store.training.model.tensors import check_has_values

log = logging.getLogger("cnr_store")

# Beside the loops, under names that no loop has.
_KEY, _PLATEAUS, _METRICS, _EPOCH_END, _STOPPED = "checkpoint", "plateaus", "metrics", "epoch_end", "stopped"
_CUT_OFF = "cut_off"
_PARTS = "states", "added", "in_model"  # what callbacks and hooks keep, in the order in which it is checked
_RESUMED: WeakKeyDictionary[Any, TrainerState] = WeakKeyDictionary()  # what was loaded last


class TrainerState:
    """The state of a trainer's loops, callbacks, datamodule and hooks, as Lightning's own checkpoints hold it.

    The hooks get what Lightning gives them. What the version holds anyway, such as the model, is not stored again.

    Parameters
    ----------
    trainer
        The trainer, with its model attached.

    Attributes
    ----------
    is_end
        Whether the end of `fit` is being saved.
    is_epoch_end
        Whether the loaders begin anew behind the save, or behind the version that was loaded.
    ends
        What has ended at the save, ``"step"`` or ``"epoch"``, with schedulers that Lightning steps by a metric only
        behind it. They are stepped when the state is loaded. None if no such step is to come.
    is_cut_off, validates_first
        Whether a SIGTERM cut off the validation behind the step that is saved, or behind that which was loaded.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._told: set[str] = set()
        self._known = len(trainer.lr_scheduler_configs)
        self._metrics: dict[str, float] = {}
        self._saved: dict[str, Any] = {}
        self._loops: dict[str, Any] | None = None
        self._loader_states: list[Any] = []
        self.is_end = self.is_epoch_end = self.is_cut_off = self.validates_first = False
        self.ends: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """The loops' state, and beside it that of all others."""
        self._warn_of_schedulers()
        loops = self._trainer.fit_loop.state_dict() if self._loops is None else self._loops
        metrics = {
            name: one.item() for name, one in self._trainer.callback_metrics.items() if one.numel() == 1
        }
        self._saved = self._checkpoint()
        own: dict[str, Any] = {
            _KEY: self._saved,
            _PLATEAUS: self._plateaus(self.ends),
            _METRICS: metrics,
        }
        own[_EPOCH_END], own[_STOPPED] = self.is_epoch_end, bool(self._trainer.should_stop)
        own[_CUT_OFF] = self.is_cut_off
        return {**loops, **own}

    def runs_beside(self, trainer: Any) -> bool:
        """Whether the state is another trainer's, which runs."""
        return self._trainer is not trainer and bool(self._trainer.state.status == "running")

    @property
    def holds_loops(self) -> bool:
        """Whether the loops' state is not that of now."""
        return self._loops is not None

    def hold_loops(self) -> None:
        """Take the loops' state of now for that of the next saves, in the middle of a validation or behind it."""
        self._loops = deepcopy(self._trainer.fit_loop.state_dict())

    def release_loops(self) -> None:
        """Take the loops' state at each save again."""
        self._loops = None

    def beside_model(self, saved: bool = False) -> dict[str, Any]:
        """The state of callbacks, hooks and schedulers: of now, or once what the last save has taken.

        Hooks are called for that of now, and may draw random numbers; that has no effect.
        """
        if saved and self._saved:
            checkpoint, self._saved = self._saved, {}
        else:
            with contextlib.ExitStack() as restoring:
                # A generator of numpy's that is of another class is not kept.
                with contextlib.suppress(UnsupportedModelError):
                    restoring.callback(set_rng_state, rng_state())
                checkpoint = self._checkpoint()
        schedulers = [config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs]
        return {**{name: checkpoint[name] for name in _PARTS}, "schedulers": schedulers}

    def check_loaders(self) -> None:
        """Warn if loaders do not go on where the version was saved, or may not. They exist by now."""
        warn_of_moved_loaders(self._trainer.fit_loop, self._loader_states)
        warn_of_parts(self._trainer)
        warn_of_early_hooks(self._trainer)

    def restore_metrics(self) -> None:
        """Give the trainer the metrics of the version, which may be asked for before new ones come."""
        self._trainer.callback_metrics.update(
            {name: torch.tensor(one) for name, one in self._metrics.items()}
        )

    def step_plateaus(self, ends: str) -> None:
        """Step the schedulers that go by a metric, as Lightning does at the end of a ``"step"`` or an ``"epoch"``."""
        self._step(self._plateaus(ends))

    def _step(self, plateaus: Iterable[tuple[int, float]]) -> None:
        configs = self._trainer.lr_scheduler_configs
        for number, metric in plateaus:
            if number < len(configs):
                self._trainer.lightning_module.lr_scheduler_step(configs[number].scheduler, metric)

    def _plateaus(self, ends: str | None) -> list[tuple[int, float]]:
        """The schedulers that go by a metric and are due at this end, by their number, with the metric."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        passed = {"step": loop.batch_idx + 1, "epoch": trainer.current_epoch + 1}
        all_batches = loop.batch_progress.current.ready >= trainer.num_training_batches
        if ends is None or (ends == "epoch" and not (trainer.is_last_batch or all_batches)):
            return []
        return [
            (number, float(trainer.callback_metrics[config.monitor]))
            for number, config in enumerate(trainer.lr_scheduler_configs)
            if config.reduce_on_plateau
            and config.interval == ends
            and passed[ends] % config.frequency == 0
            and config.monitor in trainer.callback_metrics
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give all of them their state, and log what can't go on."""
        loops = dict(state)
        stored, plateaus, self._metrics = (loops.pop(name) for name in (_KEY, _PLATEAUS, _METRICS))
        self.is_epoch_end = loops.pop(_EPOCH_END)
        was_stopped, self.validates_first = loops.pop(_STOPPED), loops.pop(_CUT_OFF)
        self._trainer.fit_loop.load_state_dict(loops)
        if was_stopped:
            log.warning(
                "the fit was told to stop, as EarlyStopping does; this one trains on until it is told again. If it "
                "should not, don't start it again, or set max_epochs"
            )
        if self.is_epoch_end:
            _begin_next_epoch(self._trainer.fit_loop)
        self._loader_states = position_loaders(self._trainer.fit_loop)
        _RESUMED[self._trainer] = self
        warn_of_rest(self._trainer, stored)
        self._load(stored)
        self._step(plateaus)

    def _checkpoint(self) -> dict[str, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        hooks = [one for one in trainer.callbacks if _overrides(one, "on_save_checkpoint", Callback)]
        has_hooks = bool(hooks) or _overrides(module, "on_save_checkpoint", LightningModule)
        held = lightning_parts(trainer) if has_hooks else {}
        states = {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())}
        datamodule: Any = getattr(trainer, "datamodule", None)
        own = {} if datamodule is None else {type(datamodule).__qualname__: datamodule.state_dict()}
        watched = WatchedCheckpoint(held)
        checkpoint = {**held, "callbacks": states, **{name: state for name, state in own.items() if state}}
        for callback in hooks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
        if has_hooks:
            module.on_save_checkpoint(checkpoint)
        states = checkpoint.pop("callbacks")
        changes = watched.changes(checkpoint)
        self._warn_of_lost(changes.lost)
        kept: list[dict[str, Any]] = []
        left_out: list[str] = []
        for what, values in (
            ("the state of the callback", states),
            ("what hooks put into the checkpoint as", changes.added),
            ("what hooks put into the model's state as", changes.in_model),
        ):
            left = set(self._unstorable(what, values))
            kept.append({name: value for name, value in values.items() if name not in left})
            left_out += sorted(left)
        return {
            **dict(zip(_PARTS, kept, strict=True)),
            "models": changes.models,
            "from_model": changes.from_model,
            "left_out": left_out,
            "averaged_by": [one.state_key for one in averaging(trainer)] if self.is_end else [],
        }

    def _warn_of_schedulers(self) -> None:
        if (now := len(self._trainer.lr_scheduler_configs)) > self._known:
            log.warning(
                "the trainer had %d schedulers when the fit started and has %d: the state of the others is not saved, "
                "so a resumed fit begins them anew",
                self._known,
                now,
            )
            self._known = now

    def _warn_of_lost(self, names: Iterable[str]) -> None:
        if new := sorted(set(names) - self._told):
            self._told.update(new)
            log.warning(
                "hooks have changed %s of the checkpoint in place, which is not saved: let on_save_checkpoint "
                "put what it needs under a key of its own",
                ", ".join(new),
            )

    def _unstorable(self, what: str, values: Mapping[str, Any]) -> Iterable[str]:
        """Which of them can't be stored without pickle. A warning names each once."""
        for name, value in values.items():
            try:
                encode_state(value, beside=lambda path, _: path, as_leaf=_leaf_without_values)
            except StateError as error:
                yield name
                if name not in self._told:
                    self._told.add(name)
                    log.warning(
                        "%s %s can't be stored, so a resumed fit starts it from the beginning: %s",
                        what,
                        name,
                        error,
                    )

    def _load(self, stored: Mapping[str, Any]) -> None:
        """Call what Lightning calls when it loads a checkpoint, in its order."""
        trainer, module = self._trainer, self._trainer.lightning_module
        states, added = stored["states"], stored["added"]
        hooks = [one for one in trainer.callbacks if _overrides(one, "on_load_checkpoint", Callback)]
        loads = _overrides(module, "on_load_checkpoint", LightningModule)
        held = copied(lightning_parts(trainer)) if hooks or loads else {}
        models = {name: held[MODEL] for name in stored["models"] if held}
        if held:
            held[MODEL].update(stored["in_model"])
            for name in stored["from_model"]:
                held[MODEL].pop(name, None)
        checkpoint = {**held, "callbacks": states, **models, **added}
        loaded = LoadedParts({name: value for name, value in held.items() if checkpoint[name] is value})
        datamodule: Any = getattr(trainer, "datamodule", None)
        if loads:
            module.on_load_checkpoint(checkpoint)
        if (name := type(datamodule).__qualname__) in added and name in checkpoint:
            datamodule.load_state_dict(checkpoint[name])
        for callback in hooks:
            callback.on_load_checkpoint(trainer, module, checkpoint)
        if changed := loaded.changed(checkpoint):
            log.warning(
                "on_load_checkpoint has changed %s in the checkpoint, which has no effect: module, optimizers, "
                "schedulers and loops are loaded already, so change them in on_train_start",
                ", ".join(changed),
            )
        for callback in trainer.callbacks:
            if callback.state_key in checkpoint["callbacks"]:
                state = checkpoint["callbacks"][callback.state_key]
                callback.load_state_dict(deepcopy(state) if held else state)  # hooks may have kept it
                if isinstance(callback, callbacks.StochasticWeightAveraging):
                    go_on_averaging(callback, trainer)


def _begin_next_epoch(loop: Any) -> None:
    """Begin behind an epoch that was processed.

    Lightning does so for trainers without `max_steps`. With them, it takes the epoch for one to restart, and then
    trains no batch of the next one.
    """
    epochs = loop.epoch_progress.current
    if epochs.ready == epochs.started == epochs.processed:
        loop._restarting = loop.epoch_loop.restarting = False


def end_resumed_epoch(trainer: Any) -> None:
    """Do once what Lightning leaves out at the end of an epoch in which a fit resumed from a version."""
    loaded = _RESUMED.pop(trainer, None)
    if loaded is not None and trainer.fit_loop.restarting:
        loaded.step_plateaus("epoch")
        resume_normalizing(trainer)


def is_loaded_last(trainer: Any, state: TrainerState) -> bool:
    """Whether no other callback has loaded a version since this one."""
    return _RESUMED.get(trainer) is state


def forget_resumed(trainer: Any) -> None:
    """Forget that a version was loaded: the fit has ended."""
    _RESUMED.pop(trainer, None)


def ends_by_hooks(trainer: Any) -> bool:
    """Whether code of the user's runs when training ends, which may change any state."""
    own = [one for one in trainer.callbacks if not type(one).__module__.startswith(KNOWN_MODULES)]
    return _overrides(trainer.lightning_module, "on_train_end", LightningModule) or any(
        _overrides(one, "on_train_end", Callback) for one in own
    )


def is_given(ckpt_path: Any) -> bool:
    """Whether the program gave `fit` this checkpoint: finders of Lightning go back to one of theirs, and remove it."""
    return ckpt_path is not None and not Path(ckpt_path).name.startswith((".lr_find_", ".scale_batch_size_"))


def _overrides(value: object, method: str, base: type) -> bool:
    own = unwrap(getattr(value, method))  # of a call behind it
    return getattr(own, "__func__", None) is not getattr(base, method)


def _leaf_without_values(value: object) -> Leaf | None:
    """What `tensor_leaf` returns, without the values of tensors and arrays, which the save itself copies."""
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, nn.Parameter):
        check_has_values(value)
        return ArrayLeaf(np.zeros(0))
    return ArrayLeaf(np.zeros(0, value.dtype)) if type(value) is np.ndarray else tensor_leaf(value)
