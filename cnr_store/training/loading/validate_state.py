"""Decodes a stored state, proves that it has the shape that a load relies on, and gives parts of it to foreign code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from msgspec import Struct

from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.allocation import allocate
from cnr_store.errors import CheckpointError, CorruptionError, FormatError, ModelMismatchError
from cnr_store.format.layout import slot_path, weight_path
from cnr_store.format.record import ArrayEntry, Record
from cnr_store.format.state_arrays import Leaf, OfClass
from cnr_store.format.validate import proven, shown
from cnr_store.reading.opening import decode_tree as read_tree
from cnr_store.training.model.names import class_name
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
    """Prove the tree's members, their types and the optimizers' trees; `with_parts` proves what each rank has."""
    try:
        doc = proven(tree, dict, "it")
        state: StoredState = proven({**doc, "readers": (), "rng_ranks": 0}, StoredState, "it")
        for position, optimizer in enumerate(state.optimizers):
            _check_optimizer(proven(optimizer, _Optimizer, name := f"optimizers[{position}]"), name)
    except ValueError as error:
        raise CorruptionError(f"{where}: the state is malformed: {error}") from error
    return state


def with_parts(state: StoredState, parts: Sequence[object], are_own: bool, where: str) -> StoredState:
    """A state with the parts of ranks, proven: `CorruptionError` names what is malformed.

    `are_own`: whether as many ranks saved it as load it, so that the one part is what this rank alone has. Else it gets
    the readers of all, and no random number generators.
    """
    readers, rngs = list[Any](), list[Any]()
    try:
        for part in parts:
            doc = proven(part, dict, "it")
            readers.append(doc["reader"])
            rngs.append(doc["rng"])
            if doc["rng"] is not None:
                check_rng_state(proven(doc["rng"], dict, "rng"))
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CorruptionError(
            f"{where}: the state of the random number generators, or of a rank, is malformed: {error}"
        ) from error
    if are_own:
        return replace(state, reader=readers[0], rng=rngs[0])
    return replace(state, reader=None, rng=None, readers=tuple(readers), rng_ranks=len(rngs) * any(rngs))


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


PARTLY = "the model is partly overwritten, load another version or give what was saved"
"""How messages end where a load failed half way."""


def decode_tree(catalog: Catalog, record: Record, doc: Any, where: str, seen: set[str] | None = None) -> Any:
    """As `decode_tree` of the room `reading` does, with tensors of torch."""
    return read_tree(catalog, record, doc, where, set() if seen is None else seen, torch_value)


def wrapper_of(stored: Any, path: str) -> Any:
    """State as it was, where it is a wrapper of tensors, whose class the program has registered, or is refused."""
    if not isinstance(stored, OfClass):
        return stored
    kinds = {class_name(one): one for one in torch.serialization.get_safe_globals() if isinstance(one, type)}
    kind: Any = kinds.get(stored.name)
    if kind is None or not issubclass(kind, torch.Tensor):
        raise ModelMismatchError(
            f"{path} was a {stored.name}, a class that this program does not call safe to load: call "
            f"torch.serialization.add_safe_globals([{stored.name.rpartition('.')[2]}]) before"
        )
    try:
        parts, context, shape, strides = stored.value
        parts = {name: wrapper_of(part, path) for name, part in parts.items()}
        made = kind.__tensor_unflatten__(parts, context, torch.Size(shape), tuple(strides))
        if list(made.shape) != shape:
            raise ValueError(f"its shape is {tuple(made.shape)}")
        return made
    except Exception as error:  # whatever the class raises
        text = f"{path}: {stored.name} does not accept what was stored: {error!r}"
        raise ModelMismatchError(text) from error


def settings_of(stored: Any, live: Any, path: str) -> Any:
    """Stored settings of an optimizer, in which values have the classes that `live` ones have at their places.

    `ModelMismatchError` if there is none of that class, or it does not accept the value.
    """
    if isinstance(stored, OfClass):
        kind: Any = type(live)
        try:
            if not stored.name.endswith(f".{kind.__qualname__}"):
                raise TypeError(f"it is of class {kind.__qualname__} now")
            make, items = (kind, live.value) if isinstance(live, Enum) else (kind._make, list(live))
            return make(settings_of(stored.value, items, path))
        except (AttributeError, TypeError, ValueError) as error:
            raise ModelMismatchError(
                f"{path} was a {stored.name} of {stored.value!r:.200}, which can't be made again: {error}; set it to "
                "any value of that class before you load"
            ) from error
    if type(stored) is dict:
        beside = live if isinstance(live, dict) else {}
        return {key: settings_of(one, beside.get(key), f"{path}[{key!r}]") for key, one in stored.items()}
    if type(stored) in (list, tuple):
        beside = dict(enumerate(live)) if isinstance(live, list | tuple) else {}
        return type(stored)(settings_of(one, beside.get(i), f"{path}[{i}]") for i, one in enumerate(stored))
    return stored


@contextmanager
def accepted(where: str, taker: str) -> Iterator[None]:
    """Around foreign code: its errors become one that names the version and the `taker` that refused the state."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # whatever foreign code raises for a state that it does not expect
        raise ModelMismatchError(
            f"{where}: {taker} did not accept the stored state: {error!r}; {PARTLY}"
        ) from error
