"""TorchRec's optimizers: which of them change rows in the backward pass, and what the others wrap."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.distributed.pieces import local_pieces
from cnr_store.training.distributed.sharded import ShardedModule


def take_fused(optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], int | None]:
    """The optimizers that step, and where among those given the first stood that changes rows in the backward pass.

    `optimizers`: as a caller gave them: ``dmp.fused_optimizer``, others, or wrappers of TorchRec that keep no state.
    """
    stepping: list[Optimizer] = []
    position = None
    for leaf in _leaves(optimizers):
        if _is_fused(leaf):
            position = len(stepping) if position is None else position
        else:
            stepping.append(leaf)
    return stepping, position


def passes_steps_on(optimizer: object) -> bool:
    """Whether steps of an optimizer are those of others, which are seen themselves, or change nothing."""
    is_combined = _is_a(optimizer, "torchrec.optim.keyed", "CombinedOptimizer")
    return _is_fused(optimizer) or is_combined or _wrapper_of(optimizer) is not None


def follow_inner(optimizers: Sequence[Any]) -> None:
    """Have TorchRec's wrappers show the state and the groups of what they wrap, after these were replaced by a load."""
    for each in optimizers:
        if _is_a(each, "torchrec.optim.keyed", "CombinedOptimizer"):
            follow_inner([inner for _, inner in each.optimizers])
        elif _wrapper_of(each) is not None:
            follow_inner([each._optimizer])
            each.state, each.param_groups = each._optimizer.state, each._optimizer.param_groups


def check_kept(optimizers: Sequence[Optimizer], sharded: Sequence[ShardedModule]) -> None:
    """Check that the state of all fused optimizers given is that of sharded tables."""
    known = {piece.tensor.data_ptr() for each in sharded for table in each.tables for piece in table.pieces}
    for leaf in _leaves(optimizers):
        for name, parameter in leaf.params.items() if _is_fused(leaf) else ():
            for piece in local_pieces(parameter, name):
                if piece.tensor.numel() and piece.tensor.data_ptr() not in known:
                    raise UnsupportedModelError(
                        f"{type(leaf).__name__} keeps state for {name!r}, which is no table that TorchRec shards in "
                        "the model, so that it can't be saved; shard the module with DistributedModelParallel, or "
                        "train an EmbeddingBagCollection with an optimizer that steps"
                    )


def _leaves(optimizers: Sequence[Any]) -> Iterator[Any]:
    for each in optimizers:
        if _is_a(each, "torchrec.optim.keyed", "CombinedOptimizer"):
            yield from _leaves([inner for _, inner in each.optimizers])
        elif _is_a(each, "torchrec.optim.warmup", "WarmupOptimizer"):
            raise UnsupportedModelError(
                "a WarmupOptimizer keeps its count as state of a parameter that is not in the model, which can't be "
                "saved; change rates with a scheduler of torch.optim.lr_scheduler, and give that in state="
            )
        elif (wrapper := _wrapper_of(each)) is not None and all(
            getattr(type(each), name) is getattr(wrapper, name)
            for name in ("state_dict", "load_state_dict", "post_load_state_dict")
        ):
            yield from _leaves([each._optimizer])
        else:
            yield each


def _wrapper_of(optimizer: object) -> Any:
    """TorchRec's class of wrappers that an optimizer is of; None of any other one."""
    for name in ("KeyedOptimizerWrapper", "OptimizerWrapper"):
        if _is_a(optimizer, "torchrec.optim.keyed", name):
            return getattr(sys.modules["torchrec.optim.keyed"], name)
    return None


def _is_fused(optimizer: object) -> bool:
    return _is_a(optimizer, "torchrec.optim.fused", "FusedOptimizer")


def _is_a(optimizer: object, module: str, name: str) -> bool:
    """Whether it is of a class that only counts once its module was imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(optimizer, kind)
