"""A reader's position: the ids seen after any resumption are those of an uninterrupted run over a plain loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import cnr_store
from cnr_store import OptionError, TrackedReader
from cnr_store.training.data.generators import is_same_state
from cnr_store.training.model.rng_state import rng_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's call
]

SAMPLES, BATCH, EPOCHS = 8, 3, 2
Loader = Iterable[Any]
Make = Callable[[int], Loader]


class Ids(Dataset[int]):
    """Sample i is i; each one read is noted, where it is read in this process."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> int:
        self.read.append(sample)
        return sample


class Stream(IterableDataset[int]):
    """The ids in an order that Python's and its own generator choose, dealt out to the workers."""

    def __init__(self, shuffled: bool = True) -> None:
        self._random = np.random.default_rng(3)
        self._shuffled = shuffled

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        ids = list(range(SAMPLES))[worker.id if worker else 0 :: worker.num_workers if worker else 1]
        if self._shuffled:
            random.shuffle(ids)
            self._random.shuffle(ids)
        yield from ids


class OwnOrder(Sampler[int]):
    """Draws as it goes, from a generator of its own."""

    def __init__(self) -> None:
        self.order = random.Random(4)

    def __iter__(self) -> Iterator[int]:
        left = list(range(SAMPLES))
        while left:
            yield left.pop(self.order.randrange(len(left)))

    def __len__(self) -> int:
        return SAMPLES


