"""Loads the golden store of two ranks into TorchRec's modules."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import cnr_store
from cnr_store.format.layout import slot_path, table_name
from cnr_store.training.distributed.torchrec import find_sharded
from cnr_store.training.model.names import named_modules
from tests.test_store.support.distributed.sharded_model import sharded_model


def load(url: str) -> list[list[Any]]:
    """Load on each rank. Returns what its memory has then: path, first row and column, values (rows, columns)."""
    model = sharded_model(dist.get_world_size())
    with cnr_store.Checkpointer(url, model, [model.fused_optimizer]) as checkpointer:
        checkpointer.load()
    found: list[list[Any]] = []
    for module in find_sharded(named_modules(model)):
        for table in module.tables:
            name = table_name(table.name)
            held = {"weight": table.pieces, **{slot: kept.pieces for slot, kept in table.slots.items()}}
            for slot, pieces in held.items():
                found += [
                    [
                        *(slot_path(name, slot), piece.first_row, piece.first_column),
                        piece.tensor.reshape(len(piece.tensor), -1).numpy().copy(),
                    ]
                    for piece in pieces
                ]
    return found
