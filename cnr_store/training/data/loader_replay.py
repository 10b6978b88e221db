"""How epochs of a loader are begun, and begun again behind the batches that were taken."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from cnr_store.errors import OptionError


def source_of(loader: Iterable[Any], replay: bool) -> Source:
    """How to begin epochs of this loader.

    Raises
    ------
    OptionError
        See `TrackedReader`.
    """
    if callable(getattr(loader, "state_dict", None)):
        raise OptionError(
            f"the {type(loader).__name__} has a state_dict of its own: give it to `save` as it is, reader=loader"
        )
    if not isinstance(loader, Iterable):
        raise OptionError(
            f"a loader of type {type(loader).__name__} can't be iterated; give a DataLoader or another iterable"
        )
    return LoaderSource(loader, replay) if isinstance(loader, DataLoader) else Source(loader)


class Source:
    """Any iterable: an epoch is one iteration, and batches already taken are read again and dropped."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._begun = False

    @property
    def reuses_workers(self) -> bool:
        """Whether the next epoch goes to workers that are there already."""
        return False

    def kind(self) -> dict[str, Any]:
        """What must be alike for a position to mean the same batch."""
        return {"kind": "iterable"}

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # what has no length says so itself

    def tell_epoch(self, epoch: int) -> None:
        """Before each epoch: for samplers and datasets that shuffle by its number."""

    def begin(self, reused: bool) -> Iterator[Any]:
        """A new epoch; `reused` as in `resume`."""
        self._begun = True
        return iter(self._loader)

    def resume(self, batches: int, reused: bool) -> Iterator[Any]:
        """An epoch behind its first batches. The random number generators stand as they did when it was begun.

        Parameters
        ----------
        reused
            Whether it was begun with workers that were there before.

        Raises
        ------
        OptionError
            There are fewer batches, or they can be read only once.
        """
        live = iter(self._loader)
        if live is self._loader and self._begun:
            raise OptionError(
                f"the {type(live).__name__} can be read only once: make a new one, and a reader for it, to go back"
            )
        self._begun = True
        return _behind(live, batches)


class LoaderSource(Source):
    """A `DataLoader`, used through a copy whose sampler can begin behind the batches taken."""

    def __init__(self, loader: DataLoader[Any], replay: bool) -> None:
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise OptionError(
                "the loader gives out batches as they come (in_order=False): their order can't be repeated; "
                "use in_order=True"
            )
        self._copy = copy.copy(loader)
        self._set("_iterator", None)
        super().__init__(self._copy)
        self._epoch = 0
        self._is_map = not isinstance(loader.dataset, IterableDataset)
        self._batches = _Batches(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        self._skips = self._is_map and not replay and type(loader).__iter__ is DataLoader.__iter__
        if self._skips:
            self._set("sampler" if loader.batch_sampler is None else "batch_sampler", self._batches)

    def _set(self, name: str, value: Any) -> None:
        # Past the loader's own refusal to change: this copy of it is ours.
        self._copy.__dict__[name] = value

    @property
    def reuses_workers(self) -> bool:
        return self._copy._iterator is not None

    def kind(self) -> dict[str, Any]:
        batch, drop = self._copy.batch_size, self._copy.drop_last
        if self._is_map:
            batches = _length(self._batches.sampler)
            return {"kind": "map", "batch_size": batch, "drop_last": drop, "batches": batches}
        return {"kind": "stream", "batch_size": batch, "drop_last": drop, "workers": self._copy.num_workers}

    def tell_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        part: Any = self._batches.sampler
        while part is not None:
            _tell(part, epoch)
            part = getattr(part, "__dict__", {}).get("sampler")
        _tell(self._copy.dataset, epoch)

    def begin(self, reused: bool) -> Iterator[Any]:
        if not reused:
            self._set("_iterator", None)
        return self._iterate(reused)

    def resume(self, batches: int, reused: bool) -> Iterator[Any]:
        self._set("_iterator", None)
        if not self._skips:
            return _behind(self._iterate(reused), batches)
        self._batches.skip = batches
        try:
            live = self._iterate(reused)
            self._batches.newest.advance()
        finally:
            self._batches.skip = 0
        return live

    def _iterate(self, reused: bool) -> Iterator[Any]:
        """Workers that are reused draw no seed, which is taken from the loader's generator: new ones in their place
        must not either."""
        generator = self._copy.generator
        if reused and not self.reuses_workers:
            self._set("generator", torch.Generator().manual_seed(self._epoch))
        try:
            return iter(self._copy)
        finally:
            self._set("generator", generator)


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):  # a sampler over one that has no length
        return None


def _tell(part: Any, epoch: int) -> None:
    if callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)


class _Batches:
    """A sampler that can begin behind its first batches."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.skip = 0
        self.newest = _Rest(iter(()), 0)

    def __iter__(self) -> Iterator[Any]:
        self.newest = _Rest(iter(self.sampler), self.skip)
        return self.newest

    def __len__(self) -> int:
        return len(self.sampler)


class _Rest(Iterator[Any]):
    """What comes behind the first batches; those are drawn only when it is asked for, as a sampler draws."""

    def __init__(self, batches: Iterator[Any], skip: int) -> None:
        self._batches = batches
        self._skip = skip

    def advance(self) -> None:
        skip, self._skip = self._skip, 0
        _behind(self._batches, skip)

    def __next__(self) -> Any:
        self.advance()
        return next(self._batches)


def _behind(batches: Iterator[Any], taken: int) -> Iterator[Any]:
    found = sum(1 for _ in islice(batches, taken))
    if found < taken:
        raise OptionError(
            f"{taken} batches of this epoch were taken, and the loader has only {found}: it needs the saved run's data"
        )
    return batches