class ByEpoch(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Plain:
    """No DataLoader: anything that can be iterated once an epoch."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.split(torch.randperm(SAMPLES), BATCH))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


MAKE: dict[str, Make] = {
    "in order": lambda workers: DataLoader(Ids(), BATCH, num_workers=workers),
    "shuffled": lambda workers: DataLoader(Ids(), BATCH, shuffle=True, num_workers=workers),
    "shuffled by a generator": lambda workers: DataLoader(
        Ids(), BATCH, shuffle=True, num_workers=workers, generator=seeded()
    ),
    "stream": lambda workers: DataLoader(Stream(), BATCH, num_workers=workers),
    "with replacement": lambda workers: DataLoader(
        Ids(), BATCH, sampler=RandomSampler(Ids(), True, 10, seeded()), num_workers=workers, drop_last=True
    ),
    "own order": lambda workers: DataLoader(Ids(), BATCH, sampler=OwnOrder(), num_workers=workers),
    "no batches": lambda workers: DataLoader(Ids(), None, sampler=OwnOrder(), num_workers=workers),
    "by epoch": lambda workers: DataLoader(Ids(), BATCH, sampler=ByEpoch(), num_workers=workers),
}
PERSISTENT: Make = lambda workers: DataLoader(  # noqa: E731 - one more of those above
    Ids(), BATCH, shuffle=True, num_workers=workers, generator=seeded(), persistent_workers=True
)


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


@pytest.mark.parametrize("kind", MAKE)
def test_resuming_at_every_batch_without_workers(tmp_path: Path, kind: str) -> None:
    check_every_position(tmp_path, MAKE[kind], 0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "shuffled by a generator", "stream"])
def test_resuming_at_every_batch_with_workers(tmp_path: Path, kind: str, workers: int) -> None:
    # The second epoch's positions are no others to a worker, and processes take long to start.
    check_every_position(tmp_path, MAKE[kind], workers, epochs=1)


@pytest.mark.slow
def test_resuming_with_workers_that_stay(tmp_path: Path) -> None:
    """They draw their seeds once, from the generator that shuffles."""
    check_every_position(tmp_path, PERSISTENT, 1)


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


# Intervals


def taken(batches: Iterable[Any]) -> list[list[int]]:
    return [np.ravel(np.asarray(batch)).tolist() for batch in batches]


def test_intervals_hold_the_rest_for_the_next_one() -> None:
    loader = DataLoader(Ids(), BATCH, shuffle=True, generator=seeded())
    reader = TrackedReader(DataLoader(Ids(), BATCH, shuffle=True, generator=seeded()))
    parts = [taken(reader.interval(batches)) for batches in (2, 0, 3, 4)]
    assert [len(part) for part in parts] == [2, 0, 3, 4]
    assert list(chain(*parts)) == [*taken(loader), *taken(loader), *taken(loader)]
    assert (reader.epoch, reader.batch) == (2, 3)


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


@pytest.mark.slow
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


# Wrong uses


def test_an_iterator_goes_on_but_not_back() -> None:
    reader = TrackedReader(iter(range(6)))
    assert list(reader.interval(2)) == [0, 1]
    state = reader.state_dict()
    again = TrackedReader(iter(range(6)))
    again.load_state_dict(state)
    assert list(again) == [2, 3, 4, 5]
    reader.load_state_dict(state)
    with pytest.raises(OptionError, match="can be read only once"):
        list(reader)


def test_data_that_became_less_is_no_silent_end() -> None:
    reader = TrackedReader(range(6))
    list(reader.interval(5))
    again = TrackedReader(range(4))
    again.load_state_dict(reader.state_dict())
    with pytest.raises(OptionError, match="5 batches of this epoch were trained, and the loader has only 4"):
        list(again)


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


def test_no_state_was_saved_without_a_reader() -> None:
    with pytest.raises(
        OptionError, match="None is not a state of this reader: the version was saved without reader="
    ):
        TrackedReader([1]).load_state_dict(None)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: StatefulDataLoader(Ids()), "reader=loader"),
        (lambda: 7, "can't be iterated"),
        (lambda: DataLoader(Ids(), num_workers=2, in_order=False), "in_order=True"),
    ],
)
def test_loaders_that_are_refused(loader: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrackedReader(loader())


def test_only_generators_are_taken_for_generators() -> None:
    with pytest.raises(OptionError, match="generator 'it' is of type int"):
        TrackedReader([1], generators={"it": 3})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataLoader(Ids(), 2), "its loader is"),
        (DataLoader(Ids(20), BATCH), "its loader is"),
        (DataLoader(Stream(), BATCH), "its loader is"),
        ([1, 2], "its loader is"),
        (DataLoader(Ids(), BATCH, shuffle=True, generator=seeded()), "the loader.*loader.generator"),
    ],
)
def test_the_state_of_another_loader(other: Any, message: str) -> None:
    state, reader = TrackedReader(DataLoader(Ids(), BATCH)).state_dict(), TrackedReader(other)
    before = reader.state_dict()
    with pytest.raises(OptionError, match=message):
        reader.load_state_dict(state)
    assert reader.state_dict().keys() == before.keys()


def deep(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`state` with one value replaced."""
    if not path:
        return value
    if isinstance(state, tuple):
        return tuple(deep(one, path[1:], value) if i == path[0] else one for i, one in enumerate(state))
    return {**state, path[0]: deep(state[path[0]], path[1:], value)}


START = ("start", "global")
OWN = ("start", "own", "loader.batch_sampler.sampler.order")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), None),
        ((), {"epoch": 1}),
        (("epoch",), -1),
        (("batch",), True),
        (("batch",), 1.0),
        (("reused",), None),
        (("start",), None),
        (("start",), 3),
        (("start",), {}),
        (("generators",), 1),
        ((*START, "torch"), torch.zeros(5)),
        ((*START, "torch"), torch.zeros(5056, dtype=torch.uint8)),
        ((*START, "numpy", 2), 1 << 40),
        ((*START, "python", 1), (1, 2)),
        (OWN, None),
        ((*OWN, 0), 2),
        ((*OWN, 1), (*[0] * 624, 9999)),
    ],
)
def test_forged_states_change_nothing(path: tuple[Any, ...], value: Any) -> None:
    reader = TrackedReader(MAKE["own order"](0))
    first = taken(reader.interval(1))
    state = reader.state_dict()
    again = TrackedReader(MAKE["own order"](0))
    if path == ("generators",):
        state = {**state, "start": None, "batch": 0}
    with pytest.raises(OptionError, match="not a state of this reader"):
        again.load_state_dict(deep(state, path, value))
    assert taken(again.interval(1)) == first


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_states_of_numpys_generators_are_proven(bits: Callable[[int], Any]) -> None:
    reader = TrackedReader([1], generators={"it": np.random.Generator(bits(1))})
    state = reader.state_dict()
    reader.load_state_dict(state)
    good = state["generators"]["it"]
    for key in good:
        wrong = {"pos": -1, "key": np.zeros(3)} if key == "state" else -1
        with pytest.raises(OptionError, match="numpy generator"):
            reader.load_state_dict(deep(state, ("generators", "it", key), wrong))
    if "pos" in good["state"]:
        with pytest.raises(OptionError, match="pos of a numpy generator is out of range"):
            reader.load_state_dict(deep(state, ("generators", "it", "state", "pos"), 10**6))
    if "buffer_pos" in good:
        with pytest.raises(OptionError, match="buffer_pos of a numpy generator is out of range"):
            reader.load_state_dict(deep(state, ("generators", "it", "buffer_pos"), 1000))
