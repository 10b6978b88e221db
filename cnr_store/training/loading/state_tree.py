"""Decodes a stored state, and gives parts of it to foreign code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import CheckpointError, ModelMismatchError
from cnr_store.format.record import Record
from cnr_store.format.state_arrays import OfClass
from cnr_store.reading.opening import decode_tree as read_tree
from cnr_store.training.loading.validate_state import torch_value
from cnr_store.training.model.names import class_name

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
