"""Hooks around the steps of all optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cnr_store.training.distributed.torchrec_door import torchrec

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Hook = Callable[[Optimizer, Args, Kwargs], None]


def outside_graphs(function: Hook) -> Hook:
    """Have compiled code break its graph to call `function`, which the compiler can't trace through."""
    uncompiled: Hook = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
        # Eager code is spared torch's wrapper, which takes longer than a small table's hook.
        (uncompiled if torch.compiler.is_compiling() else function)(optimizer, args, kwargs)

    return call


class StepListener(Protocol):
    """Is called around each step."""

    def before_step(self, optimizer: Optimizer, has_closure: bool = False) -> None:
        """Called before the step's own hooks and its update. A closure may make gradients within the step."""

    def after_step(self, optimizer: Optimizer, has_closure: bool = False) -> None:
        """Called right after the update."""


_listeners: weakref.WeakSet[StepListener] = weakref.WeakSet()


def add_step_listener(listener: StepListener) -> None:
    """Call `listener` around every step of every optimizer, while it lives and until `remove_step_listener`."""
    _hook_steps()
    _listeners.add(listener)


def remove_step_listener(listener: StepListener) -> None:
    """Call `listener` no more."""
    _listeners.discard(listener)


@functools.cache
def _hook_steps() -> None:
    # Once and for good: torch fails if these hooks are added or removed while it calls them, and a listener may be
    # collected at any time.
    register_optimizer_step_pre_hook(_before_step)


@outside_graphs
def _before_step(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    door = torchrec()
    listeners = [] if door is not None and door.passes_steps_on(optimizer) else list(_listeners)
    if listeners:
        _put_after_step_first(optimizer)
    for listener in listeners:
        listener.before_step(optimizer, _has_closure(optimizer, args, kwargs))


@outside_graphs
def _after_step(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    for listener in list(_listeners):
        listener.after_step(optimizer, _has_closure(optimizer, args, kwargs))


def _has_closure(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> bool:
    """Whether a step was given something to call: torch counts the optimizer itself among its arguments."""
    return any(callable(each) and each is not optimizer for each in (*args, *kwargs.values()))


def _put_after_step_first(optimizer: Optimizer) -> None:
    """Have `_after_step` called right after the update, because hooks of others may raise or change gradients.

    It becomes the first of the optimizer's own hooks, which torch calls before those of all optimizers. Another hook
    may be put first at any time, so each step looks again.
    """
    hooks = optimizer._optimizer_step_post_hooks
    if next(iter(hooks.values()), None) is not _after_step:
        others = {key: hook for key, hook in hooks.items() if hook is not _after_step}
        hooks.clear()
        optimizer.register_step_post_hook(_after_step)
        hooks.update(others)
