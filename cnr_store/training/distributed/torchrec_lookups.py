"""Hooks on TorchRec's lookups, which tell what rows of this process's shards they look up.

TorchRec's own place for such a function (``register_post_lookup_tracker_fn``) takes one function, names features but
not tables, and is passed over where another module computes the lookups. Forward hooks on the lookups have none of
these limits, and leave that place to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cnr_store.training.distributed.sharded import ShardedModule, lookups
from cnr_store.training.distributed.torchrec import first_of


class LookupHooks:
    """The hooks of one module. Call `check` at each save, before the rows that were marked are taken.

    `mark`: called for every lookup with gradients, once for each shard and feature, before rows change, from the thread
    that computes. A row that an id out of range stands for is among those that it gets.
    """

    def __init__(self, sharded: ShardedModule, mark: Callable[[str, int, torch.Tensor], None]) -> None:
        self.sharded, self._mark = sharded, mark
        self._names = {table.name.split(".")[-2]: table.name for table in sharded.tables}
        self._interval = 0
        self._reason: str | None = None
        self._hooked: list[tuple[nn.Module, Any]] = []
        self._attach()
        register = sharded.module.register_load_state_dict_post_hook
        self._after_load = register(Hook(self._loaded))  # type: ignore[no-untyped-call]

    def check(self) -> str | None:
        """Begin an interval. Returns why rows may have changed in the last one without being marked, or None.

        After a reason the hooks are in place again. The module's memory may be another: call `find_sharded` again.
        """
        self._interval += 1
        reason, self._reason = self._reason, None
        now = lookups(self.sharded.module)
        if len(now) != len(self._hooked) or any(
            lookup is not hooked or handle.id not in lookup._forward_hooks
            for lookup, (hooked, handle) in zip(now, self._hooked, strict=True)
        ):
            self._detach()
            self._attach()
            reason = "its lookups were replaced or lost their hooks, as when tables are sharded anew"
        return reason

    def remove(self) -> None:
        """Take the hooks off."""
        self._detach()
        self._after_load.remove()

    def _attach(self) -> None:
        for lookup in lookups(self.sharded.module):
            hook = Hook(partial(self._looked_up, _shards_by_position(lookup)))
            self._hooked.append((lookup, lookup.register_forward_hook(hook, with_kwargs=True)))

    def _detach(self) -> None:
        for _, handle in self._hooked:
            handle.remove()
        self._hooked.clear()

    def _loaded(self, *_: object) -> None:
        self._reason = "a state dict was loaded into it"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _looked_up(
        self,
        positions: Sequence[tuple[str, int, int, str]],
        _lookup: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> None:
        """Mark what was looked up, and again in the backward pass if a save lies between the two."""
        if not (positions and torch.is_grad_enabled()):  # without tables, `output` is one tensor for ever
            return
        ids = [*args, *kwargs.values()][0]
        offsets = ids.offset_per_key()
        if len(offsets) != len(positions) + 1:
            self._reason = f"a lookup of {len(positions)} features got ids of {len(offsets) - 1}"
            return
        values = ids.values()
        # Column shards of a table on one rank get the same ids.
        rows = {
            place: values[start:end]
            for place, start, end in zip(positions, offsets, offsets[1:], strict=False)
        }
        self._mark_rows(rows.items())
        if isinstance(output, torch.Tensor) and output.requires_grad:
            before_update = partial(self._before_update, self._interval, rows)
            output.register_hook(before_update)  # type: ignore[no-untyped-call]

    def _before_update(
        self, interval: int, rows: dict[tuple[str, int, int, str], torch.Tensor], _grad: torch.Tensor
    ) -> None:
        if interval != self._interval:
            self._mark_rows(rows.items())

    def _mark_rows(self, found: Iterable[tuple[tuple[str, int, int, str], torch.Tensor]]) -> None:
        for (table, first_row, rows, _), ids in found:
            if rows and ids.numel():
                # FBGEMM looks up the first row for an id out of range.
                self._mark(
                    self._names[table], first_row, torch.where((ids < 0) | (ids >= rows), 0, ids).long()
                )


def memory_of(module: nn.Module) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """The lookups of a sharded module, each with the addresses of its shards and of what is kept for their rows."""
    return [
        (lookup, tuple(tensor.data_ptr() for kernel in lookup.modules() for tensor in _tensors_of(kernel)))
        for lookup in lookups(module)
    ]


def _tensors_of(kernel: Any) -> list[torch.Tensor]:
    if not (hasattr(kernel, "emb_module") and hasattr(kernel, "split_embedding_weights")):
        return []
    kept = kernel.emb_module.get_optimizer_state() if hasattr(kernel, "fused_optimizer") else []
    return [*kernel.split_embedding_weights(), *(tensor for state in kept for tensor in state.values())]


class Hook:
    """Calls a function. A copy of a model (for averaging, say) copies its hooks; the copied ones do nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: object) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[type[CopiedHook], tuple[()]]:
        return CopiedHook, ()


class CopiedHook:
    """What a hook of a copied model is: it does nothing."""

    def __call__(self, *_: object) -> None:
        pass


def _shards_by_position(lookup: nn.Module) -> list[tuple[str, int, int, str]]:
    """Table, first row, rows and feature that each part of a lookup's ids belongs to, in their order."""
    bare: Any = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
    return [
        (shard.name, first_of(shard)[0], shard.local_rows, feature)
        for group in bare.grouped_configs
        for shard in group.embedding_tables
        for feature in shard.feature_names
    ]
