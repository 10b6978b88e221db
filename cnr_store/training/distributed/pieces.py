"""The parts of a tensor that lie in this process's memory, with their place in the whole.

A tensor that ranks share is known by the name of its class, because importing the classes takes long: a DTensor, as
FSDP2 makes it and optimizers keep state like it, or a ShardedTensor. Nothing here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from cnr_store.errors import ModelMismatchError, UnsupportedModelError

Boxes: TypeAlias = Iterator[tuple[Sequence[int], torch.Tensor]]
"""Offsets in the whole, and the memory there."""
_PLAIN = (torch.Tensor, nn.Parameter)
_EXACT = ("Shard", "Replicate")


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


def is_dtensor(value: object) -> bool:
    """Whether it is a tensor that torch spreads over the ranks of a mesh."""
    return type(value) not in _PLAIN and is_a(value, "DTensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this process holds of a tensor: the tensor itself, unless it is a DTensor."""
    if not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor
    with torch.no_grad():
        local: torch.Tensor = dtensor.to_local()
    return local


def held_pieces(tensor: torch.Tensor, name: str) -> list[LocalPiece]:
    """The boxes that this process holds of a DTensor."""
    dtensor: Any = tensor
    mesh: torch.Tensor = dtensor.device_mesh.mesh
    if any((mesh.diff(dim=dimension) < 0).any() for dimension in range(mesh.ndim)):
        raise UnsupportedModelError(
            f"{name} is a DTensor over a mesh with ranks out of order, {mesh.tolist()}: torch's full_tensor() and "
            "its checkpoints then disagree which rows a rank has; make the mesh with its ranks in ascending order"
        )
    for placement in dtensor.placements:
        if type(placement).__name__ not in _EXACT and not placement.is_partial():
            raise UnsupportedModelError(
                f"{name} is a DTensor with the placements {dtensor.placements}, whose parts are not blocks; shard "
                "each dimension over one dimension of the mesh"
            )
    return local_pieces(tensor, name)


def check_follows(tensor: object, parameter: torch.Tensor, name: str) -> None:
    """Check that each rank has the same part of an optimizer's state as of its parameter, which is a DTensor."""
    given: Any = tensor
    own: Any = parameter
    if not is_dtensor(tensor) or given.shape != own.shape or given.placements != own.placements:
        raise UnsupportedModelError(
            f"{name} is a {type(tensor).__name__} of shape {tuple(given.shape)}, and the parameter a DTensor of shape "
            f"{tuple(own.shape)} with the placements {own.placements}: it is not known which part of it this rank has; "
            "use an optimizer that keeps its state as DTensors of the parameters' shape, as Adam does"
        )


def copy_whole(values: torch.Tensor, into: torch.Tensor, name: str) -> None:
    """Copy to a DTensor what this process holds of it, from the whole."""
    for piece in held_pieces(into, name):
        piece.tensor.copy_(cut(values, piece))


def cut(values: Any, piece: LocalPiece) -> Any:
    """The part of a whole tensor or array where a piece lies."""
    if values.ndim == 0:
        return values
    taken = values[piece.first_row : piece.first_row + piece.tensor.shape[0]]
    if values.ndim == 1:
        return taken
    return taken[:, piece.first_column : piece.first_column + piece.tensor.shape[1]]


def spread_like(values: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """State of a DTensor's optimizer, spread as the parameter is, from the whole."""
    if values.shape != parameter.shape:
        raise ModelMismatchError(
            f"{name} is stored as {tuple(values.shape)}, and the parameter {tuple(parameter.shape)} is a DTensor: "
            "it is not known how to split it over the ranks; load without the optimizer"
        )
    made = torch.empty_like(parameter.detach(), dtype=values.dtype)
    copy_whole(values, made, name)
    return made


def reshard(model: nn.Module) -> None:
    """Have the modules of FSDP2 hold their parameters as DTensors, as between a step and the next forward."""
    base = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if base is None:
        return
    for module in model.modules():
        if isinstance(module, base):
            module.reshard()


def check_no_flat_parameters(model: nn.Module) -> None:
    """Check that no module is FSDP1's: its parameters are pieces of flat ones, under names of its own."""
    base = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if base is not None and any(isinstance(module, base) for module in model.modules()):
        raise UnsupportedModelError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1): shard it by FSDP2's fully_shard, which is "
            "fsdp_version=2 in Accelerate"
        )
