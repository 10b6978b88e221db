"""Checks of what callers pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from torch import nn

from cnr_store.errors import OptionError, UnsupportedModelError
from cnr_store.format.validate import MOST

Overlap = Literal["wait", "skip"]
IGNORE = 'load(strict="ignore"), which loads'
"""How messages offer it; what it loads follows."""
Called = TypeVar("Called", bound=Callable[..., object])


def check_overlap(overlap: object) -> Overlap:
    """What a save does while another is being written."""
    if overlap not in get_args(Overlap):
        raise OptionError(f"overlap={overlap!r}: give {' or '.join(map(repr, get_args(Overlap)))}")
    return overlap  # type: ignore[return-value]  # just proven


def callback(name: str, function: Called | None) -> Called | None:
    """Something to call, or None."""
    if function is not None and not callable(function):
        raise OptionError(f"{name}={function!r}: give a function")
    return function


def count(name: str, value: object, least: int) -> int:
    """An integer of at least `least` that a commit record can hold."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= MOST:
        hint = f", as with {name}.item()" if getattr(value, "ndim", None) == 0 else ""
        raise OptionError(f"{name}={value!r}: give an integer of at least {least} and at most 2**62{hint}")
    return int(value)


def module(model: object) -> nn.Module:
    """A model that torch knows as one."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"the model is of type {type(model).__name__}; give a torch.nn.Module")
    return model


def stateful(objects: object) -> dict[str, Any]:
    """Objects with a state, by name."""
    if not isinstance(objects, Mapping):
        raise OptionError(
            f"state is of type {type(objects).__name__}; give {{name: object with a state_dict}}"
        )
    for name, value in objects.items():
        if not isinstance(name, str):
            raise OptionError(f"state: the name {name!r} is of type {type(name).__name__}; give a string")
        if isinstance(value, type):
            raise OptionError(f"state {name!r}: {value.__qualname__} is a class; give an object of it")
        if not (
            callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
        ):
            raise OptionError(
                f"state {name!r}: an object of type {type(value).__name__} has no state_dict and load_state_dict"
            )
    return {str(name): value for name, value in objects.items()}
