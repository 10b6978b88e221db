"""Tables that TorchRec shards over ranks, as the core knows them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.distributed.pieces import LocalPiece


class FusedOptimizer(Protocol):
    """What changes rows in the backward pass."""

    def moves_untouched_rows(self) -> str | None: ...

    def settings(self, kernel: Any) -> dict[str, float]: ...

    def assign(self, kernel: Any, settings: Mapping[str, float]) -> None: ...


@dataclass
class Slot:
    """State of an optimizer that follows a table's rows, as a store has it: the same on every number of ranks."""

    # ``(rows, dim)``; ``(rows,)`` of a number a row; ``(rows, shards)`` of a number a row and column shard
    shape: tuple[int, ...]
    # Of ``(rows, shards)``: the first column of the table in each column shard, ascending. Else empty.
    boundaries: tuple[int, ...] = ()
    pieces: list[LocalPiece] = field(default_factory=list)  # what this process holds. Each is a live view.


@dataclass
class ShardedTable:
    """A table, and what this process holds of it."""

    name: str  # the key of its weight in the model's state dict, without what wrappers add
    shape: tuple[int, int]  # ``(rows, dim)`` of the whole
    dtype: torch.dtype  # element type of the rows
    # Whether each rank has the whole table, and its optimizer is one like those of dense parameters
    replicated: bool
    # Whether rows may be newer in a cache than in `pieces`: lookups are to flush it before each read, and to purge it
    # after each write
    cached: bool
    # What changes rows in the backward pass. None where an optimizer outside the module does it.
    optimizer: FusedOptimizer | None
    # The optimizer's state by name: ``"momentum1"``. The names are the same on all ranks.
    slots: dict[str, Slot]
    # The live memory of this process's shards, without empty ones
    pieces: list[LocalPiece] = field(default_factory=list)
    # Of TorchRec, which hold this process's shards. Tables of one kernel share its settings.
    kernels: list[Any] = field(default_factory=list, repr=False)

    def moves_untouched_rows(self) -> str | None:
        """Why rows may change that were not looked up with gradients. None if none does."""
        if self.optimizer is None:
            return "an optimizer outside the module changes it"
        return self.optimizer.moves_untouched_rows()

    def settings(self) -> dict[str, float]:
        """What the optimizer has beside slots, by name: ``"lr"`` at least. Nothing on ranks without a shard."""
        return self.optimizer.settings(self.kernels[0]) if self.optimizer and self.kernels else {}

    def assign_settings(self, settings: Mapping[str, float]) -> None:
        """Have the optimizer use what `settings` returned, for all tables of the same kernels."""
        if self.optimizer is not None:
            for kernel in self.kernels:
                self.optimizer.assign(kernel, settings)


@dataclass
class ShardedModule:
    """A module of TorchRec with tables that ranks share."""

    path: str  # in the model, without what wrappers add
    module: nn.Module  # the ``ShardedEmbeddingBagCollection`` or ``ShardedEmbeddingCollection``
    tables: list[ShardedTable]  # in the module's order


def bare_lookups(module: nn.Module) -> list[Any]:
    """The lookups of a sharded module, without the wrapper of those that every rank has whole."""
    return [
        lookup.module if isinstance(lookup, DistributedDataParallel) else lookup for lookup in lookups(module)
    ]


def lookups(module: nn.Module) -> list[nn.Module]:
    """The modules of a sharded module that get ids and return embeddings. They are not among its children."""
    return list(attribute(module, "_lookups"))


def attribute(owner: object, *names: str) -> Any:
    """The first attribute of these names: no public name has it."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    version = getattr(sys.modules.get("torchrec"), "__version__", "")
    raise UnsupportedModelError(
        f"{type(owner).__name__} of TorchRec {version} has no {' or '.join(names)}; install TorchRec 1.8"
    )


def check_dense_kernels(optimizers: Sequence[Optimizer], sharded: Sequence[ShardedModule]) -> None:
    """Check that no optimizer keeps state for tables that ranks share under the compute kernel ``dense``."""
    for module in sharded if optimizers else ():
        tables = {each.name for each in module.tables if each.optimizer is None and not each.replicated}
        for name, parameter in module.module.named_parameters() if tables else ():
            name = f"{module.path}.{name}" if module.path else name
            for optimizer in optimizers if name in tables else ():
                if any(
                    isinstance(kept, torch.Tensor) for kept in optimizer.state.get(parameter, {}).values()
                ):
                    raise UnsupportedModelError(
                        f"table {name!r} is sharded with the compute kernel 'dense', and {type(optimizer).__name__} "
                        "keeps state for its rows, which can't be stored by rows; shard it with a fused kernel "
                        "(compute_kernel='fused'), or train it with an optimizer without state"
                    )
