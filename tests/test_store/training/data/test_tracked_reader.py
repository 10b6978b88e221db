"""A reader's intervals, its position, and the random numbers that it and training draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from cnr_store import OptionError, TrackedReader
from cnr_store.training.data.loader_replay import is_same_state
from cnr_store.training.model.rng_state import rng_state
from tests.test_store.training.data.loaders import BATCH, MAKE, SAMPLES, Ids, OwnOrder, seeded, taken

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# Intervals


def test_intervals_hold_the_rest_for_the_next_one() -> None:
    loader = DataLoader(Ids(), BATCH, shuffle=True, generator=seeded())
    reader = TrackedReader(DataLoader(Ids(), BATCH, shuffle=True, generator=seeded()))
    parts = [taken(reader.interval(batches)) for batches in (2, 0, 3, 4)]
    assert [len(part) for part in parts] == [2, 0, 3, 4]
    assert list(chain(*parts)) == [*taken(loader), *taken(loader), *taken(loader)]
    assert (reader.epoch, reader.batch) == (2, 3)


def test_an_interval_has_the_length_that_is_left() -> None:
    reader = TrackedReader(DataLoader(Ids(), BATCH))
    interval = reader.interval(7)  # over three epochs
    lengths = [len(interval) for _ in interval]
    assert (lengths, len(interval), list(interval)) == ([6, 5, 4, 3, 2, 1, 0], 0, [])
    assert len(reader.interval(0)) == 0
    assert len(TrackedReader(iter([1])).interval(5)) == 5  # of a loader that has none


@pytest.mark.slow
def test_what_workers_fetched_ahead_is_not_counted(tmp_path: Path) -> None:
    def make() -> TrackedReader[Any]:
        return TrackedReader(DataLoader(Ids(40), 2, num_workers=2, prefetch_factor=4))

    reader = make()
    first = taken(reader.interval(5))
    again = make()
    again.load_state_dict(reader.state_dict())
    assert first + taken(again) == first + taken(reader) == taken(DataLoader(Ids(40), 2))


def test_an_interval_of_nothing_is_refused() -> None:
    reader = TrackedReader(list[int]())
    with pytest.raises(OptionError, match="no batch in epoch 0, and the interval needs 2 more"):
        list(reader.interval(2))
    with pytest.raises(OptionError, match="batches=-1"):
        reader.interval(-1)


# Positions


def test_a_loop_that_was_left_goes_on() -> None:
    reader = TrackedReader(DataLoader(Ids(), BATCH))
    for batch in reader:
        assert batch.tolist() == [0, 1, 2]
        break
    assert (reader.epoch, reader.batch) == (0, 1)
    assert taken(reader) == [[3, 4, 5], [6, 7]]
    assert (reader.epoch, reader.batch) == (1, 0)


@pytest.mark.parametrize("sampler", [None, OwnOrder])
def test_samples_of_batches_taken_are_not_read_again(sampler: Callable[[], Sampler[int]] | None) -> None:
    def make(data: Ids) -> TrackedReader[Any]:
        return TrackedReader(DataLoader(data, BATCH, sampler=sampler and sampler()))

    reader, data = make(Ids()), Ids()
    list(reader.interval(2))
    again = make(data)
    again.load_state_dict(reader.state_dict())
    rest = taken(again)
    assert data.read == list(chain(*rest))
    assert len(data.read) == SAMPLES - 2 * BATCH


def test_going_back_in_one_process() -> None:
    reader = TrackedReader(MAKE["shuffled by a generator"](0))
    states, seen = [reader.state_dict()], []
    for _ in range(5):
        seen += taken(reader.interval(1))
        states.append(reader.state_dict())
    for position in (2, 0, 4, 3):
        reader.load_state_dict(states[position])
        assert reader.state_dict().keys() == states[position].keys()
        assert taken(reader.interval(5 - position)) == seen[position:]


@pytest.mark.parametrize("kind", MAKE)
def test_resuming_draws_no_random_number_of_training(kind: str) -> None:
    reader = TrackedReader(MAKE[kind](0))
    list(reader.interval(2))
    again = TrackedReader(MAKE[kind](0))
    again.load_state_dict(reader.state_dict())
    torch.rand(3)
    random.random()
    before = rng_state()
    list(again.interval(1))
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]


class Drawn(Ids):
    """Each sample comes with a random number of the worker's."""

    def __getitem__(self, sample: int) -> Any:
        return sample, random.random(), torch.rand(1)


