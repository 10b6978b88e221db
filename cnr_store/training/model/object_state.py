"""The state of objects, and the tensors and arrays in it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from cnr_store.errors import OptionError, StateError, UnsupportedModelError
from cnr_store.format.state import MAX_DEPTH, dumps, encode_state
from cnr_store.format.state_arrays import ArrayLeaf, Leaf, OfClass
from cnr_store.training.distributed.pieces import check_follows, held_pieces, is_dtensor, spread_like
from cnr_store.training.model.names import class_name
from cnr_store.training.model.tensors import dense_numpy, dense_type, dtype_name, kept_strides
from cnr_store.writing.plan import DensePiece

MAX_METADATA_BYTES = 64 << 10
_INSTEAD = "give it through `state=`, in an object with state_dict and load_state_dict"
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep as plain tensors of no dimensions, whatever the parameter's shape."""


@dataclass(frozen=True)
class SpreadLeaf(ArrayLeaf):
    """A DTensor as a leaf of a state: of its values, only shape and type are here."""

    pieces: tuple[DensePiece, ...] = ()  # copies of what this process holds of it


def spread_leaf(value: torch.Tensor, name: str) -> SpreadLeaf:
    """A copy of what this process holds of a DTensor, as a leaf of a state."""
    shape, torch_dtype = dense_type(value)
    pieces = tuple(
        DensePiece((piece.first_row, piece.first_column), dense_numpy(piece.tensor)[0])
        for piece in held_pieces(value, name)
    )
    return SpreadLeaf(shape, "torch", torch_dtype, is_beside=True, pieces=pieces)


def tensor_leaf(value: object) -> Leaf | None:
    """A copy of a tensor or a numpy array as a leaf of a state, or a type, device or shape of torch.

    None for subclasses, because their masks, units or shards would be lost, and for anything else.
    """
    kind = type(value)
    if isinstance(value, SpreadLeaf):
        return value
    if isinstance(value, torch.Tensor) and kind in (torch.Tensor, nn.Parameter):
        values, torch_dtype = dense_numpy(value)
        return ArrayLeaf(values, "torch", torch_dtype, strides=kept_strides(value))
    if isinstance(value, np.ndarray) and kind is np.ndarray:
        # As pickle does, which puts all other orders into that of C.
        strides = tuple(accumulate((1, *value.shape[:-1]), operator.mul)) if value.flags.fnc else None
        return ArrayLeaf(value.copy(), strides=strides)
    if isinstance(value, torch.dtype):
        return OfClass("torch.dtype", dtype_name(value))
    if isinstance(value, torch.device):
        return OfClass("torch.device", str(value))
    return OfClass("torch.Size", list(value)) if isinstance(value, torch.Size) else None


def refuse_loader(reader: object) -> None:
    """Refuse a `DataLoader` (`OptionError`), which has no position that could be saved. torchdata's has one."""
    if isinstance(reader, DataLoader) and not callable(getattr(reader, "state_dict", None)):
        raise OptionError(
            "a DataLoader does not tell its position: make reader = TrackedReader(loader), take the batches from it, "
            "and give reader=reader"
        )


def state_of(value: Any) -> Any:
    """An object's `state_dict()`, or the value itself where it has none.

    `StateError` if it is a class, `OptionError` if it is a loader without a state.
    """
    refuse_loader(value)
    if isinstance(value, type):
        raise StateError(f"the class {value.__qualname__} was given for its state; give an object of it")
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def is_wrapper(value: object) -> bool:
    """Whether it is a tensor of a class that wraps others, as those of few bits do, and tells them."""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__") and not is_dtensor(value)


def taken_apart(value: Any, where: str) -> tuple[dict[str, Any], object]:
    """The tensors that a wrapper has, by name, and what else its class makes it of; refused if its class fails."""
    try:
        names, context = value.__tensor_flatten__()
        return {name: getattr(value, name) for name in names}, context
    except Exception as error:  # whatever the class raises
        text = f"{where} is a {class_name(type(value))}, which can't tell its tensors: {error!r}"
        raise UnsupportedModelError(text) from error


def _wrapper(value: Any, where: str) -> Any:
    """A wrapper as values from which a load makes it."""
    if not is_wrapper(value):
        return value
    kind: Any = type(value)
    strange = any(type(n) is not int for n in (*value.shape, *value.stride()))
    if strange or kind not in torch.serialization.get_safe_globals():
        why = "of a shape without numbers" if strange else "whose class a load would not know"
        raise StateError(
            f"{where} is a {class_name(kind)}, {why}; call torch.serialization.add_safe_globals([{kind.__qualname__}]) "
            "in this program and in each that loads it"
        )
    parts, context = taken_apart(value, where)
    parts = {name: _wrapper(part, f"{name} of {where}") for name, part in parts.items()}
    return OfClass(class_name(kind), [parts, context, list(value.shape), list(value.stride())])


