"""Loaders over samples that are their own ids, in orders of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

SAMPLES, BATCH = 8, 3
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


def taken(batches: Iterable[Any]) -> list[list[int]]:
    return [np.ravel(np.asarray(batch)).tolist() for batch in batches]
