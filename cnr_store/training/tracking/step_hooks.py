"""Hooks on modules and optimizers that neither keep a tracker alive nor travel with a copied model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Handle(Protocol):
    """What torch returns when a hook is registered."""

    def remove(self) -> None: ...


class Local:
    """A hook of one module alone: copies of a model are copied with hooks (for averaging, say); theirs do nothing."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    def __call__(self, *_: object) -> None:
        return None


class StepWatcher(Protocol):
    """Who is told of steps."""

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...


_watchers: weakref.WeakSet[StepWatcher] = weakref.WeakSet()


def watch_steps(watcher: StepWatcher) -> None:
    """Tell `watcher` of every step of every optimizer, for as long as it lives or until `unwatch_steps`."""
    _hook_steps()
    _watchers.add(watcher)


def unwatch_steps(watcher: StepWatcher) -> None:
    """Tell it no more."""
    _watchers.discard(watcher)


@functools.cache
def _hook_steps() -> None:
    # Once and for good: torch fails if these hooks come or go while it calls them, and a watcher may be collected
    # at any time.
    register_optimizer_step_pre_hook(_before_step)


def _lead(optimizer: Optimizer) -> None:
    """Have `_after_step` called right after the update: hooks of others may raise, or change gradients.

    So at each step it is the first of the optimizer's own hooks, which torch calls ahead of those of all optimizers.
    """
    hooks = optimizer._optimizer_step_post_hooks
    if next(iter(hooks.values()), None) is not _after_step:
        others = {key: hook for key, hook in hooks.items() if hook is not _after_step}
        hooks.clear()
        optimizer.register_step_post_hook(_after_step)
        hooks.update(others)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    call = _tell_before_uncompiled if torch.compiler.is_compiling() else _tell_before
    call(optimizer)


def _after_step(optimizer: Optimizer, *_: object) -> None:
    call = _tell_after_uncompiled if torch.compiler.is_compiling() else _tell_after
    call(optimizer)


def _tell_before(optimizer: Optimizer) -> None:
    watchers = list(_watchers)
    if watchers:
        _lead(optimizer)
    for watcher in watchers:
        watcher.before_step(optimizer)


def _tell_after(optimizer: Optimizer) -> None:
    for watcher in list(_watchers):
        watcher.after_step(optimizer)


# Compiled code must leave here, rather than trace through kernels that it does not know.
_tell_before_uncompiled: Callable[..., None] = torch.compiler.disable(_tell_before)  # type: ignore[no-untyped-call]
_tell_after_uncompiled: Callable[..., None] = torch.compiler.disable(_tell_after)  # type: ignore[no-untyped-call]


def remove_all(handles: list[Handle]) -> None:
    """Take hooks off again."""
    for handle in handles:
        handle.remove()
