"""Begins epochs of a loader, and resumes them after the batches that were taken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from cnr_store.errors import OptionError
from cnr_store.training.data.generators import is_same_state, wrapped_sampler
from cnr_store.training.data.shared_epoch import sharding_of

_States = Callable[[], Mapping[str, Any]]


def open_source(loader: Iterable[Any], replay: bool, states: _States) -> Source:
    """What begins and resumes epochs of this loader. `states` returns those of all generators it may draw from."""
    if type(loader).__module__.startswith("accelerate."):  # its state_dict works only if it was asked for one
        raise OptionError(
            "the loader is the one that accelerate's prepare() returned: give TrackedReader the loader that prepare() "
            "was given, and move its batches with accelerate.utils.send_to_device"
        )
    if callable(getattr(loader, "state_dict", None)):
        raise OptionError(
            f"the {type(loader).__name__} has a state_dict of its own: give it to `save` as it is, reader=loader"
        )
    if type(loader).__name__ == "_FabricDataLoader" and isinstance(
        getattr(loader, "_dataloader", None), DataLoader
    ):
        return FabricSource(loader, replay, states)
    if not isinstance(loader, Iterable):
        raise OptionError(
            f"a loader of type {type(loader).__name__} can't be iterated; give a DataLoader or another iterable"
        )
    return LoaderSource(loader, replay, states) if isinstance(loader, DataLoader) else Source(loader, states)


class Source:
    """Any iterable: an epoch is one iteration. To resume it, batches already taken are read again and dropped.

    `draws_late`: generators that drew for each of the batches that were dropped last, and not just for an epoch, by
    their names in what `states` returns.
    """

    draws_again = False
    """Whether resuming draws as many numbers in this process as had been drawn at the position, workers or not."""

    def __init__(self, loader: Iterable[Any], states: _States) -> None:
        self._loader = loader
        self._states = states
        self._begun = False
        self.draws_late: set[str] = set()

    @property
    def has_workers(self) -> bool:
        """Whether workers of an earlier epoch still run, and will serve the next one."""
        return False

    def kind(self) -> dict[str, Any]:
        """What must be equal for a position to mean the same batch."""
        return {"kind": "iterable"}

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that the position in a reader's state means the same batch here."""
        if state["loader"] != self.kind():
            raise ValueError(f"its loader is {state['loader']!r:.300}, this one {self.kind()!r}")

    def sharding(self) -> dict[str, Any] | None:
        """How the loader deals an epoch out to ranks; None if that is not known."""
        return None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # without a length, its TypeError is the right one

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and datasets that shuffle by epoch its number, before it begins."""

    def begin(self, reused: bool) -> Iterator[Any]:
        """Begin an epoch; `reused` as in `resume`."""
        self._begun = True
        return iter(self._loader)

    def resume(self, batches: int, reused: bool) -> Iterator[Any]:
        """Resume an epoch after its first `batches`. The global random numbers are those that the epoch began with.

        `reused`: whether the epoch was begun with workers of an earlier one.
        """
        live = iter(self._loader)
        if live is self._loader and self._begun:
            raise OptionError(
                f"the {type(live).__name__} can be read only once: make a new one, and a new reader for it"
            )
        self._begun = True
        self.draws_late = _drop_batches(live, batches, self._states)
        return live


def _drop_batches(batches: Iterator[Any], taken: int, states: _States) -> set[str]:
    """Drop the first `taken` batches. Returns the generators that draw for each batch, and not just for an epoch."""
    found = sum(1 for _ in islice(batches, min(taken, 1)))
    first = states()
    found += sum(1 for _ in islice(batches, max(taken - 2, 0)))
    last = states()  # but one: torch's samplers draw once more as they end
    found += sum(1 for _ in islice(batches, taken - found))
    if found < taken:
        raise OptionError(
            f"{taken} batches of this epoch were trained, and the loader has only {found}: give it the data of the "
            "saved run"
        )
    return {name for name in first if not is_same_state(first[name], last[name])}


class LoaderSource(Source):
    """A `DataLoader`, used through a copy whose sampler can skip the batches that were taken."""

    draws_again = True

    def __init__(self, loader: DataLoader[Any], replay: bool, states: _States) -> None:
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise OptionError(
                "the loader gives out batches as they come (in_order=False): their order can't be repeated; "
                "use in_order=True"
            )
        self._copy = copy.copy(loader)
        self._set("_iterator", None)
        super().__init__(self._copy, states)
        self._epoch = 0
        self._is_map = not isinstance(loader.dataset, IterableDataset)
        sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = _SkippingSampler(getattr(loader, sampler), states)
        self._can_skip = self._is_map and not replay and type(loader).__iter__ is DataLoader.__iter__
        if self._can_skip:
            self._set(sampler, self._sampler)

    def _set(self, name: str, value: Any) -> None:
        # DataLoader refuses to change these attributes, and this copy of it is ours.
        self._copy.__dict__[name] = value

    @property
    def has_workers(self) -> bool:
        return self._copy.persistent_workers and self._copy._iterator is not None

    def kind(self) -> dict[str, Any]:
        batch, drop = self._copy.batch_size, self._copy.drop_last
        if self._is_map:
            batches = length_of(self._sampler.sampler)
            return {"kind": "map", "batch_size": batch, "drop_last": drop, "batches": batches}
        return {"kind": "stream", "batch_size": batch, "drop_last": drop, "workers": self._copy.num_workers}

    def sharding(self) -> dict[str, Any] | None:
        return sharding_of(self._sampler.sampler)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        _tell_epoch(epoch, self._sampler.sampler, self._copy.dataset)

    def begin(self, reused: bool) -> Iterator[Any]:
        if not reused:
            self._set("_iterator", None)
        return self._iterate(reused)

    def resume(self, batches: int, reused: bool) -> Iterator[Any]:
        self._set("_iterator", None)  # workers that still run have fetched batches ahead of the position
        if not self._can_skip:
            live = self._iterate(reused)
            self.draws_late = _drop_batches(live, batches, self._states)
            return live
        self._sampler.skip = batches
        try:
            live = self._iterate(reused)
            self._sampler.latest.drop()  # without workers nothing was drawn yet, and a missing batch is an error now
            self.draws_late = self._sampler.latest.draws_late
        finally:
            self._sampler.skip = 0
        return live

    def _iterate(self, reused: bool) -> Iterator[Any]:
        """Iterate the loader, drawing from its generator what the epoch drew as it began.

        Workers that are reused draw no seed from it, so new workers that replace them must not either.
        """
        generator = self._copy.generator
        if reused and not self.has_workers:
            self._set("generator", torch.Generator().manual_seed(self._epoch))
        try:
            return iter(self._copy)
        finally:
            self._set("generator", generator)


class FabricSource(LoaderSource):
    """The `DataLoader` in the loader that `setup_dataloaders` of Lightning Fabric returned, which moves its batches."""

    def __init__(self, loader: Any, replay: bool, states: _States) -> None:
        super().__init__(loader._dataloader, replay, states)
        self._fabric = loader

    def begin(self, reused: bool) -> Iterator[Any]:
        return self._moved(super().begin(reused))

    def resume(self, batches: int, reused: bool) -> Iterator[Any]:
        return self._moved(super().resume(batches, reused))

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches on the device of Fabric's loader, by a copy of it that goes over them."""
        moving = copy.copy(self._fabric)
        moving._dataloader = batches
        return iter(moving)


