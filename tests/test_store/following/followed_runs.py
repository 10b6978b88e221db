"""Jobs whose versions are followed, and what their updates bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store import (
    Checkpointer,
    Update,
    VersionInfo,
)
from cnr_store.catalog.catalog import Url
from cnr_store.following.follow import Since
from cnr_store.policies.policy import PolicyName

ROWS, DIM = 4000, 8


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, DIM, sparse=True, dtype=dtype)
        self.items = nn.Embedding(300, DIM, sparse=True, dtype=dtype)
        self.top = nn.Linear(DIM, 1).to(dtype)

    def forward(self, users: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.users(users) + self.items(users % 300))
        return out.float().sum()


class Run:
    """A job that trains on chosen users, with lossless rows unless told otherwise."""

    def __init__(
        self, place: Path, policy: PolicyName = "intermittent", bits: int = 32, **model: Any
    ) -> None:
        self.place = place
        torch.manual_seed(0)
        self.model = Model(**model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.checkpointer = Checkpointer(place, self.model, self.optimizer, policy=policy, bits=bits)
        self.step = 0

    def save(self, *users: int, full: bool = False) -> VersionInfo:
        if users:
            self.optimizer.zero_grad()
            self.model(torch.tensor(users)).backward()
            self.optimizer.step()
        self.step += 1
        return self.checkpointer.save(self.step, full=full).result()


def rows_of(update: Update, name: str = "users.weight") -> list[int]:
    found = [block.rows for block in update.blocks() if block.name == name]
    return [int(row) for rows in found if rows is not None for row in rows]


def only(url: Url, since: Since) -> Update:
    (update,) = cnr_store.follow(url, since)
    return update


class Counting(FaultyBackend):
    """Counts the bytes read."""

    def __init__(self, place: Path) -> None:
        super().__init__(open_backend(place), lambda *_: None)
        self.nbytes = 0

    def _get(self, key: str) -> bytes:
        return self._counted(super()._get(key))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._counted(super()._get_range(key, start, length))

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._counted(super()._get_suffix(key, length))

    def _counted(self, data: bytes) -> bytes:
        with self._lock:
            self.nbytes += len(data)
        return data
