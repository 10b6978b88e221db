"""The ids seen after any resumption are those of an uninterrupted run over a plain loader."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from itertools import chain
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import cnr_store
from cnr_store import TrackedReader
from tests.nightly import NIGHT
from tests.test_store.training.data.loaders import (
    BATCH,
    MAKE,
    PERSISTENT,
    SAMPLES,
    ByEpoch,
    Ids,
    Loader,
    Make,
    Plain,
    seeded,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's call
]

EPOCHS = 2


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def step(model: nn.Module, seen: list[list[int]], batch: Any) -> None:
    """Training draws random numbers of every kind, too."""
    torch.rand(2)
    np.random.rand()
    random.random()
    model(torch.as_tensor(batch))
    seen.append(np.ravel(np.asarray(batch)).tolist())


def uninterrupted(loader: Loader) -> list[list[int]]:
    """What a loop over the plain loader sees."""
    seed()
    model = nn.Embedding(SAMPLES, 2)
    seen: list[list[int]] = []
    for epoch in range(EPOCHS):
        if isinstance(getattr(loader, "sampler", None), ByEpoch):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # just looked
        for batch in loader:
            step(model, seen, batch)
    return seen


def saved_at_every_batch(store: Path, reader: Any, epochs: Iterable[int]) -> list[list[int]]:
    """The same loop over a reader, saving before the first batch, after each, and between epochs."""
    seed()
    model = nn.Embedding(SAMPLES, 2)
    seen: list[list[int]] = []
    with cnr_store.Checkpointer(store, model) as checkpointer:
        checkpointer.save(0, reader, metadata=0)
        for _ in epochs:
            for batch in reader:
                step(model, seen, batch)
                checkpointer.save(2 * len(seen), reader, metadata=len(seen))
            checkpointer.save(2 * len(seen) + 1, reader, metadata=len(seen))
    return seen


def resumed(store: Path, version: Any, reader: Any) -> list[list[int]]:
    """What a new process sees from a version on."""
    model = nn.Embedding(SAMPLES, 2)
    seen: list[list[int]] = []
    with cnr_store.Checkpointer(store, model) as checkpointer:
        restored = checkpointer.load(version)
        reader.load_state_dict(restored.reader)
        while reader.epoch < EPOCHS:
            for batch in reader:
                step(model, seen, batch)
    return seen


def check_every_position(store: Path, make: Make, workers: int, every: int = 1, epochs: int = EPOCHS) -> None:
    """Resume from each position in the first `epochs` and at their border, to the end of all."""
    expected = uninterrupted(make(workers))
    assert saved_at_every_batch(store, TrackedReader(make(workers)), range(EPOCHS)) == expected
    versions = cnr_store.versions(store)
    assert len(versions) == 1 + len(expected) + EPOCHS
    for info in versions[: len(versions) * epochs // EPOCHS + 1 : every]:
        assert resumed(store, info, TrackedReader(make(workers))) == expected[info.metadata :], info


@pytest.mark.slow
@pytest.mark.each_by_day
@pytest.mark.parametrize("kind", MAKE)
def test_resuming_at_every_batch_without_workers(tmp_path: Path, kind: str) -> None:
    check_every_position(tmp_path, MAKE[kind], 0)


@pytest.mark.some_by_day(2)
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "shuffled by a generator", "stream"])
def test_resuming_at_every_batch_with_workers(tmp_path: Path, kind: str, workers: int) -> None:
    # The second epoch's positions are no others to a worker, and processes take long to start.
    check_every_position(tmp_path, MAKE[kind], workers, every=1 if NIGHT else 2, epochs=1)


@pytest.mark.slow
def test_resuming_with_workers_that_stay(tmp_path: Path) -> None:
    """They draw their seeds once, from the generator that shuffles."""
    check_every_position(tmp_path, PERSISTENT, 1)


@pytest.mark.slow
def test_workers_that_stay_end_with_their_reader() -> None:
    """Not at a later collection of garbage: by then there may be many."""
    reader = TrackedReader(PERSISTENT(1))
    gc.collect()
    gc.disable()
    try:
        before = {child.pid for child in active_children()}
        next(iter(reader))
        state = reader.state_dict()
        reader = TrackedReader(PERSISTENT(1))
        reader.load_state_dict(state)
        next(iter(reader))
        assert {child.pid for child in active_children()} > before
        del reader
        assert {child.pid for child in active_children()} <= before
    finally:
        gc.enable()


def test_resuming_anything_that_can_be_iterated(tmp_path: Path) -> None:
    check_every_position(tmp_path, lambda _: Plain(), 0)


@pytest.mark.parametrize("shuffled", [False, True])
def test_resuming_torchdatas_loader_as_it_is(tmp_path: Path, shuffled: bool) -> None:
    """It keeps its position itself: in the epoch, that is. How it shuffles the next one is its own affair."""

    def make() -> Any:
        return StatefulDataLoader(Ids(), BATCH, shuffle=shuffled, generator=seeded())

    expected, an_epoch = uninterrupted(make()), -(-SAMPLES // BATCH)
    assert saved_at_every_batch(tmp_path, make(), range(EPOCHS)) == expected
    for info in cnr_store.versions(tmp_path)[1:]:
        if info.step % 2:
            continue  # between epochs: as after the last batch
        model, reader = nn.Embedding(SAMPLES, 2), make()
        seen: list[list[int]] = []
        with cnr_store.Checkpointer(tmp_path, model) as checkpointer:
            reader.load_state_dict(checkpointer.load(info).reader)
            while len(seen) + info.metadata < len(expected):
                for batch in reader:
                    step(model, seen, batch)
        left = -info.metadata % an_epoch
        assert seen[:left] == expected[info.metadata :][:left], info
        assert sorted(chain(*seen[left:])) == sorted(list(range(SAMPLES)) * (len(seen[left:]) // an_epoch))
        assert shuffled or seen == expected[info.metadata :], info
