"""All that knows TorchRec: the tables that it shards over ranks, its optimizers, and hooks on its lookups.

TorchRec groups tables into lookups, one for each way to shard. A lookup has kernels, and each kernel holds the local
shards of some tables, with the state of the optimizer that changes them in the backward pass. Classes are looked up
among the modules that are imported already, because importing TorchRec takes long and it may not be installed. Nothing
here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.distributed.pieces import LocalPiece, local_pieces
from cnr_store.training.distributed.sharded import (
    ShardedModule,
    ShardedTable,
    Slot,
    attribute,
    bare_lookups,
    lookups,
)

_KERNELS = {"fused", "fused_uvm", "fused_uvm_caching", "dense"}
_COLLECTIONS = {
    "ShardedEmbeddingBagCollection": "embedding_bags",
    "ShardedEmbeddingCollection": "embeddings",
}
"""Classes that are known, with what stands before a table's name in their state dicts."""
_OUTER = {"ShardedFeatureProcessedEmbeddingBagCollection"}
"""Classes that leave rows to a known one inside them."""


def find_sharded(modules: Iterable[tuple[str, nn.Module]]) -> list[ShardedModule]:
    """Those of a model's modules whose tables TorchRec shards, with their live memory.

    `modules`: each with its path without what wrappers add.
    """
    base = getattr(sys.modules.get("torchrec.distributed.embedding_types"), "ShardedEmbeddingModule", None)
    if base is None:
        return []
    found = []
    for path, module in modules:
        kind = type(module).__name__
        if kind == "DMPCollection":
            raise UnsupportedModelError(
                "DMPCollection holds replicas of tables that differ between its syncs; use DistributedModelParallel"
            )
        if not isinstance(module, base) or kind in _OUTER:
            continue
        if kind not in _COLLECTIONS:
            raise UnsupportedModelError(
                f"{path or 'the model'} is a {kind}, which changes rows by more than lookups; shard an "
                "EmbeddingBagCollection or an EmbeddingCollection"
            )
        tables = _tables(module, ".".join(filter(None, (path, _COLLECTIONS[kind]))))
        found.append(ShardedModule(path, module, tables))
    return found


def _tables(module: nn.Module, prefix: str) -> list[ShardedTable]:
    tables: dict[str, ShardedTable] = {}
    shards: dict[str, list[Any]] = {}
    for shard in _all_shards(module):
        shards.setdefault(shard.name, []).append(shard)
    for name, found in shards.items():
        tables[name] = _table(f"{prefix}.{name}.weight", found)
    for lookup in bare_lookups(module):
        for kernel in lookup.modules():
            if hasattr(kernel, "emb_module") and hasattr(kernel, "split_embedding_weights"):
                _add_memory(tables, kernel)
    return list(tables.values())


def _all_shards(module: nn.Module) -> Iterator[Any]:
    """The ``ShardedEmbeddingTable`` of all ranks' shards."""
    found = attribute(module, "_embedding_shardings", "_sharding_type_to_sharding")
    for sharding in found.values() if isinstance(found, Mapping) else found:
        for groups in attribute(sharding, "_grouped_embedding_configs_per_rank"):
            for group in groups:
                yield from group.embedding_tables


def _table(name: str, shards: list[Any]) -> ShardedTable:
    """A table without local memory so far, of all ranks' shards."""
    first = shards[0]
    kernel = first.compute_kernel.value
    if kernel not in _KERNELS or first.use_virtual_table:
        raise UnsupportedModelError(
            f"table {name!r} has the compute kernel {kernel!r}, whose rows are not in plain memory; "
            f"use one of {', '.join(sorted(_KERNELS))}"
        )
    shape = (first.num_embeddings, first.embedding_dim)
    optimizer = None if kernel == "dense" else FusedOptimizer.of(first.fused_params or {}, name)
    slots = {}
    columns = tuple(sorted({first_of(shard)[1] for shard in shards}))
    for slot, rowwise in optimizer.slots.items() if optimizer else ():
        if not rowwise:
            slots[slot] = Slot(shape)
        elif len(columns) == 1:
            slots[slot] = Slot(shape[:1])
        else:
            slots[slot] = Slot((shape[0], len(columns)), columns)
    return ShardedTable(
        name,
        shape,
        _dtype(first, name),
        replicated=first.local_metadata is None,
        cached=kernel == "fused_uvm_caching",
        optimizer=optimizer,
        slots=slots,
    )


def _dtype(shard: Any, name: str) -> torch.dtype:
    names = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
    if (kind := shard.data_type.name) not in names:
        raise UnsupportedModelError(f"table {name!r} is of {kind}; tables are of {', '.join(names)}")
    return names[kind]


