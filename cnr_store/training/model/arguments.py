"""Checks of what callers pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cnr_store.errors import ModelMismatchError, OptionError
from cnr_store.training.model.object_state import refuse_loader

log = logging.getLogger("cnr_store")

IGNORE = 'load(strict="ignore"), which loads'
"""The advice in messages, which go on with what it loads."""


def check_callback(name: str, function: Callable[..., object] | None) -> Callable[..., object] | None:
    """A function, or None."""
    if function is not None and not callable(function):
        raise OptionError(f"{name}={function!r}: give a function")
    return function


def check_group(group: object) -> torch.distributed.ProcessGroup | None:
    """A process group of torch.distributed that this process is in, or None for all ranks."""
    if group is None:
        return None
    if torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup):
        return group
    raise OptionError(
        f"job.group={group!r}: give a process group of torch.distributed that this process is in, or None"
    )


def check_reader(reader: object) -> None:
    """A reader to restore, or None."""
    refuse_loader(reader)
    if reader is not None and not callable(getattr(reader, "load_state_dict", None)):
        raise OptionError(
            f"the reader is of type {type(reader).__name__} and has no load_state_dict: give one that has, or call "
            "load() and take the state from its result's `reader`"
        )


def check_stateful(objects: object) -> dict[str, Any]:
    """Objects that have a state to save and load, by name."""
    if not isinstance(objects, Mapping):
        raise OptionError(
            f"state is of type {type(objects).__name__}; give {{name: object with a state_dict}}"
        )
    for name, value in objects.items():
        if not isinstance(name, str):
            raise OptionError(f"state: the name {name!r} is of type {type(name).__name__}; give a string")
        if isinstance(value, type):
            raise OptionError(f"state {name!r}: {value.__qualname__} is a class; give an object of it")
        methods = (getattr(value, method, None) for method in ("state_dict", "load_state_dict"))
        if not all(map(callable, methods)):
            raise OptionError(
                f"state {name!r}: an object of type {type(value).__name__} has no state_dict and load_state_dict: "
                f"put arrays into an object that has them; give a few values to a save: metadata={{{name!r}: ...}}"
            )
        if isinstance(value, nn.Module) and not value.state_dict():
            log.warning(
                "state %r: the state_dict of this %s is empty, so nothing of it is saved; a torchmetrics metric needs "
                "metric.persistent(True)",
                *(name, type(value).__name__),
            )
    return {str(name): value for name, value in objects.items()}  # a string's subclass would not be stored


def check_row_ids(table: str, ids: object, rows: int) -> torch.Tensor:
    """Row numbers of a table as a tensor of their shape: int64, or empty of any type."""
    try:
        tensor = ids if isinstance(ids, torch.Tensor) else torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelMismatchError(f"table {table!r}: ids are no numbers ({error}); give integers") from error
    if tensor.layout is not torch.strided:
        raise ModelMismatchError(
            f"table {table!r}: ids are a {tensor.layout} tensor; give row numbers of a dense one"
        )
    if not tensor.numel():
        return tensor
    if tensor.dtype is torch.bool:
        raise ModelMismatchError(
            f"table {table!r}: ids are a mask of torch.bool; give row numbers, as with mask.nonzero()"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        raise ModelMismatchError(f"table {table!r}: ids are {tensor.dtype}; give integers")
    tensor = tensor.to(torch.int64)  # torch finds no minimum of unsigned ones
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= rows:
        raise ModelMismatchError(f"table {table!r}: ids from {low} to {high}, but it has {rows} rows")
    return tensor