def _settings(value: Any, depth: int = 0) -> Any:
    """Settings of an optimizer, in which enums and named tuples are values of their class."""
    kind, deeper = type(value), partial(_settings, depth=depth + 1)
    if depth > MAX_DEPTH:
        raise StateError(
            f"param_groups: nested deeper than {MAX_DEPTH} levels, or contains itself; flatten it"
        )
    if isinstance(value, Enum):
        return OfClass(class_name(kind), deeper(value.value))
    if issubclass(kind, tuple) and hasattr(kind, "_make"):  # made by `collections.namedtuple`
        return OfClass(class_name(kind), list(map(deeper, value)))
    if kind is dict:
        return {key: deeper(one) for key, one in value.items()}
    return kind(map(deeper, value)) if kind in (list, tuple) else value


def check_settings(optimizers: Sequence[Optimizer]) -> None:
    """Refuse settings of optimizers that can't be stored, except where a ``state_dict`` may tell others."""
    for position, each in enumerate(optimizers):
        if type(each).state_dict is not Optimizer.state_dict or each._optimizer_state_dict_post_hooks:
            continue
        groups = [{**group, "params": None} for group in each.param_groups]
        tree = {"optimizers": {position: {"param_groups": _settings(groups)}}}
        try:
            encode_state(tree, beside=lambda path, _: path, as_leaf=tensor_leaf)
        except StateError as error:
            raise StateError(
                f"{error}; or take it out of the groups that {type(each).__name__}.state_dict() returns with "
                "register_state_dict_post_hook, and put it back with register_load_state_dict_pre_hook"
            ) from error


def _spread(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """The parameters that are DTensors, by name."""
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    return {names[id(one)]: one for one in parameters if is_dtensor(one)}


def with_leaves(tree: dict[str, Any], optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's tree as it is stored: state of parameters that are DTensors is as leaves."""
    spread = _spread(optimizer, names)

    def leaf(name: str, key: str, value: object) -> object:
        where = f"{key!r} of {name!r} in {type(optimizer).__name__}"
        if name not in spread or not isinstance(value, torch.Tensor):
            return _wrapper(value, where)
        if value.ndim == 0 and not is_dtensor(value):
            return value
        check_follows(value, spread[name], where)
        return spread_leaf(value, where)

    state = {
        name: {key: leaf(name, key, value) for key, value in values.items()}
        for name, values in tree["state"].items()
    }
    return {**tree, "param_groups": _settings(tree["param_groups"]), "state": state}


def spread_state(state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Stored state by parameter, with whole tensors spread where the parameter is a DTensor."""
    spread = _spread(optimizer, names)

    def is_spread(name: str, key: str, value: object) -> bool:
        if name not in spread or not isinstance(value, torch.Tensor) or is_dtensor(value):
            return False
        return value.ndim > 0 or (spread[name].ndim == 0 and key not in _SCALARS)

    return {
        name: {
            key: spread_like(value, spread[name], f"{key!r} of {name!r}")
            if is_spread(name, key, value)
            else value
            for key, value in values.items()
        }
        for name, values in state.items()
    }


def encode_metadata(metadata: Any) -> Any:
    """The caller's metadata as tagged JSON. It must be small, because it is stored in the commit record."""

    def too_large(path: str, _: ArrayLeaf) -> str:
        raise StateError(f"state{path}: an array of more than 8 KiB; {_INSTEAD}")

    def plain_leaf(value: object) -> ArrayLeaf | None:
        leaf = tensor_leaf(value)
        if isinstance(leaf, OfClass):  # the catalog, which has no torch, would not know it
            return None
        if leaf is not None and leaf.torch_dtype is not None:  # and of this one it would give the bits
            raise ValueError(
                f"metadata holds no {leaf.torch_dtype} tensor; give its item(), or convert it with float()"
            )
        return leaf

    # Encoded under its name, so that errors say that it is the metadata.
    doc = encode_state({"metadata": metadata}, beside=too_large, as_leaf=plain_leaf)["metadata"]
    if len(dumps(doc)) > MAX_METADATA_BYTES:
        raise StateError(f"metadata takes more than {MAX_METADATA_BYTES >> 10} KiB; {_INSTEAD}")
    return doc
