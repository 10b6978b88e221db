"""What a process holds of a tensor, whole or spread over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.distributed.pieces import local_pieces
from tests.nightly import at_night
from tests.test_store.ranks.support.rank_processes import preload, run_ranks
from tests.test_store.support.distributed import rank_training, spread_checks
from tests.test_store.support.distributed.ranks import group, run_checks
from tests.test_store.training.distributed.test_ddp import values


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (0, 2), (2, 3, 4)])
def test_a_plain_tensor_is_one_piece(shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(shape))
    (piece,) = local_pieces(parameter, "t")
    assert piece.tensor.shape == shape
    assert (piece.first_row, piece.first_column) == (0, 0)
    assert not piece.tensor.requires_grad
    piece.tensor.fill_(1.0)
    assert (parameter == 1.0).all()


@pytest.mark.parametrize(
    "value", [torch.zeros(2, 2, device="meta"), torch.zeros(2, 2).to_sparse()], ids=["meta", "sparse"]
)
def test_a_tensor_without_plain_memory_is_refused(value: torch.Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^head is a Tensor of layout .* materialize it first$"):
        local_pieces(value, "head")


def test_in_one_process(tmp_path: Path) -> None:
    with group(str(tmp_path / "store"), 0, 1):
        for check in spread_checks.CHECKS.values():
            check()


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, at_night(4)])
def test_over_ranks(world: int) -> None:
    preload(*rank_training.PRELOAD)
    values(run_ranks(world, run_checks, spread_checks.__name__, deadline_seconds=300))
