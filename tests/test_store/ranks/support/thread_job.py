"""Jobs of several ranks, as threads with a model and a checkpointer each, that save and load for real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import Backend
from cnr_store import Checkpointer
from cnr_store.ranks.keyvalue import MemoryKeyValue
from cnr_store.training import checkpointer as checkpointer_module
from cnr_store.training.distributed import torchrec
from cnr_store.training.distributed.pieces import LocalPiece
from cnr_store.training.loading.load_result import Restored
from cnr_store.training.model import trained_model
from cnr_store.training.model.tensors import array_dtype
from cnr_store.training.tracking import tracker
from tests.test_store.ranks.support.rank_threads import ThreadGroup, on_threads
from tests.test_store.ranks.support.spread_model import Array, Cut, Random, SpreadModel, TableKind
from tests.test_store.support.same_arrays import differing

_here = threading.local()


def this_rank() -> int:
    """The number of the rank whose thread this is."""
    rank: int = _here.group.rank
    return rank


Truth = dict[tuple[str, str], Array]
"""By table and slot ("" of the rows), the whole array; bfloat16 as float32."""


def find_spread_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpointers find the tables of a `SpreadModel`, and the ranks of a `ThreadJob`."""
    monkeypatch.setattr(checkpointer_module, "job_group", lambda *_: _here.group)
    fakes = {
        "find_sharded": lambda modules: [dict(modules)[""].sharded],
        "take_fused": lambda optimizers: (list(optimizers), 0),
    }
    door = SimpleNamespace(**{**vars(torchrec), **fakes})
    for module in (trained_model, tracker):
        monkeypatch.setattr(module, "torchrec", lambda: door)


class ThreadJob:
    """The ranks of one job.

    Parameters
    ----------
    url
        Of all ranks, or what each of them has for it.
    cuts
        How each table is cut, by its name.
    timeout_seconds
        How long a rank may make no progress.
    options
        Of the checkpointers.
    """

    def __init__(
        self,
        url: str | Sequence[Backend],
        world: int,
        kinds: Sequence[TableKind],
        cuts: Mapping[str, Cut],
        timeout_seconds: float = 30,
        **options: Any,
    ) -> None:
        self.cuts, self.world = cuts, world
        self.kinds = {kind.name: kind for kind in kinds}
        self.models = [SpreadModel(kinds, cuts, rank) for rank in range(world)]
        urls: Sequence[str | Backend] = [url] * world if isinstance(url, str) else url
        keys = MemoryKeyValue()
        self.groups = [ThreadGroup(keys, rank, world, timeout_seconds) for rank in range(world)]
        own = {"job": cnr_store.Job(rng=False), **options}
        self.checkpointers: list[Checkpointer] = self.each(
            lambda rank: Checkpointer(urls[rank], self.models[rank], [], **own)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.each(lambda rank: self.checkpointers[rank].close())

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """Call a function on all ranks at once."""
        found = self.attempt(call)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    def attempt(self, call: Callable[[int], Any]) -> list[Any]:
        """The same, with what was raised among what was returned."""

        def run(rank: int) -> Any:
            _here.group = self.groups[rank]
            return call(rank)

        return on_threads(*(partial(run, rank) for rank in range(self.world)))

    def save(self, step: int, full: bool = False, wait: bool = True) -> None:
        def save(rank: int) -> None:
            pending = self.checkpointers[rank].save(step, full=full)
            if wait:
                pending.result()

        self.each(save)

    def load(self, version: str | int = "latest", **options: Any) -> list[Restored]:
        return self.each(lambda rank: self.checkpointers[rank].load(version, **options))

    def new_truth(self, random: Random) -> Truth:
        """Values for all arrays."""
        shapes = {key: array.shape for key, (array, _) in self.models[0].arrays().items()}
        return {key: _values(random, shape, self._dtype(key)) for key, shape in shapes.items()}

    def fill(self, truth: Truth) -> None:
        """Give all ranks these values."""
        for model in self.models:
            for key, (_, pieces) in model.arrays().items():
                for piece in pieces:
                    piece.tensor.copy_(torch.from_numpy(np.ascontiguousarray(_box(truth[key], piece))))

    def found(self) -> Truth:
        """The values on all ranks; replicas must agree."""
        truth: Truth = {}
        for key, (array, _) in self.models[0].arrays().items():
            whole = np.zeros(array.shape, array_dtype(self._dtype(key)))
            seen = np.zeros(array.shape, bool)
            for model in self.models:
                for piece in model.arrays()[key][1]:
                    values = piece.tensor.float() if piece.tensor.dtype is torch.bfloat16 else piece.tensor
                    part, before = _box(whole, piece), _box(seen, piece)
                    assert not before.any() or differing(part, values.numpy()) is None, (key, "replicas")
                    part[...], before[...] = values.numpy(), True
            assert seen.all(), (key, "a part that no rank has")
            truth[key] = whole
        return truth

    def change(self, table: str, ids: Array, truth: Truth, marks: Random) -> None:
        """Give rows of a table, and what is kept for them, the values of `truth`, and tell some holder of each row."""
        for model in self.models:
            for key, (_, pieces) in model.arrays().items():
                for piece in pieces if key[0] == table else ():
                    held = _held(ids, piece)
                    values = np.ascontiguousarray(_box(truth[key], piece)[held - piece.first_row])
                    piece.tensor[torch.from_numpy(held - piece.first_row)] = torch.from_numpy(values).to(
                        piece.tensor.dtype
                    )
        told = self._told(table, ids, marks)
        self.each(lambda rank: self.checkpointers[rank].touch(f"ebc.embedding_bags.{table}", told[rank]))

    def _told(self, table: str, ids: Array, marks: Random) -> list[Array]:
        """The rows that each rank is told of: each row on one rank at least that has a part of it."""
        holders = np.zeros((self.world, len(ids)), bool)
        for piece in self.cuts[table].pieces:
            holders[piece.rank] |= (ids >= piece.first_row) & (ids < piece.first_row + piece.rows)
        drawn = np.where(holders, marks.random(holders.shape), 2)
        told = holders & ((drawn < 0.6) | (drawn == drawn.min(axis=0)))
        return [ids[each] for each in told]

    def _dtype(self, key: tuple[str, str]) -> torch.dtype:
        kind = self.kinds[key[0]]
        return kind.slot_dtype if key[1] else kind.dtype


def changed(truth: Truth, table: str, ids: Array, random: Random, job: ThreadJob) -> Truth:
    """The same values, but other ones in these rows of a table and of what is kept for them."""
    fresh = job.new_truth(random)
    out = dict(truth)
    for key, values in truth.items():
        if key[0] == table:
            out[key] = values.copy()
            out[key][ids] = fresh[key][ids]
    return out


def _values(random: Random, shape: Sequence[int], dtype: torch.dtype) -> Array:
    values = torch.from_numpy(random.normal(size=tuple(shape)).astype(np.float32)).to(dtype)
    return (values.float() if dtype is torch.bfloat16 else values).numpy()


def _box(whole: Array, piece: LocalPiece) -> Array:
    rows = whole[piece.first_row : piece.first_row + len(piece.tensor)]
    if whole.ndim == 1:
        return rows
    return rows[:, piece.first_column : piece.first_column + piece.tensor.shape[1]]


def _held(ids: Array, piece: LocalPiece) -> Array:
    return ids[(ids >= piece.first_row) & (ids < piece.first_row + len(piece.tensor))]
