"""Versions and folds hold payloads of version 3; a payload of a newer release is told as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import open_backend, parse_index
from cnr_codecs import LosslessRows, rows_written
from cnr_store import FormatError
from cnr_store.format import layout
from tests.test_codecs.payload_bytes import header, segment

ROWS = 40


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, 8, sparse=True)
        self.top = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.top(self.users(ids))
        return score


def train(model: Table, optimizer: torch.optim.Optimizer, ids: list[int]) -> None:
    optimizer.zero_grad()
    model(torch.tensor(ids)).sum().backward()
    optimizer.step()


def test_versions_and_folds_hold_version_3(tmp_path: Path) -> None:
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cnr_store.Checkpointer(tmp_path, model, optimizer, policy="consecutive") as checkpointer:
        for step, ids in enumerate(([1, 2], [5, 30])):
            train(model, optimizer, ids)
            info = checkpointer.save(step).result()
            backend, path = open_backend(tmp_path), layout.weight_path("users")
            shard = backend.get(layout.version_key(info.id, path, "c/0/0"))
            index = parse_index(shard[-(16 + 4) :], 1, len(shard))
            chunk = shard[: index.lengths[0]]
            assert chunk[4] == 3
            seal = layout.seal(info.id, path, 0, 0)
            assert rows_written(chunk, seal=seal).tolist() == (ids if step else list(range(ROWS)))
    assert cnr_store.compact(tmp_path).outcome == "folded"
    (shard_file,) = (tmp_path / "folds" / info.id).glob("*/tables/users/weight/c/0/0")
    assert shard_file.read_bytes()[4] == 3


class LaterRelease(LosslessRows):
    """Writes whole tables as a release with another scheme does; its probe of two rows is stored as it is."""

    def encode_rows(self, values: Any, offsets: Any, rows: int, *, element: str, seal: int = 0) -> bytes:
        if len(values) == 2:
            return super().encode_rows(values, offsets, rows, element=element, seal=seal)
        coded = segment(8, 0, 0, 0, len(values), np.ascontiguousarray(values).tobytes())
        return (header(1, rows, values.shape[1], seal=seal) + coded).encode()


def test_payloads_of_a_newer_release_are_no_damage(tmp_path: Path) -> None:
    cnr_store.save(tmp_path, Table(), codec={"users": LaterRelease()})
    with pytest.raises(FormatError, match=r"users.*scheme 8.*newer release"):
        cnr_store.state_dict(tmp_path)
    (problem,) = cnr_store.verify(tmp_path, deep=True).problems
    assert "newer release" in problem.what
