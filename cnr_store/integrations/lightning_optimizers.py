"""What Lightning loads behind a module's `on_fit_start`, where a version is loaded before it."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch

from cnr_store.integrations.lightning_checkpoint import version_of
from cnr_store.integrations.lightning_schedulers import scheduler_states

log = logging.getLogger("cnr_store")

_NEWEST: WeakKeyDictionary[Any, LoadedOptimizers] = WeakKeyDictionary()  # what was loaded last


class LoadedOptimizers:
    """The settings of a trainer's optimizers and its schedulers, as a version has brought them back.

    The module's `on_fit_start` finds the module loaded, and its optimizers too. With Lightning's own checkpoints, what
    it sets in these has no effect, because Lightning loads them later.

    Parameters
    ----------
    trainer
        The trainer behind the load.
    """

    def __init__(self, trainer: Any) -> None:
        _NEWEST[trainer] = self
        self._settings = [[_settings(group) for group in one.param_groups] for one in trainer.optimizers]
        self._schedulers = [(one, deepcopy(one.state_dict())) for one in scheduler_states(trainer).values()]
        self._marks = _marks(trainer)

    @torch.no_grad()
    def restore(self, trainer: Any) -> None:
        """Set them again, and warn of changes of the optimizers' state, which stay. Nothing, if others came behind."""
        if _NEWEST.get(trainer) is not self:
            return
        del _NEWEST[trainer]  # which is held from here, too
        # Not strict: the hook may have added optimizers and groups, which the version does not hold.
        for optimizer, groups in zip(trainer.optimizers, self._settings, strict=False):
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                group.update(_with_tensors_of(group, settings))
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(state)
        if _marks(trainer) != self._marks:
            log.warning(
                "on_fit_start has changed the state of an optimizer, which was loaded already: the fit continues with "
                "the changed state, and with Lightning's own checkpoints it would not"
            )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}


def _with_tensors_of(group: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings; where the group has a tensor of the same shape, that one, with the value of the setting."""
    found = dict(settings)
    for name, value in settings.items():
        own = group.get(name)
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and own.shape == value.shape:
            found[name] = own.copy_(value)
    return found


def _marks(trainer: Any) -> list[Any]:
    """What changes if the state of an optimizer does."""
    return [
        (id(parameter), name, id(value), version_of(value))
        for optimizer in trainer.optimizers
        for parameter, state in optimizer.state.items()
        for name, value in (state.items() if isinstance(state, dict) else ())
    ]
