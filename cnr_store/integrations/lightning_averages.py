"""Callbacks of Lightning that average weights, or set what a resumed epoch needs."""

from __future__ import annotations

from typing import Any

from cnr_store.integrations.lightning_package import callbacks

_RESTORED = "_cnr_store_restored_trained"


def averaging(trainer: Any) -> list[Any]:
    """The callbacks that have put an average into the model, when training has ended."""
    others = [
        one
        for one in _of_kind(trainer, "StochasticWeightAveraging")
        if one._max_epochs == -1 or trainer.current_epoch > one.swa_end
    ]
    return [*_swapping(trainer), *others]


def validates_average(trainer: Any) -> bool:
    """Whether validation runs with the average that the model gets when training has ended."""
    return bool(_swapping(trainer))


def restore_trained(trainer: Any, exception: Any) -> None:
    """Give the model its trained weights again, if validation was broken off while the average was in their place.

    Once an exception: each callback that saves gets it, and a second swap would bring the average back.
    """
    if trainer.validating and not getattr(exception, _RESTORED, False):
        setattr(exception, _RESTORED, True)
        for callback in _swapping(trainer):
            callback.on_validation_epoch_end(trainer, trainer.lightning_module)


def accumulate_as_scheduled(trainer: Any) -> None:
    """Set what `GradientAccumulationScheduler` sets when an epoch starts, for the rest of one that is resumed."""
    for callback in _of_kind(trainer, "GradientAccumulationScheduler"):
        trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


def resume_normalizing(trainer: Any) -> None:
    """Let the last epoch of `StochasticWeightAveraging`, which only normalizes batches, end also if it was resumed.

    Lightning notes when that epoch starts what it resets at the end of training.
    """
    for callback in _of_kind(trainer, "StochasticWeightAveraging"):
        is_last = normalizes(callback) and trainer.current_epoch > callback.swa_end
        if is_last and not hasattr(callback, "_accumulate_grad_batches"):
            callback._accumulate_grad_batches = trainer.accumulate_grad_batches
            trainer.fit_loop.max_batches += 1


def normalizes(callback: Any) -> bool:
    """Whether the average is put into the model when another epoch starts, for batch normalization."""
    is_stochastic = isinstance(callback, callbacks.StochasticWeightAveraging)
    return is_stochastic and bool(callback._model_contains_batch_norm) and callback._max_epochs != -1


def _swapping(trainer: Any) -> list[Any]:
    return _of_kind(trainer, "WeightAveraging")


def _of_kind(trainer: Any, name: str) -> list[Any]:
    kind = getattr(callbacks, name, None)  # Lightning 2.4 has no WeightAveraging
    return [] if kind is None else [one for one in trainer.callbacks if isinstance(one, kind)]


def go_on_averaging(callback: Any, trainer: Any) -> None:
    """Make the scheduler of `StochasticWeightAveraging`.

    Lightning makes it when an epoch starts, too late for the rest of this one, and lets it move the learning rates,
    which the optimizers were given already.
    """
    if (
        callback._scheduler_state is None
        or not callback.swa_start <= trainer.current_epoch <= callback.swa_end
    ):
        return
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    settings = [dict(group) for group in groups]
    callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, loaded in zip(groups, settings, strict=True):
        group.update(loaded)
