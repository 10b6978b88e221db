"""A follower of plain arrays, and one of a model, each held to what its version says."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

import cnr_store
from cnr_backends import Backend
from cnr_store import Block, Update
from tests.test_store.support.small_model import Array, SmallModel, make_model

GARBAGE = -77


class Follower:
    """Holds arrays by name. What an update does not bring stays as it was, and what it calls whole is spoiled first."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.arrays: dict[str, Array] = {}
        self.since: list[str] | None = None
        self.rows_taken = 0

    def catch_up(self, blocks: int | None = None) -> list[Update]:
        """Take all updates, or that many blocks and then break off. Returns the updates that were taken."""
        return self.take_all(cnr_store.follow(self.backend, self.since), blocks)

    def take_all(self, updates: Iterable[Update], blocks: int | None = None) -> list[Update]:
        taken: list[Update] = []
        for update in updates:
            self._begin(update)
            for block in update.blocks():
                if blocks == 0:
                    return taken
                self._take(update, block)
                blocks = None if blocks is None else blocks - 1
            self._finish(update)
            taken.append(update)
        return taken

    def _begin(self, update: Update) -> None:
        for name in update.whole:
            info = update.arrays[name]
            self.arrays[name] = np.full(info.shape, GARBAGE, info.dtype)
        if self.since is None:
            return
        # As a follower that keeps its arrays would write it down before it changes them.
        self.since = sorted({*self.since, update.version.id})

    def _take(self, update: Update, block: Block) -> None:
        name, rows, values = block
        info = update.arrays[name]
        assert values.dtype == info.dtype
        if rows is None:
            assert not info.is_table
            self.arrays[name] = values.copy()
            return
        assert info.is_table
        assert rows.dtype == np.int64
        assert len(rows) == len(values) > 0
        assert (np.diff(rows) > 0).all()
        self.arrays[name][rows] = values
        self.rows_taken += len(rows)

    def _finish(self, update: Update) -> None:
        for name in update.removed:
            del self.arrays[name]
        self.since = [update.version.id]
        self.check(update.version.id)

    def check(self, version: str) -> None:
        expected = cnr_store.state_dict(self.backend, version)
        assert self.arrays.keys() == expected.keys()
        for name, values in expected.items():
            assert self.arrays[name].tobytes() == values.tobytes(), name


class ModelFollower:
    """A model that takes updates by `apply`, and is compared with one that loads. It keeps the codes that it saw."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.model, _ = make_model("sgd", seed=999)
        self.last: Update | None = None

    @property
    def since(self) -> str | None:
        """The version that it holds."""
        return None if self.last is None else self.last.version.id

    def catch_up(self) -> None:
        for update in cnr_store.follow(self.backend, self.last):
            update.apply(self.model)
            self.last = update
            check_model(self.backend, self.model, update.version.id)


def check_model(backend: Backend, model: SmallModel, version: str) -> None:
    loaded, _ = make_model("sgd", seed=0)
    cnr_store.load(backend, loaded, version=version)
    for name, values in loaded.state_dict().items():
        assert torch.equal(model.state_dict()[name].view(torch.int32), values.view(torch.int32)), name