def _tell_epoch(epoch: int, sampler: Any, dataset: Any) -> None:
    """Tell it to a sampler, those within it, and a dataset."""
    for part in _parts_of(sampler, dataset):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def _parts_of(sampler: Any, dataset: Any) -> Iterator[Any]:
    while sampler is not None:
        yield sampler
        parts = getattr(sampler, "__dict__", {})  # asked now: set_epoch may have replaced it
        within = parts.get("sampler")
        sampler = wrapped_sampler(parts.get("dataset")) if within is None else within
    yield dataset


def length_of(batches: Any) -> int | None:
    """The length of a loader or sampler, or None if it has none, or goes over data that has none."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


class _SkippingSampler:
    """A sampler whose iterations can start after its first `skip` batches."""

    def __init__(self, sampler: Any, states: _States) -> None:
        self.sampler = sampler
        self.skip = 0
        self._states = states
        self.latest = _RemainingBatches(iter(()), 0, states)

    def __iter__(self) -> Iterator[Any]:
        self.latest = _RemainingBatches(iter(self.sampler), self.skip, self._states)
        return self.latest

    def __len__(self) -> int:
        return len(self.sampler)


class _RemainingBatches(Iterator[Any]):
    """The batches after the first ones. Those are drawn at the first use, since samplers draw random numbers late."""

    def __init__(self, batches: Iterator[Any], skip: int, states: _States) -> None:
        self._batches = batches
        self._skip = skip
        self._states = states
        self.draws_late: set[str] = set()

    def drop(self) -> None:
        skip, self._skip = self._skip, 0
        if skip:
            self.draws_late = _drop_batches(self._batches, skip, self._states)

    def __next__(self) -> Any:
        self.drop()
        return next(self._batches)
