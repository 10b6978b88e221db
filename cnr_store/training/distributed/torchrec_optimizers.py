"""TorchRec's optimizers: which of them change rows in the backward pass, and what the others wrap."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer


def take_fused(optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], int | None]:
    """The optimizers that step, and where among those given the first stood that changes rows in the backward pass.

    Parameters
    ----------
    optimizers
        As a caller gave them: ``dmp.fused_optimizer``, others, or a ``CombinedOptimizer`` of both.
    """
    stepping: list[Optimizer] = []
    position = None
    for leaf in _leaves(optimizers):
        if _is_a(leaf, "torchrec.optim.fused", "FusedOptimizer"):
            position = len(stepping) if position is None else position
        else:
            stepping.append(leaf)
    return stepping, position


def _leaves(optimizers: Sequence[Any]) -> Iterator[Any]:
    for each in optimizers:
        if _is_a(each, "torchrec.optim.keyed", "CombinedOptimizer"):
            yield from _leaves([inner for _, inner in each.optimizers])
        elif _is_a(each, "torchrec.optim.keyed", "KeyedOptimizerWrapper"):
            yield each._optimizer
        else:
            yield each


def _is_a(optimizer: object, module: str, name: str) -> bool:
    """Whether it is of a class that only counts once its module was imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(optimizer, kind)
