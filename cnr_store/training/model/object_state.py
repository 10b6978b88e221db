"""The state of objects, and the tensors and arrays in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from cnr_store.errors import StateError
from cnr_store.format.state_arrays import ArrayLeaf
from cnr_store.training.distributed.dtensors import held_pieces
from cnr_store.training.model.tensors import dense_numpy, dense_type
from cnr_store.writing.plan import DensePiece


@dataclass(frozen=True)
class SpreadLeaf(ArrayLeaf):
    """A DTensor as a leaf of a state: of its values, only shape and type are here.

    Attributes
    ----------
    pieces
        Copies of what this process holds of it.
    """

    pieces: tuple[DensePiece, ...] = ()


def spread_leaf(value: torch.Tensor, name: str) -> SpreadLeaf:
    """A copy of what this process holds of a DTensor, as a leaf of a state."""
    shape, torch_dtype = dense_type(value)
    pieces = tuple(
        DensePiece(piece.first_row, piece.first_column, dense_numpy(piece.tensor)[0])
        for piece in held_pieces(value, name)
    )
    return SpreadLeaf(shape, "torch", torch_dtype, True, pieces)


def tensor_leaf(value: object) -> ArrayLeaf | None:
    """A copy of a tensor or a numpy array as a leaf of a state.

    None for subclasses, because their masks, units or shards would be lost, and for anything else.
    """
    kind = type(value)
    if isinstance(value, SpreadLeaf):
        return value
    if isinstance(value, torch.Tensor) and kind in (torch.Tensor, nn.Parameter):
        values, torch_dtype = dense_numpy(value)
        return ArrayLeaf(values, "torch", torch_dtype)
    if isinstance(value, np.ndarray) and kind is np.ndarray:
        return ArrayLeaf(value.copy())
    return None


def state_of(value: Any) -> Any:
    """An object's `state_dict()`, or the value itself where it has none.

    Raises
    ------
    StateError
        It is a class.
    """
    if isinstance(value, type):
        raise StateError(f"the class {value.__qualname__} was given for its state; give an object of it")
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value
