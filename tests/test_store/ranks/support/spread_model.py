"""Models whose tables ranks share as TorchRec shards them, made without TorchRec: plain tensors cut anyhow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from cnr_store.ranks.placement import Piece
from cnr_store.training.distributed.pieces import LocalPiece
from cnr_store.training.distributed.sharded import ShardedModule, ShardedTable, Slot
from cnr_store.training.distributed.torchrec import FusedOptimizer

Array = np.ndarray[Any, Any]
Random = np.random.Generator
PREFIX = "ebc.embedding_bags."


@dataclass(frozen=True)
class Cut:
    """How a table is cut over ranks.

    Attributes
    ----------
    columns
        The first column of each column shard, ascending.
    pieces
        What each rank holds. A box may be on several ranks, and a rank may hold none.
    """

    columns: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def of_rank(self, rank: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.rank == rank]

    def alone(self, rows: int, dim: int) -> Cut:
        """The same column shards, all on one rank."""
        spans = pairwise((*self.columns, dim))
        return Cut(self.columns, tuple(Piece(0, rows, left, right - left, 0) for left, right in spans))


def draw_cut(random: Random, rows: int, dim: int, world: int) -> Cut:
    """Rows cut into bands, some of them empty, whose columns are cut alike, each box on one rank or several."""
    columns = (0, *_inner_cuts(random, dim, int(random.choice([0, 0, 0, 1, 2]))))
    by_rows = random.random() < 0.7
    if by_rows and random.random() < 0.3:  # as TorchRec cuts rows: the last ranks may get none
        edges = [min(rank * -(-rows // world), rows) for rank in range(world + 1)]
    else:
        edges = [0, *_inner_cuts(random, rows, int(random.integers(world)) if by_rows else 0), rows]
    bands = [(begin, end) for begin, end in pairwise(edges) if begin < end]
    ranks = random.permutation(world).tolist()
    holders = [[ranks.pop()] for _ in bands]
    for rank in ranks:
        if random.random() < 0.6:  # else it holds nothing
            holders[random.integers(len(bands))].append(rank)
    replicates = random.random() < 0.3
    pieces = []
    for (begin, end), own in zip(bands, holders, strict=True):
        for left, right in pairwise((*columns, dim)):
            count = random.integers(len(own)) + 1 if replicates else 1
            chosen = random.choice(own, count, replace=False).tolist()
            pieces += [Piece(begin, end - begin, left, right - left, rank) for rank in chosen]
    return Cut(columns, tuple(pieces))


def _inner_cuts(random: Random, size: int, count: int) -> list[int]:
    count = min(count, size - 1)
    return sorted(random.choice(np.arange(1, size), count, replace=False).tolist())


@dataclass(frozen=True)
class TableKind:
    """A table, before it is cut.

    Attributes
    ----------
    slots
        State of its optimizer by name, and whether that is one number a row and column shard.
    slot_dtype
        Its element type.
    """

    name: str
    rows: int
    dim: int
    dtype: torch.dtype
    slots: Mapping[str, bool]
    slot_dtype: torch.dtype = torch.float32


class SpreadModel(nn.Module):
    """What one rank holds of some tables, beside a small dense part.

    Attributes
    ----------
    sharded
        What `find_sharded` finds in it.
    """

    def __init__(self, kinds: Sequence[TableKind], cuts: Mapping[str, Cut], rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = _Lookups([kind.name for kind in kinds])
        self.over = nn.Linear(3, 1)
        tables = [_sharded(kind, cuts[kind.name], rank) for kind in kinds]
        self.sharded = ShardedModule("ebc", self.ebc, tables)

    def arrays(self) -> dict[tuple[str, str], tuple[Slot | ShardedTable, list[LocalPiece]]]:
        """By table and slot ("" of the rows), the array and the pieces of it that are here."""
        found: dict[tuple[str, str], tuple[Slot | ShardedTable, list[LocalPiece]]] = {}
        for table in self.sharded.tables:
            name = table.name.removeprefix(PREFIX).removesuffix(".weight")
            found[name, ""] = table, table.pieces
            for slot, kept in table.slots.items():
                found[name, slot] = kept, kept.pieces
        return found


class _Lookups(nn.Module):
    """Stands for TorchRec's module: without lookups, and with an entry of the state dict for each table."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._lookups: list[nn.Module] = []
        self._names = names

    def _save_to_state_dict(self, destination: Any, prefix: str, _keep_vars: bool) -> None:
        for name in self._names:
            destination[f"{prefix}embedding_bags.{name}.weight"] = torch.empty(0)


def _sharded(kind: TableKind, cut: Cut, rank: int) -> ShardedTable:
    shape, own, dtype = (kind.rows, kind.dim), cut.of_rank(rank), kind.slot_dtype
    slots = {}
    for name, is_row_wise in kind.slots.items():
        if not is_row_wise:
            slots[name] = Slot(shape, (), _pieces(own, dtype))
        elif len(cut.columns) == 1:
            pieces = [LocalPiece(piece.first_row, 0, torch.zeros(piece.rows, dtype=dtype)) for piece in own]
            slots[name] = Slot(shape[:1], (), pieces)
        else:
            pieces = [
                LocalPiece(
                    *(piece.first_row, cut.columns.index(piece.first_column)),
                    torch.zeros(piece.rows, 1, dtype=dtype),
                )
                for piece in own
            ]
            slots[name] = Slot((kind.rows, len(cut.columns)), cut.columns, pieces)
    optimizer = FusedOptimizer("exact_row_wise_adagrad", kind.slots)
    return ShardedTable(
        f"{PREFIX}{kind.name}.weight",
        shape,
        kind.dtype,
        False,
        False,
        optimizer,
        slots,
        _pieces(own, kind.dtype),
    )


def _pieces(own: Sequence[Piece], dtype: torch.dtype) -> list[LocalPiece]:
    return [
        LocalPiece(piece.first_row, piece.first_column, torch.zeros(piece.rows, piece.columns, dtype=dtype))
        for piece in own
    ]
