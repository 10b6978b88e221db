"""A job of threads that share two small tables by rows, what its model must hold, and storage that fails it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import Backend
from cnr_store.format import grid
from cnr_store.ranks.placement import Piece
from tests.test_store.ranks.support.spread_model import Cut, TableKind
from tests.test_store.ranks.support.thread_job import ThreadJob, Truth, changed, find_spread_models
from tests.test_store.stateful.conftest import GRID_LIMITS_BYTES
from tests.test_store.support.same_arrays import assert_same_arrays

KINDS = (
    TableKind("A", 400, 8, torch.float32, {"momentum1": True}),
    TableKind("B", 300, 8, torch.float32, {}),
)


def find_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpointers find the tables of a `SmallJob`, in shards of which ranks share some."""
    find_spread_models(monkeypatch)
    for name, nbytes in GRID_LIMITS_BYTES.items():
        monkeypatch.setattr(grid, name, nbytes)


class SmallJob(ThreadJob):
    """The ranks of one job.

    Attributes
    ----------
    truth
        What the model holds.
    """

    def __init__(self, url: str | Sequence[Backend], world: int = 2, **options: Any) -> None:
        cuts = {kind.name: _by_rows(kind, world) for kind in KINDS}
        super().__init__(
            url,
            world,
            KINDS,
            cuts,
            **{"bits": 32, "policy": "consecutive", "tracking": cnr_store.Tracking(audit=False), **options},
        )
        self._random = np.random.default_rng(0)
        self.truth = self.new_truth(self._random)
        self.fill(self.truth)

    def train(self, step: int) -> None:
        """Change some rows of each table."""
        for kind in KINDS:
            ids = np.arange(step % 7, kind.rows, 7)
            self.truth = changed(self.truth, kind.name, ids, self._random, self)
            self.change(kind.name, ids, self.truth, self._random.spawn(1)[0])

    def check(self) -> None:
        """Check that the model holds the truth."""
        assert_same(self.found(), self.truth)


def _by_rows(kind: TableKind, world: int) -> Cut:
    edges = [kind.rows * rank // world for rank in range(world + 1)]
    pieces = [
        Piece(begin, end - begin, 0, kind.dim, rank) for rank, (begin, end) in enumerate(pairwise(edges))
    ]
    return Cut((0,), tuple(pieces))


def assert_same(found: Truth, expected: Truth) -> None:
    """Both are equal bit for bit."""
    assert_same_arrays(
        *({"/".join(key): values for key, values in each.items()} for each in (found, expected))
    )


def load_alone(url: str, version: str | int = "latest") -> Truth:
    """What one process loads."""
    with SmallJob(url, 1) as job:
        job.load(version)
        return job.found()


class Watched:
    """A backend that calls a function with the name of each operation and its key, before it begins."""

    def __init__(self, inner: Any, before: Callable[[str, str], None]) -> None:
        self._inner = inner
        self._before = before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._before(name, str(arguments[0]) if arguments else "")
            return found(*arguments, **named)

        return call


def watch_reads(job: ThreadJob, rank: int, before: Callable[[str], None]) -> None:
    """Have a function called with the key of each piece of an array that a rank is about to read."""

    def pieces_only(_: str, key: str) -> None:
        if "/c/" in key:
            before(key)

    backend = job.checkpointers[rank]._loader.backend
    backend.inner = Watched(backend.inner, pieces_only)  # type: ignore[assignment]


def watch_writes(job: ThreadJob, rank: int, before: Callable[[str, str], None]) -> None:
    """Have a function called with each operation of a rank's saves, and its key."""
    writer: Any = job.checkpointers[rank]._saves.writer
    writer._direct = writer.backend.inner = Watched(writer._direct, before)
