"""Loads an optimizer's state in the element types that it had.

torch casts the state of floating-point parameters to the parameters' type while it loads it, on the assumption that the
types match. But the moments of a bfloat16 table may be float32, and counts integers.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer


def load_uncast(optimizer: Optimizer, state_dict: dict[str, Any], converted: Collection[int]) -> None:
    """Do what ``optimizer.load_state_dict`` does, without the cast.

    A class with a ``load_state_dict`` of its own decides about types itself.

    Parameters
    ----------
    state_dict
        As torch takes it, with parameters' numbers as keys.
    converted
        Numbers of parameters of another type than the one that was saved. Their state is cast as they were, except for
        tensors that are the optimizer's own already.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict(state_dict)
        return
    own = {
        id(value)
        for values in optimizer.state.values()
        if isinstance(values, Mapping)
        for value in values.values()
    }
    with warnings.catch_warnings():
        # torch warns of casts that are undone below.
        warnings.filterwarnings("ignore", "Casting complex values to real", UserWarning)
        optimizer.load_state_dict(state_dict)
    parameters = dict(enumerate(one for group in optimizer.param_groups for one in group["params"]))
    for number, given in state_dict["state"].items():
        if number not in parameters:  # state of no parameter is taken as it is
            continue
        now = optimizer.state[parameters[number]]
        for key in given.keys() & now.keys() - {"step"}:  # kernels need the type that torch gives steps
            if number not in converted or id(given[key]) in own:
                now[key] = _uncast(given[key], now[key], parameters[number].dtype)


def _uncast(given: Any, now: Any, cast_to: torch.dtype) -> Any:
    """`now`, with what torch has cast replaced by what was given; any other change was made by a hook."""
    if isinstance(given, torch.Tensor) and isinstance(now, torch.Tensor):
        was_cast = given.dtype != now.dtype == cast_to and given.shape == now.shape
        return given.to(now.device) if was_cast else now
    if isinstance(given, str):  # of which torch makes a list of characters
        return given
    if isinstance(given, dict) and isinstance(now, dict) and given.keys() == now.keys():
        return {key: _uncast(given[key], now[key], cast_to) for key in now}
    if type(given) is type(now) and type(now) in (list, tuple) and len(given) == len(now):
        return type(now)(_uncast(one, other, cast_to) for one, other in zip(given, now, strict=True))
    return now