class DrawingForEach(Sampler[int]):
    """Draws a number for each sample."""

    def __init__(self, generator: random.Random | None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        left = list(range(20))
        while left:
            yield left.pop((self.generator or random).randrange(len(left)))


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("draws", ["own", "shared", "global", "global elsewhere"])
def test_a_sampler_that_draws_for_each_sample(
    caplog: pytest.LogCaptureFixture, draws: str, workers: int
) -> None:
    def make() -> tuple[TrackedReader[torch.Tensor], random.Random]:
        random.seed(3)
        torch.manual_seed(3)
        own = random.Random(3)
        sampler = DrawingForEach(None if draws.startswith("global") else own)
        loader = DataLoader(Ids(20), 2, sampler=sampler, num_workers=workers)
        return TrackedReader(loader), own

    def train(own: random.Random) -> None:
        torch.rand(1)
        if draws == "shared":
            own.random()
        if draws == "global":
            random.random()

    reader, own = make()
    expected = []
    for ids in reader:
        expected.append(ids.tolist())
        train(own)
        if len(expected) == 5:
            state, globally = reader.state_dict(), (random.getstate(), torch.get_rng_state())
    reader, own = make()
    reader.load_state_dict(state)
    random.setstate(globally[0])
    torch.set_rng_state(globally[1])
    found = []
    for ids in reader:
        found.append(ids.tolist())
        train(own)
    is_exact = draws in ("own", "global elsewhere")
    assert (found == expected[5:]) == is_exact
    is_told = any("a generator of its own" in record.getMessage() for record in caplog.records)
    assert is_told == (not is_exact)


@pytest.mark.parametrize("make", [RandomSampler, partial(RandomSampler, replacement=True)])
def test_a_generator_that_training_shares_goes_on(
    caplog: pytest.LogCaptureFixture, make: Callable[..., Sampler[int]]
) -> None:
    def train(reader: TrackedReader[torch.Tensor], generator: torch.Generator, batches: int) -> list[object]:
        drawn = (
            (ids.tolist(), torch.rand((), generator=generator).item()) for ids in reader.interval(batches)
        )
        return list(drawn)

    def readers() -> tuple[TrackedReader[torch.Tensor], torch.Generator]:
        generator = torch.Generator().manual_seed(5)
        samples = Ids(20)
        return TrackedReader(DataLoader(samples, 2, sampler=make(samples, generator=generator))), generator

    reader, generator = readers()
    train(reader, generator, 5)
    state = reader.state_dict()
    expected = train(reader, generator, 20)
    reader, generator = readers()
    reader.load_state_dict(state)
    assert is_same_state(reader.state_dict(), state)
    assert train(reader, generator, 20) == expected
    assert not caplog.records


@pytest.mark.slow
def test_replay_draws_in_workers_what_was_drawn_there() -> None:
    def make(replay: bool) -> TrackedReader[Any]:
        return TrackedReader(DataLoader(Drawn(), BATCH, num_workers=1, generator=seeded()), replay=replay)

    reader = make(True)
    list(reader.interval(1))
    state = reader.state_dict()
    expected = [batch[1:] for batch in reader]
    for replay in (True, False):
        again = make(replay)
        again.load_state_dict(state)
        found = [batch[1:] for batch in again]
        assert (
            all(
                torch.equal(a, b)
                for ours, theirs in zip(found, expected, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            )
            == replay
        )


class Fails(Ids):
    """A sample that can't be read the first time."""

    def __getitem__(self, sample: int) -> int:
        if sample == 4 and not self.read:
            self.read.append(sample)
            raise ConnectionError("not now")
        return sample


def test_a_batch_that_failed_is_given_out_when_it_can_be() -> None:
    reader = TrackedReader(DataLoader(Fails(), BATCH))
    assert len(taken(reader.interval(1))) == 1
    with pytest.raises(ConnectionError):
        next(iter(reader))
    assert reader.batch == 1
    assert taken(reader) == [[3, 4, 5], [6, 7]]


def test_generators_that_are_hidden_can_be_named() -> None:
    def make() -> TrackedReader[Any]:
        hidden = np.random.RandomState(7)

        class Hidden:
            def __iter__(self) -> Iterator[int]:
                return iter(hidden.permutation(SAMPLES).tolist())

        return TrackedReader(Hidden(), generators={"hidden": hidden})

    reader = make()
    list(reader.interval(SAMPLES + 2))
    again = make()
    again.load_state_dict(reader.state_dict())
    assert list(again.interval(20)) == list(reader.interval(20))


def test_its_length_is_its_loader_s() -> None:
    for loader in (DataLoader(Ids(), BATCH), DataLoader(Ids(), BATCH, drop_last=True), range(5)):
        reader: TrackedReader[Any] = TrackedReader(loader)
        assert len(reader) == len(loader)
        next(iter(reader))
        again: TrackedReader[Any] = TrackedReader(loader)
        again.load_state_dict(reader.state_dict())
        assert len(reader) == len(again) == len(loader) == 1 + len(list(again))
    with pytest.raises(TypeError, match="no len"):
        len(TrackedReader(iter([1])))


@pytest.mark.parametrize("loader", [[], iter([1]), range(5)])
def test_it_is_true_whatever_its_length(loader: Any) -> None:
    assert TrackedReader(loader)
