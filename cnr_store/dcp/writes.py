"""Turns placed tensors into what a version is to hold of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cnr_codecs import RowCodec, array_dtype
from cnr_store.dcp.boxes import LocalItems, PlacedTensor
from cnr_store.training.model.tensors import AnyArray, dense_numpy, dtype_named
from cnr_store.writing.plan import DenseWrite, Held, RowsWrite
from cnr_store.writing.team import Team


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor of the state dict, from the parts of its columns side by side. They are read when encoded."""

    parts: Sequence[torch.Tensor]
    element: str

    def block(self, begin: int, end: int) -> AnyArray:
        out = np.empty((end - begin, sum(part.shape[1] for part in self.parts)), array_dtype(self.element))
        target, column = torch.from_numpy(out), 0
        for part in self.parts:
            target[:, column : column + part.shape[1]] = part[begin:end]
            column += part.shape[1]
        return out


def rows_write(
    tensor: PlacedTensor, local: LocalItems, whole: Mapping[str, torch.Tensor], team: Team, codec: RowCodec
) -> RowsWrite:
    """An array of rows to write, of which this rank may have all, some or none."""
    parts: list[tuple[int, int, torch.Tensor]] = []
    if tensor.name in whole:
        parts = [(0, 0, whole[tensor.name])]
    elif tensor.owner in (-1, team.rank) and tensor.name in local.tensors:
        parts = [
            (offsets[0], (*offsets, 0)[1], part)
            for offsets, part in local.tensors[tensor.name][1]
            if part.numel()
        ]
    columns = sorted(
        ((column, first, part if part.ndim == 2 else part[:, None]) for first, column, part in parts),
        key=lambda each: each[0],
    )
    held = None
    if team.world > 1:
        assert tensor.placement is not None  # that of every array of rows is known
        first_row, rows = (columns[0][1], len(columns[0][2])) if columns else (0, 0)
        spans = tuple((column, part.shape[1]) for column, _, part in columns)
        held = Held(first_row, rows, spans, tensor.placement, None)
    return RowsWrite(
        path=tensor.path,
        shape=tensor.rows_shape,
        element=tensor.element,
        base=None,
        ids=None,
        source=TensorRows([part for _, _, part in columns], tensor.element),
        codec=codec,
        held=held,
    )


def dense_write(
    tensor: PlacedTensor, local: LocalItems, whole: Mapping[str, torch.Tensor], rank: int
) -> DenseWrite:
    """A dense array to write, on the rank that has it."""
    if tensor.owner == rank and 0 not in tensor.shape:
        values = whole[tensor.name] if tensor.name in whole else local.tensors[tensor.name][1][0][1]
        return DenseWrite(tensor.path, *dense_numpy(values))
    empty, torch_dtype = dense_numpy(torch.empty(0, dtype=dtype_named(tensor.element), device="cpu"))
    return DenseWrite(
        tensor.path, placeholder(tensor.shape, empty.dtype), torch_dtype, is_here=tensor.owner == rank
    )


def placeholder(shape: Sequence[int], dtype: np.dtype[Any]) -> AnyArray:
    """An array of a shape and type that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))
