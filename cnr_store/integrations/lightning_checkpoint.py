"""What hooks do to a checkpoint of Lightning's: what they add, and what they change of the parts that it has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from cnr_store.integrations.lightning_package import Callback

MODEL = "state_dict"
"""What Lightning calls the model's state in its checkpoints."""

_LARGE = frozenset({"optimizer_states"})
_LOADED = MODEL, "optimizer_states", "lr_schedulers", "loops"


def lightning_parts(trainer: Any) -> dict[str, Any]:
    """What hooks find in Lightning's checkpoints, and a version holds besides."""
    module, datamodule = trainer.lightning_module, getattr(trainer, "datamodule", None)
    options = {
        one.CHECKPOINT_HYPER_PARAMS_KEY: dict(one.hparams)
        for one in (module, datamodule)
        if one is not None and one.hparams
    }
    return {
        **options,
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": sys.modules[Callback.__module__.split(".callbacks")[0]].__version__,
        MODEL: module.state_dict(),
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "optimizer_states": [one.state_dict() for one in trainer.optimizers],
        "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
    }


class Changes(NamedTuple):
    """What hooks have done.

    Attributes
    ----------
    added
        The parts that they put into the checkpoint, also in the place of Lightning's, and small parts of Lightning's
        that they have changed in place.
    models
        The names of parts that are the model's state itself.
    in_model, from_model
        What they have put into the model's state in place, and the names that they have removed from it.
    lost
        Names of large parts, but the model's state, in which they have changed something in place.
    """

    added: dict[str, Any]
    models: list[str]
    in_model: dict[str, Any]
    from_model: list[str]
    lost: list[str]


class WatchedCheckpoint:
    """Lightning's parts of a checkpoint, before hooks get it.

    Parameters
    ----------
    held
        The parts by name.
    """

    def __init__(self, held: Mapping[str, Any]) -> None:
        self._held = dict(held)
        self._outlines = {
            name: dict(value) if name == MODEL else _outline(value) for name, value in held.items()
        }

    def changes(self, checkpoint: Mapping[str, Any]) -> Changes:
        """Compare with what hooks have left."""
        if not self._held:
            return Changes(dict(checkpoint), [], {}, [], [])
        model, before = self._held[MODEL], self._outlines[MODEL]
        models = [name for name, value in checkpoint.items() if value is model]
        held = {name for name, value in self._held.items() if checkpoint.get(name) is value and name != MODEL}
        changed = {name for name in held if not _is_same(self._outlines[name], _outline(self._held[name]))}
        own = held - changed | held & _LARGE
        return Changes(
            {name: value for name, value in checkpoint.items() if name not in models and name not in own},
            models,
            {name: value for name, value in model.items() if name not in before or before[name] is not value},
            [name for name in before if name not in model],
            sorted(changed & _LARGE),
        )


class LoadedParts:
    """Copies of what is loaded already when hooks get them: what these change in them has no effect.

    Parameters
    ----------
    held
        The parts by name.
    """

    def __init__(self, held: Mapping[str, Any]) -> None:
        self._values = {name: held[name] for name in _LOADED if name in held}
        self._outlines = {name: _outline(value) for name, value in self._values.items()}

    def changed(self, checkpoint: Mapping[str, Any]) -> list[str]:
        """Names of parts, and in the model's state of values, that hooks have changed. They may remove values there."""
        found = []
        for name, before in self._outlines.items():
            now = checkpoint.get(name)
            if name == MODEL and isinstance(now, dict):
                left = {key: value for key, value in before.items() if key in now}
                found += [key for key, value in left.items() if not _is_same(value, _outline(now[key]))]
            elif now is not self._values[name] or not _is_same(before, _outline(now)):
                found.append(name)
        return found


def copied(value: Any) -> Any:
    """The same with tensors of their own, as Lightning loads them: hooks may keep and change them."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def version_of(value: Any) -> int:
    """How often torch has counted a change of a tensor. Those made in inference mode have no count."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _outline(value: Any) -> Any:
    """A copy of what holds others, with the same leaves, and of tensors with their versions."""
    if isinstance(value, dict):
        return {key: _outline(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_outline(item) for item in value]
    return _Leaf(value, version_of(value))


class _Leaf(NamedTuple):
    value: Any
    version: int


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, _Leaf) and isinstance(other, _Leaf):
        return one.value is other.value and one.version == other.version
    return False
