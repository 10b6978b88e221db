"""Calls behind hooks: of a LightningModule, which Lightning runs after those of all callbacks, and of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from inspect import unwrap
from typing import Any

from cnr_store.integrations.lightning_package import Callback, LightningModule, Trainer, callbacks

_KNOWN_MODULES = ("lightning.", "pytorch_lightning.", "cnr_store.")
"""How the names of modules begin whose callbacks are not the user's own."""

_RESTORED = "_cnr_store_restored_trained"
_Call = Callable[[Trainer, LightningModule], None]


class LastHooks(callbacks.Checkpoint):
    """A callback behind all others: Lightning runs a `Checkpoint` behind those that monitor metrics, too.

    `CnrCheckpoint` itself is none, because a trainer with ``enable_checkpointing=False`` refuses it.

    Parameters
    ----------
    on_fit_start, on_train_epoch_end
        Called as these hooks.
    """

    def __init__(self, on_fit_start: _Call, on_train_epoch_end: _Call) -> None:
        # In place of the class's own: Lightning asks for hooks by name.
        vars(self).update(on_fit_start=on_fit_start, on_train_epoch_end=on_train_epoch_end)


def last_hook_of_validation(module: LightningModule) -> str:
    """The last hook of a module that Lightning calls in a validation. It calls that of the mode only if it is there."""
    own = "on_validation_model_train"
    return own if getattr(type(module), own) is not getattr(LightningModule, own) else "on_validation_end"


def ends_by_hooks(trainer: Any) -> bool:
    """Whether code of the user's runs when training ends, which may change any state."""
    own = [one for one in trainer.callbacks if not type(one).__module__.startswith(_KNOWN_MODULES)]
    return _overrides_end(trainer.lightning_module, LightningModule) or any(
        _overrides_end(one, Callback) for one in own
    )


def _overrides_end(value: Any, base: Any) -> bool:
    return getattr(unwrap(value.on_train_end), "__func__", None) is not base.on_train_end


def swapping(trainer: Any) -> list[Any]:
    """The callbacks that put an average in the place of the weights in validations, and when training has ended."""
    return _of_kind(trainer, "WeightAveraging")


def averaging(trainer: Any) -> list[Any]:
    """The callbacks that have put an average into the model, when training has ended."""
    others = [
        one
        for one in _of_kind(trainer, "StochasticWeightAveraging")
        if one._max_epochs == -1 or trainer.current_epoch > one.swa_end
    ]
    return [*swapping(trainer), *others]


def normalizes(callback: Any) -> bool:
    """Whether the average is put into the model when another epoch starts, for batch normalization."""
    is_stochastic = isinstance(callback, callbacks.StochasticWeightAveraging)
    return is_stochastic and bool(callback._model_contains_batch_norm) and callback._max_epochs != -1


def go_on_averaging(trainer: Any) -> None:
    """Make the scheduler of `StochasticWeightAveraging` in an epoch that is resumed.

    Lightning makes it when an epoch starts, and lets it move the learning rates, which optimizers were given already.
    """
    for one in _of_kind(trainer, "StochasticWeightAveraging"):
        if one._scheduler_state is not None and one.swa_start <= trainer.current_epoch <= one.swa_end:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            settings = [dict(group) for group in groups]
            one.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, loaded in zip(groups, settings, strict=True):
                group.update(loaded)


def end_normalizing(trainer: Any) -> None:
    """Let the last epoch of `StochasticWeightAveraging`, which only normalizes batches, end also if it was resumed.

    Lightning notes when that epoch starts what it resets at the end of training.
    """
    for one in _of_kind(trainer, "StochasticWeightAveraging"):
        is_last = normalizes(one) and trainer.current_epoch > one.swa_end
        if is_last and not hasattr(one, "_accumulate_grad_batches"):
            one._accumulate_grad_batches = trainer.accumulate_grad_batches
            trainer.fit_loop.max_batches += 1


def restore_trained(trainer: Any, exception: Any) -> None:
    """Give the model its trained weights again, if a validation was broken off with the average in their place.

    Once an exception: each callback that saves gets it, and a second swap would bring the average back.
    """
    if not getattr(exception, _RESTORED, False):
        setattr(exception, _RESTORED, True)
        for one in swapping(trainer):
            one.on_validation_epoch_end(trainer, trainer.lightning_module)


def position(trainer: Any, is_cut_off: bool) -> None:
    """Let a fit loop go on where its state, which was just loaded, says, where Lightning would not.

    `is_cut_off`: whether it begins with the validation behind its last batch.
    """
    loop = trainer.fit_loop
    batches = loop.epoch_loop.batch_progress
    # Saved in the last hook of a batch. Of an epoch's last one Lightning would begin the next epoch at once, in which a
    # loader that keeps its state has no batch left.
    if (is_cut_off or batches.is_last_batch) and batches.total.completed < batches.total.processed:
        batches.increment_completed()
    epochs = loop.epoch_progress.current
    if epochs.ready == epochs.started == epochs.processed:  # with `max_steps`, this epoch would restart
        loop._restarting = loop.epoch_loop.restarting = False
    # `estimated_stepping_batches` and finders make loaders before their state is known.
    is_made = loop._combined_loader is not None and not loop._should_reload_train_dl
    if loop.restarting and is_made and loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)


def _of_kind(trainer: Any, name: str) -> list[Any]:
    kind = getattr(callbacks, name, None)  # Lightning 2.4 has no WeightAveraging
    return [] if kind is None else [one for one in trainer.callbacks if isinstance(one, kind)]


class HookBehind:
    """Takes the place of a module's hook: runs it, and then calls `after`.

    Parameters
    ----------
    module, name
        The hook is this attribute of the module.
    after
        Called without arguments. If the hook raises, it is not called.
    """

    def __init__(self, module: Any, name: str, after: Callable[[], None]) -> None:
        self._module, self._name, self._after = module, name, after
        self._own = vars(module).get(name)  # a hook that is not the class's
        self._hook = getattr(module, name)
        update_wrapper(self, self._hook, updated=())
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._hook(*args, **kwargs)
        self._after()
        return result

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        # A copy of the module, made in training by others, has the hook of its class.
        return getattr, (self._module, self._name)

    def remove(self) -> None:
        """Give the module its hook back, and call nothing any more where another one took this one's place."""
        self._after = lambda: None
        if vars(self._module).get(self._name) is not self:
            return
        delattr(self._module, self._name)
        if self._own is not None:
            setattr(self._module, self._name, self._own)
