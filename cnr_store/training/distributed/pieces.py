"""The parts of a tensor that lie in this process's memory, with their place in the whole.

A tensor that ranks share is known by the name of its class, because importing the classes takes long. Nothing here
communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from cnr_store.errors import UnsupportedModelError

Boxes: TypeAlias = Iterator[tuple[Sequence[int], torch.Tensor]]
"""Offsets in the whole, and the memory there."""


@dataclass(frozen=True)
class LocalPiece:
    """A box of a tensor that this process holds."""

    first_row: int  # of the whole tensor
    first_column: int  # of the whole tensor; 0 where it has one dimension
    # The live memory, ``(rows, columns)`` or ``(rows,)``: what is written to it changes the model
    tensor: torch.Tensor

    @property
    def columns(self) -> int:
        return self.tensor.shape[1] if self.tensor.ndim == 2 else 1


def local_pieces(value: Any, name: str) -> list[LocalPiece]:
    """The boxes of a whole tensor that this process holds. None is empty, but of an empty plain tensor.

    `value`: a plain tensor, a ``ShardedTensor`` or a ``DTensor``.
    `name`: what errors call it.
    """
    if is_a(value, "ShardedTensor"):
        boxes: Boxes = ((shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards())
    elif is_a(value, "DTensor"):
        boxes = _boxes(value, name)
    else:
        return [LocalPiece(0, 0, _plain(value, name))]
    return [_piece(offsets, _plain(part, name), name) for offsets, part in boxes if part.numel()]


def is_a(value: object, name: str) -> bool:
    """Whether a class of torch of this name is among those of `value`."""
    return any(kind.__name__ == name and kind.__module__.startswith("torch.") for kind in type(value).__mro__)


def _boxes(value: Any, name: str) -> Boxes:
    """The offsets and memory of what this process holds of a ``DTensor``."""
    if any(placement.is_partial() for placement in value.placements):
        raise UnsupportedModelError(
            f"{name} is a DTensor with the placements {value.placements}: each rank holds a part of a sum; "
            "redistribute it to Shard or Replicate"
        )
    with torch.no_grad():
        local = value.to_local()
    # Some packages put several parts side by side into one local tensor.
    parts = local.local_shards() if hasattr(local, "local_shards") else [local]
    chunks = value.__create_chunk_list__() if parts else []
    if [tuple(chunk.sizes) for chunk in chunks] != [tuple(part.shape) for part in parts]:
        raise UnsupportedModelError(
            f"{name} is a DTensor with the placements {value.placements}, whose local tensor of shape "
            f"{tuple(local.shape)} is not a rectangular block of it; redistribute it to Shard or Replicate"
        )
    return ((chunk.offsets, part) for chunk, part in zip(chunks, parts, strict=True))


def _piece(offsets: Sequence[int], part: torch.Tensor, name: str) -> LocalPiece:
    row, column, *others = (*offsets, 0, 0)
    if any(others):
        raise UnsupportedModelError(
            f"{name} is split along its dimensions after the second; split rows or columns only"
        )
    return LocalPiece(row, column, part)


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor without autograd, over the same memory."""
    try:
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise RuntimeError
        plain = tensor.detach()
        plain.untyped_storage()
    except (RuntimeError, NotImplementedError):  # torch's, for a tensor without memory
        raise UnsupportedModelError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}, which has no plain "
            "values in memory; materialize it first"
        ) from None
    return plain


def by_column(name: str, pieces: Sequence[LocalPiece]) -> tuple[LocalPiece, ...]:
    """The boxes that a process holds of an array, by column. `UnsupportedModelError` if they have different rows."""
    if len({(piece.first_row, len(piece.tensor)) for piece in pieces}) > 1:
        raise UnsupportedModelError(
            f"table {name!r}: this rank holds other rows of it in some columns than in others; shard all columns of a "
            "row alike"
        )
    return tuple(sorted(pieces, key=lambda piece: piece.first_column))