def first_of(shard: Any) -> tuple[int, int]:
    """The first row and column of a ``ShardedEmbeddingTable``."""
    if shard.local_metadata is None:
        return 0, 0
    row, column = shard.local_metadata.shard_offsets
    return row, column


def _add_memory(tables: dict[str, ShardedTable], kernel: Any) -> None:
    """Add the live memory of a kernel's shards to their tables."""
    shards = kernel.config.embedding_tables
    weights = kernel.split_embedding_weights()
    for shard, weight in zip(shards, weights, strict=True):
        table = tables[shard.name]
        if weight.is_meta or tuple(weight.shape) != (shard.local_rows, shard.local_cols):
            raise UnsupportedModelError(
                f"a shard of table {table.name!r} lies on {weight.device} with the shape {tuple(weight.shape)}, not "
                f"{(shard.local_rows, shard.local_cols)} in memory; move the model to its device first"
            )
        if weight.numel():
            table.pieces.append(LocalPiece(*first_of(shard), weight.detach()))
        if kernel not in table.kernels:
            table.kernels.append(kernel)
    if not hasattr(kernel, "fused_optimizer"):
        return
    for shard, state in zip(shards, kernel.emb_module.get_optimizer_state(), strict=False):
        _add_state(tables[shard.name], shard, list(state.items()))


def _add_state(table: ShardedTable, shard: Any, state: list[tuple[str, torch.Tensor]]) -> None:
    """Add the live state of a shard's optimizer. There is none of plain gradient descent."""
    row, column = first_of(shard)
    # TorchRec gives the first state this name, whatever FBGEMM calls it.
    named = {"momentum1" if place == 0 else key: value for place, (key, value) in enumerate(state)}
    named.pop("iter", None)  # a number for all rows
    if named.keys() != table.slots.keys():
        raise UnsupportedModelError(
            f"the optimizer of table {table.name!r} has the state {sorted(named)}, not {sorted(table.slots)} as its "
            "settings say; install the FBGEMM release that belongs to TorchRec 1.8"
        )
    for name, value in named.items():
        slot, value = table.slots[name], value.detach()
        if slot.boundaries:
            column_shard = slot.boundaries.index(column)
            slot.pieces.append(LocalPiece(row, column_shard, value.unsqueeze(1)))
        elif value.numel():
            slot.pieces.append(LocalPiece(row, column if value.ndim == 2 else 0, value))


_SLOTS = {
    "sgd": {},
    "exact_sgd": {},
    "exact_adagrad": {"momentum1": False},
    "row_wise_adagrad": {"momentum1": True},
    "exact_row_wise_adagrad": {"momentum1": True},
    "adam": {"momentum1": False, "exp_avg_sq": False},
    "partial_row_wise_adam": {"momentum1": False, "exp_avg_sq": True},
    "lamb": {"momentum1": False, "exp_avg_sq": False},
    "partial_row_wise_lamb": {"momentum1": False, "exp_avg_sq": True},
    "ensemble_row_wise_adagrad": {"momentum1": True, "sparse_ema": False},
    "ema_in_place_row_wise_adagrad": {"momentum1": True},
}
"""State of each optimizer by name, and whether it is one number a row."""

_UNCOUNTED = {"sgd", "exact_sgd", "exact_adagrad", "row_wise_adagrad", "exact_row_wise_adagrad"}
"""Of these the number of lookups changes what a step does only where they keep ``prev_iter``."""

_AVERAGING = {"ensemble_row_wise_adagrad", "ema_in_place_row_wise_adagrad"}
"""Every so many lookups these change all rows."""


