"""Loads an optimizer's state in the element types and classes that it had.

torch casts the state of floating-point parameters to the parameters' type while it loads it, on the assumption that the
types match. But the moments of a bfloat16 table may be float32, and counts integers. It makes all else that has items
anew from a generator of them: queues lose their length by it, and arrays can't be made so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer


def load_uncast(optimizer: Optimizer, state_dict: dict[str, Any], converted: Collection[int]) -> None:
    """Do what ``optimizer.load_state_dict`` does, without the cast.

    A class with a ``load_state_dict`` of its own decides about types itself.

    `state_dict`: as torch takes it, with parameters' numbers as keys.
    `converted`: numbers of parameters of another type than the one that was saved. Their state is cast as they were,
    except for tensors that are the optimizer's own already.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict(state_dict)
        return
    kept = (values for values in optimizer.state.values() if isinstance(values, Mapping))
    own = {id(value) for values in kept for value in values.values()}
    given: dict[int, Mapping[Any, Any]] = {}

    def take(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        numbers = {number for group in loaded["param_groups"] for number in group["params"]}
        given.update({number: values for number, values in loaded["state"].items() if number in numbers})
        rest = {key: value for key, value in loaded["state"].items() if key not in numbers}
        return {**loaded, "state": rest}

    def put(_: Optimizer) -> None:
        trained = [(one, group) for group in optimizer.param_groups for one in group["params"]]
        for number, values in given.items():
            parameter, group = trained[number]
            cast = parameter.dtype if number in converted else None
            optimizer.state[parameter] = {
                key: _moved(value, key, parameter.device, group, None if id(value) in own else cast)
                for key, value in values.items()
            }
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    # Within the hooks of others, which see what was stored, and what is loaded.
    hooks = [
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(put, prepend=True),
    ]
    try:
        optimizer.load_state_dict(state_dict)
    finally:
        for hook in hooks:
            hook.remove()


def _moved(
    value: Any, key: Any, device: torch.device, group: Mapping[str, Any], cast: torch.dtype | None
) -> Any:
    """State with its tensors on a device, and floating-point ones cast; but steps only as kernels need them."""
    if isinstance(value, torch.Tensor):
        if key == "step":
            if not (group.get("capturable") or group.get("fused")):
                return value
            cast = torch.float32 if group.get("fused") else None
        return value.to(device, cast if value.is_floating_point() else None)
    if isinstance(value, dict):
        return type(value)({name: _moved(one, name, device, group, cast) for name, one in value.items()})
    if isinstance(value, list | tuple | deque):
        items = [_moved(one, None, device, group, cast) for one in value]
        kind = type(value)
        return deque(items, value.maxlen) if isinstance(value, deque) else getattr(kind, "_make", kind)(items)
    return value
