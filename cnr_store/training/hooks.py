"""Hooks on modules and optimizers that neither keep their owner alive nor travel with a copied model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Handle(Protocol):
    """What torch returns when a hook is registered."""

    def remove(self) -> None: ...


class _Hook:
    """Calls ``call(owner, *bound, *args)`` while the owner lives.

    Copies of a model are copied with its hooks (for averaging, say); theirs do nothing.
    """

    def __init__(self, owner: object, call: Callable[..., None], *bound: object) -> None:
        self._owner = weakref.ref(owner)
        self._call = call
        # Compiled code must leave here, rather than trace through kernels that it does not know.
        self._uncompiled: Callable[..., None] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
        self._bound = bound

    def __call__(self, *args: object) -> None:
        owner = self._owner()
        if owner is not None:
            call = self._uncompiled if torch.compiler.is_compiling() else self._call
            call(owner, *self._bound, *args)

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    def __call__(self, *_: object) -> None:
        return None


def hook_module(
    module: nn.Module,
    owner: object,
    before: Callable[..., None],
    after: Callable[..., None],
    loaded: Callable[..., None],
    *bound: object,
) -> list[Handle]:
    """Call `before`, `after` and `loaded` at lookups and after ``load_state_dict``.

    Each is a function of the owner, `bound`, and what torch passes to such hooks.
    """
    register_loaded: Callable[..., Handle] = module.register_load_state_dict_post_hook
    return [
        module.register_forward_pre_hook(_Hook(owner, before, *bound), with_kwargs=True),
        module.register_forward_hook(_Hook(owner, after, *bound), with_kwargs=True),
        register_loaded(_Hook(owner, loaded, *bound)),
    ]


def hook_steps(owner: object, before: Callable[..., None], after: Callable[..., None]) -> list[Handle]:
    """Call ``before(owner, optimizer, ...)`` and ``after(...)`` around every step of every optimizer."""
    return [
        register_optimizer_step_pre_hook(_Hook(owner, before)),
        register_optimizer_step_post_hook(_Hook(owner, after)),
    ]


def remove_all(handles: list[Handle]) -> None:
    """Take hooks off again."""
    for handle in handles:
        handle.remove()
