"""Readers of another number of ranks: no sample of an epoch is seen twice or left out, or the error says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from cnr_store import OptionError, TrackedReader

Readers = list[TrackedReader[Any]]
State = dict[str, Any]


class Ids(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> int:
        return sample


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(20))


def readers(world: int, samples: int = 48, batch: int = 2, seed: int = 3, shuffle: bool = True) -> Readers:
    dataset = Ids(samples)
    return [
        TrackedReader(
            DataLoader(
                dataset, batch, sampler=DistributedSampler(dataset, world, rank, shuffle=shuffle, seed=seed)
            )
        )
        for rank in range(world)
    ]


def take(group: Readers, batches: int) -> list[int]:
    return [int(sample) for reader in group for batch in reader.interval(batches) for sample in batch]


def rest(group: Readers) -> list[int]:
    """The samples of the rest of this epoch."""
    return [int(sample) for reader in group for batch in reader for sample in batch]


def resume(group: Readers, states: list[Any]) -> None:
    for rank, reader in enumerate(group):
        reader.load_state_dict(reader.split_state(states, rank, len(group)))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_sample_of_an_epoch_is_seen_once(data: st.DataObject) -> None:
    old, new = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    samples, batch = data.draw(st.integers(12, 60)), data.draw(st.integers(1, 3))
    before = readers(old, samples, batch)
    epoch = data.draw(st.integers(0, 2))
    for _ in range(epoch):
        rest(before)
    seen = take(before, data.draw(st.integers(0, len(before[0]))))
    after = readers(new, samples, batch)
    states = [reader.state_dict() for reader in before]
    if before[0].batch < len(before[0]) and before[0].batch * old % new:
        with pytest.raises(OptionError, match="not whole batches"):
            resume(after, states)
        return
    resume(after, states)
    assert {reader.epoch for reader in after} == {epoch}
    found = Counter(seen + rest(after))
    assert found.keys() == set(range(samples))
    # What the sampler repeats so that all ranks have as many.
    assert found.total() - samples < max(old, new)
    fresh = readers(new, samples, batch)
    for _ in range(epoch + 1):
        rest(fresh)
    assert rest(after) == rest(fresh)


def test_an_epoch_that_all_have_ended_is_ended_for_others() -> None:
    before, after = readers(2), readers(3)
    take(before, len(before[0]))
    resume(after, [reader.state_dict() for reader in before])
    assert rest(after) == []
    assert {reader.epoch for reader in after} == {1}


def test_other_batches_that_meet_the_same_samples() -> None:
    before, after = readers(2, batch=6), readers(4, batch=3)
    seen = take(before, 2)
    resume(after, [reader.state_dict() for reader in before])
    assert {reader.batch for reader in after} == {2}
    assert sorted(seen + rest(after)) == list(range(48))


def test_readers_between_two_epochs_of_any_data() -> None:
    loaders: list[Callable[[], Any]] = [
        lambda: DataLoader(Stream(), 2),
        lambda: DataLoader(Ids(7), 2, shuffle=True),
        lambda: [1, 2, 3],
    ]
    for make in loaders:
        before: Readers = [TrackedReader(make()) for _ in range(3)]
        after: Readers = [TrackedReader(make()) for _ in range(2)]
        for reader in before:
            assert list(reader)
        resume(after, [reader.state_dict() for reader in before])
        assert [(reader.epoch, reader.batch) for reader in after] == [(1, 0)] * 2
        assert all(len(list(reader)) == len(list(make())) for reader in after)


def shuffling(seed: int) -> TrackedReader[Any]:
    return TrackedReader(DataLoader(Ids(9), shuffle=True, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("alike", [True, False])
def test_generators_of_loaders_go_on_between_two_epochs(alike: bool) -> None:
    before = [shuffling(5 if alike else rank) for rank in range(2)]
    for reader in before:
        rest([reader])
    after = [shuffling(90 + rank) for rank in range(3)]
    resume(after, [reader.state_dict() for reader in before])
    expected = [rest([reader]) for reader in before]
    found = [rest([reader]) for reader in after]
    assert found[:2] == expected
    if alike:
        assert found[2] == expected[0]
    else:
        assert found[2] == rest([shuffling(92)])


def of_map(samples: int = 12) -> TrackedReader[Any]:
    return TrackedReader(DataLoader(Ids(samples), 2))


def states_of(group: Readers, batches: int) -> list[Any]:
    take(group, batches)
    return [reader.state_dict() for reader in group]


@pytest.mark.parametrize(
    ("states", "group", "message"),
    [
        (
            lambda: states_of(readers(2), 1),
            lambda: readers(3),
            "4 samples of the epoch were trained.* 6 at once",
        ),
        (lambda: states_of([of_map(), of_map()], 1), lambda: readers(3), "in the middle of an epoch"),
        (lambda: states_of(readers(2), 3), lambda: [of_map()] * 3, "in the middle of an epoch"),
        (lambda: states_of(readers(2), 3), lambda: readers(3, seed=4), "another seed"),
        (lambda: states_of(readers(2), 3), lambda: readers(3, 50), "another samples"),
        (lambda: states_of(readers(2), 3), lambda: readers(3, shuffle=False), "another shuffle"),
        (lambda: states_of(readers(2), 3), lambda: readers(4)[:3], "this one has 4 on 3"),
        (lambda: states_of(readers(2), 3)[:1], lambda: readers(3), "had 2 replicas on 1 ranks"),
        (
            lambda: states_of(readers(2)[:1], 3) + states_of(readers(2)[1:], 2),
            lambda: readers(3),
            "at different batches",
        ),
        (lambda: [None, None], lambda: readers(3), "that of rank 0 is no state"),
        (list, lambda: readers(3), "at different batches"),
    ],
)
def test_what_can_t_be_divided(
    states: Callable[[], list[Any]], group: Callable[[], Readers], message: str
) -> None:
    found = group()
    before = [reader.state_dict() for reader in found]
    with pytest.raises(OptionError, match=message):
        found[0].split_state(states(), 0, len(found))
    assert [reader.state_dict().keys() for reader in found] == [state.keys() for state in before]
    assert all((reader.epoch, reader.batch) == (0, 0) for reader in found)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": []},
        {"epoch": None},
        {"batch": -1},
        {"batch": True},
        {"start": 5},
        {"start": {}},
        {"loader": None},
        {"sharding": 5},
        {"sharding": {}},
        {"sharding": {"samples": 48, "batch_size": 0, "ranks": 2, "shuffle": True, "seed": 3}},
        {"sharding": {"samples": 48, "batch_size": "x", "ranks": 2, "shuffle": True, "seed": 3}},
    ],
)
def test_forged_states(change: State) -> None:
    states = [state | change for state in states_of(readers(2), 3)]
    group = readers(3)
    with pytest.raises(OptionError):
        resume(group, states)
    assert all((reader.epoch, reader.batch) == (0, 0) for reader in group)
