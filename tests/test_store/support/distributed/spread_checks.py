"""What must hold on every rank of tensors that torch spreads over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard as ShardOfTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.distributed.pieces import LocalPiece, local_pieces


def _whole(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


def _spread(whole: torch.Tensor, placements: Sequence[Placement], *sizes: int) -> DTensor:
    mesh = init_device_mesh("cpu", sizes or (dist.get_world_size(),))
    return distribute_tensor(whole, mesh, placements)


def _check(value: torch.Tensor, whole: torch.Tensor, copies: int = 1) -> list[LocalPiece]:
    """Pieces hold their boxes of `whole`, live; all ranks' together hold each element `copies` times."""
    pieces = local_pieces(value, "t")
    covered = torch.zeros(whole.shape, dtype=torch.int64)
    for piece in pieces:
        rows = slice(piece.first_row, piece.first_row + len(piece.tensor))
        columns = slice(piece.first_column, piece.first_column + piece.tensor.shape[-1])
        box = (rows, columns) if whole.ndim > 1 else (rows,)
        assert torch.equal(piece.tensor, whole[box])
        covered[box] += 1
    dist.all_reduce(covered)
    assert (covered == copies).all()
    assert all(piece.tensor.numel() for piece in pieces)
    assert not any(piece.tensor.requires_grad for piece in pieces)
    return pieces


def rows_are_shared() -> None:
    """Also unevenly, and so that ranks have none."""
    for rows in (12, 7, 2, 1):
        whole = _whole(rows, 3)
        value = _spread(whole, [Shard(0)])
        pieces = _check(torch.nn.Parameter(value), whole)
        for piece in pieces:
            piece.tensor.fill_(-1.0)
        assert (value.to_local() == -1.0).all()
    _check(_spread(torch.arange(7.0), [Shard(0)]), torch.arange(7.0))


def columns_are_shared() -> None:
    _check(_spread(_whole(5, 7), [Shard(1)]), _whole(5, 7))


def replicas_are_whole() -> None:
    (piece,) = _check(_spread(_whole(5, 7), [Replicate()]), _whole(5, 7), dist.get_world_size())
    assert (piece.first_row, piece.first_column) == (0, 0)


def meshes_have_two_dimensions() -> None:
    if dist.get_world_size() != 4:
        return
    whole = _whole(7, 5)
    _check(_spread(whole, [Replicate(), Shard(0)], 2, 2), whole, copies=2)
    _check(_spread(whole, [Shard(0), Shard(1)], 2, 2), whole)
    _check(_spread(whole, [Shard(1), Shard(0)], 2, 2), whole)
    _check(_spread(whole, [Shard(0), Shard(0)], 2, 2), whole)


def sums_are_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = DTensor.from_local(_whole(2, 2), mesh, [Partial()], run_check=False)
    with pytest.raises(
        UnsupportedModelError, match=r"^head is a DTensor with .* part of a sum; redistribute"
    ):
        local_pieces(value, "head")


def third_dimensions_stay_whole() -> None:
    world = dist.get_world_size()
    if world > 1:
        with (
            pytest.raises(UnsupportedModelError, match="after the second") if dist.get_rank() else _nothing()
        ):
            local_pieces(_spread(torch.zeros(2, 2, world), [Shard(2)]), "t")


def _nothing() -> Any:
    return pytest.MonkeyPatch.context()


def a_sharded_tensor_has_many_shards() -> None:
    """Or none, on all ranks but the last."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = _whole(6, 4)
    shards = [
        ShardOfTensor(
            whole[:, first : first + 2].clone(),
            ShardMetadata([0, first], [6, 2], f"rank:{rank}/cpu"),
        )
        for first in (0, 2)
        if rank == world - 1
    ]
    value: Any = sharded_tensor.init_from_local_shards(shards, 6, 4)
    pieces = _check(value, whole)
    assert len(pieces) == len(shards)
    assert [p.tensor.data_ptr() for p in pieces] == [s.tensor.data_ptr() for s in shards]


CHECKS: dict[str, Callable[[], None]] = {
    "rows": rows_are_shared,
    "columns": columns_are_shared,
    "replicas": replicas_are_whole,
    "two dimensions": meshes_have_two_dimensions,
    "sums": sums_are_refused,
    "third dimension": third_dimensions_stay_whole,
    "sharded tensor": a_sharded_tensor_has_many_shards,
}
