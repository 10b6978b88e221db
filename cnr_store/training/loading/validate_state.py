"""Proof that a decoded state has the shape that a load relies on, before the load changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import Struct

from cnr_store.chains.allocation import allocate
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.layout import slot_path, weight_path
from cnr_store.format.record import ArrayEntry
from cnr_store.format.state_arrays import Leaf, OfClass
from cnr_store.format.validate import proven, shown
from cnr_store.training.model.optimizer_state import Tree
from cnr_store.training.model.rng_state import check_rng_state
from cnr_store.training.model.tensors import SLOT_DTYPES, array_dtype, dense_tensor, dtype_name, dtype_named

_SLOT_TYPES = {dtype_name(dtype): dtype for dtype in SLOT_DTYPES}


@dataclass(frozen=True)
class StoredState:
    """The state of a version, decoded and proven."""

    reader: Any  # where the data stood
    objects: Mapping[str, Any]  # states of the `state` objects, by name
    optimizers: Sequence[Tree]  # as `optimizer_tree` takes them
    extra_state: Mapping[str, Any]  # of the model's modules, by name
    rng: Mapping[str, Any] | None  # for `set_rng_state`; None if it was not saved, or other ranks saved it
    # Of a version that another number of ranks saved, where the data of each stood
    readers: tuple[Any, ...] = ()
    rng_ranks: int = 0  # how many ranks saved random number generators, if another number loads them; else 0
    # Of modules' state, by the name of the module; 1 of others. None if it was not saved.
    module_versions: Mapping[str, int] | None = None


class _Group(Struct):
    params: list[str]


class _Optimizer(Struct, rename={"kind": "class"}):
    kind: str
    param_groups: list[_Group]
    state: dict[str, dict[Any, Any]]
    slots: dict[str, list[str]]
    other: dict[Any, Any]
    more: dict[Any, Any] = {}
    shared: list[tuple[str, str, str, str]] = []


def check_tree(tree: object, where: str) -> StoredState:
    """Prove the tree's members: their types, the optimizers' trees, the random number generators."""
    try:
        doc = proven(tree, dict, "it")
        state: StoredState = proven({**doc, "readers": (), "rng_ranks": 0}, StoredState, "it")
        for position, optimizer in enumerate(state.optimizers):
            _check_optimizer(proven(optimizer, _Optimizer, name := f"optimizers[{position}]"), name)
    except ValueError as error:
        raise CorruptionError(f"{where}: the state is malformed: {error}") from error
    try:
        if state.rng is not None:
            check_rng_state(state.rng)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CorruptionError(
            f"{where}: the state of the random number generators is malformed: {error}"
        ) from error
    return state


def with_own_part(state: StoredState, part: object, where: str) -> StoredState:
    """A state with what this rank alone has, proven. `CorruptionError` names what is malformed."""
    reader, rng = _own_members(part, where)
    return replace(state, reader=reader, rng=rng)


def with_other_parts(state: StoredState, parts: Sequence[object], where: str) -> StoredState:
    """A state of another number of ranks: with all their readers, and without their random number generators."""
    own = [_own_members(part, where) for part in parts]
    has_rng = any(rng is not None for _, rng in own)
    readers = tuple(reader for reader, _ in own)
    return replace(state, reader=None, rng=None, readers=readers, rng_ranks=len(own) * has_rng)


def _own_members(part: object, where: str) -> tuple[Any, Mapping[str, Any] | None]:
    try:
        doc = proven(part, dict, "it")
        reader, rng = doc["reader"], doc["rng"]
        if rng is not None:
            check_rng_state(proven(rng, dict, "rng"))
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CorruptionError(f"{where}: the state of a rank is malformed: {error}") from error
    return reader, rng


def _check_optimizer(tree: _Optimizer, name: str) -> None:
    named = {parameter for group in tree.param_groups for parameter in group.params}
    for parameter in (parameter for parameter in tree.state if parameter not in named):
        raise ValueError(f"{name}.state holds {shown(parameter)}, which is in none of its groups")
    if any(len(set(slots)) != len(slots) for slots in tree.slots.values()):
        raise ValueError(f"{name}.slots holds one slot twice")
    if any(isinstance(key, int) for key in tree.other):
        raise ValueError(f"{name}.other holds the state of a parameter")
    if {"state", "param_groups"} & tree.more.keys():
        raise ValueError(f"{name}.more holds the groups or the state of parameters")


def check_slots(
    trees: Sequence[Tree], rows: Mapping[str, int], arrays: Mapping[str, ArrayEntry], where: str
) -> None:
    """Prove that the trees name each array of row-following optimizer state once, and that it is a table's.

    `rows`: of each table of the version.
    """
    named: set[str] = set()
    for tree in trees:
        for table, slots in tree["slots"].items():
            for slot in slots:
                path = slot_path(table, slot)
                entry = arrays.get(path)
                if table not in rows or slot == "weight" or entry is None or path in named:
                    raise CorruptionError(
                        f"{where}: the state names optimizer state {shown(slot)} of table {shown(table)}, which is "
                        "not stored or named twice"
                    )
                if entry.shape[0] != rows[table] or entry.element not in _SLOT_TYPES:
                    raise CorruptionError(
                        f"{where}: {path} is {entry.shape} {entry.element}, which does not follow {rows[table]} rows"
                    )
                allocate(entry.shape, array_dtype(_SLOT_TYPES[entry.element]), f"{where}: {path}")
                named.add(path)
    known = named.union(map(weight_path, rows))
    unnamed = sorted(path for path in arrays.keys() - known if path.startswith("tables/"))
    if unnamed:
        raise CorruptionError(f"{where}: {unnamed[0]} is stored, but the state names no optimizer of it")


def torch_value(leaf: Leaf) -> object:
    """The tensor or the array that a leaf stands for, or torch's type, device or shape.

    Values of other classes stay as they are.
    """
    if isinstance(leaf, OfClass):
        makers: Any = {"torch.dtype": dtype_named, "torch.device": torch.device, "torch.Size": torch.Size}
        try:
            return makers[leaf.name](leaf.value) if leaf.name in makers else leaf
        except RuntimeError as error:
            raise FormatError(f"state: {leaf.value!r:.80} is no {leaf.name} of this torch") from error
    if leaf.torch_dtype is not None:
        values, dtype = leaf.values, dtype_named(leaf.torch_dtype)
        # Quantized values mean nothing without a scale, which is not stored.
        quantized = dtype_name(dtype).startswith(("qint", "quint"))
        if values.dtype.kind != "u" or values.dtype.itemsize != dtype.itemsize or quantized:
            raise FormatError(f"state: an array of {values.dtype} does not hold the bits of a {dtype} tensor")
    if leaf.kind == "numpy":
        return leaf.laid_out()
    if not leaf.strides:
        return dense_tensor(leaf.values, leaf.torch_dtype)
    tensor = torch.from_numpy(leaf.laid_out())
    return tensor if leaf.torch_dtype is None else tensor.view(dtype)
