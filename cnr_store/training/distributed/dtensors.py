"""Parameters that torch spreads over ranks as DTensors, as FSDP2 does, and state of optimizers that follows them.

Nothing here communicates. FSDP2's class is looked up among the modules that are imported already.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from cnr_store.errors import ModelMismatchError, UnsupportedModelError
from cnr_store.training.distributed.pieces import LocalPiece, is_a, local_pieces

_PLAIN = (torch.Tensor, nn.Parameter)
_EXACT = ("Shard", "Replicate")


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