@dataclass(frozen=True)
class FusedOptimizer:
    """What changes a table's rows in the backward pass."""

    kind: str  # FBGEMM's name of it: ``"exact_row_wise_adagrad"``
    slots: Mapping[str, bool]  # its state that follows rows, by name, and whether that is one number a row

    @classmethod
    def of(cls, fused_params: Mapping[str, Any], table: str) -> FusedOptimizer:
        """The optimizer that TorchRec's `fused_params` ask for.

        `fused_params`: of the table.
        `table`: what errors call the table.
        """
        kind = str(getattr(fused_params.get("optimizer"), "value", "exact_sgd"))
        if kind not in _SLOTS:
            raise UnsupportedModelError(
                f"table {table!r} has the fused optimizer {kind!r}, which is not known; "
                f"use one of {', '.join(sorted(_SLOTS))}"
            )
        slots = dict(_SLOTS[kind])
        decay = getattr(fused_params.get("weight_decay_mode"), "name", "NONE")
        if kind == "exact_row_wise_adagrad" and decay in ("COUNTER", "COWCLIP", "DECOUPLE_GLOBAL"):
            slots["prev_iter"] = True
            if decay != "DECOUPLE_GLOBAL":
                slots["row_counter"] = True
        if kind == "adam" and getattr(
            fused_params.get("extra_optimizer_config"), "use_rowwise_bias_correction", False
        ):
            slots["row_counter"] = True
        return cls(kind, slots)

    def moves_untouched_rows(self) -> str | None:
        """Why rows may change that were not looked up with gradients. None if none does.

        Weight decay, momentum, counters and stochastic rounding touch the rows of a backward pass only: FBGEMM makes up
        for the steps that a row missed when it is looked up next.
        """
        if self.kind in _AVERAGING:
            return f"the optimizer {self.kind} averages all rows every so many lookups"
        return None

    def settings(self, kernel: Any) -> dict[str, float]:
        """The numbers that go on with training, of a kernel of TorchRec.

        ``lr`` is that of the optimizer's group, which may be newer than the kernel's own. ``iter`` counts lookups.
        """
        (group,) = kernel.fused_optimizer.param_groups
        module = kernel.emb_module
        settings: dict[str, float] = {"lr": float(group["lr"])}
        if "prev_iter" in self.slots or self.kind not in _UNCOUNTED:
            settings["iter"] = int(module.iter.item())
        if "row_counter" in self.slots and "prev_iter" in self.slots:
            settings["max_counter"] = float(module.max_counter.item())
        return settings

    @staticmethod
    def assign(kernel: Any, settings: Mapping[str, float]) -> None:
        """Have a kernel of TorchRec use what `settings` returned.

        `kernel`: holds shards of the table.
        `settings`: a name that is missing stays as it is.
        """
        optimizer, module = kernel.fused_optimizer, kernel.emb_module
        if "lr" in settings:
            (group,) = optimizer.param_groups
            group["lr"] = settings["lr"]
            optimizer.step()  # tells the kernel, and does nothing else
        if "iter" in settings:
            module.iter.fill_(int(settings["iter"]))
            module.iter_cpu.fill_(int(settings["iter"]))
        if "max_counter" in settings:
            module.max_counter.fill_(settings["max_counter"])


class LookupHooks:
    """The hooks of one module. Call `check` at each save, before the rows that were marked are taken.

    TorchRec's own place for such a function (``register_post_lookup_tracker_fn``) takes one function, names features
    but not tables, and is passed over where another module computes the lookups. Forward hooks have none of these
    limits, and leave that place to the user.

    `mark`: called for every lookup with gradients, once for each shard and feature, before rows change, from the thread
    that computes. It gets a table's name, the first row of the local shard, and rows of that shard, int64 in any order.
    A row that an id out of range stands for is among them.
    """

    def __init__(self, sharded: ShardedModule, mark: Callable[[str, int, torch.Tensor], None]) -> None:
        self.sharded, self._mark = sharded, mark
        self._names = {table.name.split(".")[-2]: table.name for table in sharded.tables}
        self._interval = 0
        self._reason: str | None = None
        self._hooked: list[tuple[nn.Module, Any]] = []
        self._attach()
        register = sharded.module.register_load_state_dict_post_hook
        self._after_load = register(Hook(self._loaded))  # type: ignore[no-untyped-call]  # torch types a part of itself

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
            output.register_hook(before_update)  # type: ignore[no-untyped-call]  # torch types a part of itself

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


def memory_of(sharded: ShardedModule) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """The lookups of a sharded module, each with the addresses of its shards and of what is kept for their rows."""
    return [
        (lookup, tuple(tensor.data_ptr() for kernel in lookup.modules() for tensor in _tensors_of(kernel)))
        for lookup in lookups(sharded.module)
    ]


def _tensors_of(kernel: Any) -> list[torch.Tensor]:
    if not (hasattr(kernel, "emb_module") and hasattr(kernel, "split_embedding_weights")):
        return []
    kept = kernel.emb_module.get_optimizer_state() if hasattr(kernel, "fused_optimizer") else []
    return [*kernel.split_embedding_weights(), *(tensor for state in kept for tensor in state.values())]


class Hook:
    """Calls a function. A copy of a model (for averaging, say) copies its hooks; the copied ones do nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: object) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def _shards_by_position(lookup: nn.Module) -> list[tuple[str, int, int, str]]:
    """Table, first row, rows and feature that each part of a lookup's ids belongs to, in their order."""
    bare: Any = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
    return [
        (shard.name, first_of(shard)[0], shard.local_rows, feature)
        for group in bare.grouped_configs
        for shard in group.embedding_tables
        for feature in shard.feature_names
    ]


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
