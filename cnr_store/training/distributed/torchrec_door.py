"""The door to what knows TorchRec, which is imported once a program has imported TorchRec, and never for another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from cnr_store.training.distributed.sharded import ShardedModule

Mark: TypeAlias = Callable[[str, int, torch.Tensor], None]
"""Gets a table's name, the first row of the local shard, and rows of that shard: int64, none or many, in any order."""


class LookupHooks(Protocol):
    """The hooks on the lookups of one module."""

    sharded: ShardedModule

    def check(self) -> str | None: ...

    def remove(self) -> None: ...


def find_sharded(model: nn.Module) -> list[ShardedModule]:
    """The modules of a model whose tables TorchRec shards, with their live memory."""
    return list(_torchrec().find_sharded(model)) if _is_used() else []


def take_fused(optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], int | None]:
    """The optimizers that step, and where among those given the first stood that changes rows in the backward pass."""
    if not _is_used():
        return list(optimizers), None
    stepping, position = _torchrec().take_fused(optimizers)
    return stepping, position


def passes_steps_on(optimizer: object) -> bool:
    """Whether steps of an optimizer are those of others, which are seen themselves, or change nothing."""
    return _is_used() and bool(_torchrec().passes_steps_on(optimizer))


def follow_inner(optimizers: Sequence[Any]) -> None:
    """Have TorchRec's wrappers show the state and the groups of what they wrap, after these were replaced by a load."""
    if _is_used():
        _torchrec().follow_inner(optimizers)


def check_kept(optimizers: Sequence[Optimizer], sharded: Sequence[ShardedModule]) -> None:
    """Check that the state of all fused optimizers given is that of sharded tables."""
    if _is_used():
        _torchrec().check_kept(optimizers, sharded)


def memory_of(sharded: ShardedModule) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """The lookups of a sharded module, each with the addresses of its shards and of what is kept for their rows."""
    return list(_torchrec().memory_of(sharded.module))


def watch_lookups(sharded: ShardedModule, mark: Mark) -> LookupHooks:
    """Have `mark` called for every lookup with gradients, by hooks on one module."""
    hooks: LookupHooks = _torchrec().LookupHooks(sharded, mark)
    return hooks


def _torchrec() -> Any:
    return import_module("cnr_store.training.distributed.torchrec")


def _is_used() -> bool:
    return "torchrec" in sys.modules
