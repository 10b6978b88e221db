"""Replays a loader: its epochs, after the batches that were taken or divided among other ranks, and its generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from cnr_store.errors import OptionError
from cnr_store.training.model.rng_state import check_numpy, check_python, check_torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_PARTS = ("batch_sampler", "sampler", "dataset", "data_source")
_MOST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1}
"""Numbers of bit generators that numpy takes as they are: it reads memory at positions in a buffer."""
_PREPARED = {
    "accelerate": ("prepare", "accelerate.utils.send_to_device"),
    "fabric": ("setup_dataloaders", "to_device"),
}
"""What returns loaders of its own, and what else moves batches to the device."""


def check_loader(loader: object) -> None:
    """Refuse what is no loader, has a state of its own, or gives out batches in no fixed order."""
    kind = type(loader)
    for package, (
        maker,
        mover,
    ) in _PREPARED.items():  # some have a state_dict that works only if it was asked for
        if package in kind.__module__.split("."):
            raise OptionError(
                f"the loader is the one that {package}'s {maker}() returned: give TrackedReader the loader that "
                f"{maker}() was given, and move its batches with {mover}"
            )
    if callable(getattr(loader, "state_dict", None)):
        raise OptionError(
            f"the {kind.__name__} has a state_dict of its own: give it to `save` as it is, reader=loader"
        )
    if not hasattr(kind, "__iter__"):
        raise OptionError(
            f"a loader of type {kind.__name__} can't be iterated; give a DataLoader or another iterable"
        )
    if isinstance(loader, DataLoader) and loader.num_workers and not getattr(loader, "in_order", True):
        raise OptionError(
            "the loader gives out batches as they come (in_order=False): their order can't be repeated; use "
            "in_order=True"
        )


States: TypeAlias = Callable[[], Mapping[str, Any]]


class Replay:
    """Epochs of a loader. A `DataLoader` is used through a copy, whose sampler can skip the batches that were taken.

    Of map-style data nothing is read that was taken, unless `replay` says so; of anything else it is read again.

    `is_loader`: whether it is a `DataLoader`: resuming it draws as many numbers in this process as had been drawn at
    the position, with workers or without.
    `draws_late`: generators that drew for each of the batches that were passed over last, and not just for an epoch, by
    their names in what the `states` of `resume` return.
    """

    def __init__(self, loader: Any, replay: bool) -> None:
        self._loader, self._sampler, self._order = loader, None, _Order([])
        self._begun, self._epoch = False, 0
        self._is_map = self._skips = False
        self.draws_late: set[str] = set()
        self.is_loader = isinstance(loader, DataLoader)
        if self.is_loader:
            self._loader = copy.copy(loader)
            self._set("_iterator", None)
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            self._sampler = getattr(loader, name)
            self._is_map = not isinstance(loader.dataset, IterableDataset)
            self._skips = self._is_map and not replay and type(loader).__iter__ is DataLoader.__iter__
            if self._skips:
                self._order = _Order(self._sampler)
                self._set(name, self._order)

    def _set(self, name: str, value: Any) -> None:
        # DataLoader refuses to change these attributes, and this copy of it is ours.
        self._loader.__dict__[name] = value

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def has_workers(self) -> bool:
        """Whether workers of an earlier epoch still run, and will serve the next one."""
        return self.is_loader and self._loader.persistent_workers and self._loader._iterator is not None

    def kind(self) -> dict[str, Any]:
        """What must be equal for a position to mean the same batch."""
        if not self.is_loader:
            return {"kind": "iterable"}
        kind = {"batch_size": self._loader.batch_size, "drop_last": self._loader.drop_last}
        if self._is_map:
            return {"kind": "map", **kind, "batches": length_of(self._sampler)}
        return {"kind": "stream", **kind, "workers": self._loader.num_workers}

    def sharding(self) -> dict[str, Any] | None:
        """How the loader deals an epoch out to ranks; None if that is not known.

        `DistributedSampler` shuffles alike on all ranks, and each takes every so many-th sample. When all have taken as
        many, these are the first ones of the shuffled epoch, whatever the number of ranks.
        """
        batches: Any = self._sampler
        sampler: Any = batches.sampler if type(batches) is BatchSampler else None
        if type(sampler) is not DistributedSampler:
            return None
        dataset: Any = sampler.dataset
        return {
            "samples": len(dataset),
            "batch_size": batches.batch_size,
            "ranks": sampler.num_replicas,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
        }

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and datasets that shuffle by epoch its number, before it begins."""
        self._epoch, sampler = epoch, self._sampler
        while sampler is not None:
            _tell(sampler, epoch)
            sampler = getattr(sampler, "__dict__", {}).get("sampler")  # asked now: it may have been replaced
        if self.is_loader:
            _tell(self._loader.dataset, epoch)

    def begin(self, reused: bool) -> Iterator[Any]:
        """Begin an epoch; `reused` as in `resume`."""
        self._order.skip = None
        if self.is_loader and not reused:
            self._set("_iterator", None)
        return self._iterate(reused)

    def resume(self, batches: int, reused: bool, states: States) -> Iterator[Any]:
        """Resume an epoch after its first `batches`. The global random numbers are those that the epoch began with.

        `reused`: whether the epoch was begun with workers of an earlier one.
        `states`: returns the states of all generators that the loader may draw from. It is not kept: with the reader
        that it belongs to, workers would live on until a collection of garbage.
        """
        if self.is_loader:
            self._set("_iterator", None)  # workers that still run have fetched batches ahead of the position
        self._order.skip = (lambda order: self._pass_over(order, batches, states)) if self._skips else None
        live = self._iterate(reused)
        if self._skips:
            self._order.catch_up()  # without workers nothing was drawn yet, and a missing batch is an error now
        else:
            self._pass_over(live, batches, states)
        return live

    def _pass_over(self, batches: Iterator[Any], taken: int, states: States) -> None:
        found = sum(1 for _ in islice(batches, min(taken, 1)))
        first = states()
        found += sum(1 for _ in islice(batches, max(taken - 2, 0)))
        last = states()  # but one: torch's samplers draw once more as they end
        found += sum(1 for _ in islice(batches, taken - found))
        if found < taken:
            raise OptionError(
                f"{taken} batches of this epoch were trained, and the loader has only {found}: give it the data of "
                "the saved run"
            )
        self.draws_late = {name for name in first if not is_same_state(first[name], last[name])}

    def _iterate(self, reused: bool) -> Iterator[Any]:
        """Iterate the loader, drawing from its generator what the epoch drew as it began."""
        if not self.is_loader:
            live: Iterator[Any] = iter(self._loader)
            if live is self._loader and self._begun:
                raise OptionError(
                    f"the {type(live).__name__} can be read only once: make a new one, and a new reader for it"
                )
            self._begun = True
            return live
        generator = self._loader.generator
        if reused and not self.has_workers:
            # Workers that are reused draw no seed from it, so new workers that replace them must not either.
            self._set("generator", torch.Generator().manual_seed(self._epoch))
        try:
            return iter(self._loader)
        finally:
            self._set("generator", generator)


def _tell(part: Any, epoch: int) -> None:
    if callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)


def length_of(batches: Any) -> int | None:
    """The length of a loader or sampler, or None if it has none, or goes over data that has none."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


class _Order(Iterator[Any]):
    """A sampler's batches, one iteration at a time. `skip` is called with them before the first of them is taken.

    Not as an iteration begins, since samplers draw random numbers late.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._batches = sampler, iter(())
        self.skip: Callable[[Iterator[Any]], None] | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._batches = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        self.catch_up()
        return next(self._batches)

    def catch_up(self) -> None:
        """Skip what is to be skipped, if that was not done yet."""
        skip, self.skip = self.skip, None
        if skip is not None:
            skip(self._batches)


def divide(states: Sequence[Mapping[str, Any]], now: Mapping[str, Any], world: int) -> tuple[int, int]:
    """The epoch, and how many batches each rank has taken of it, when `world` ranks go on from the readers' states.

    `now`: the state of this rank's reader, which has taken nothing yet.
    """
    positions = {(state["epoch"], state["batch"]) for state in states}
    if len(positions) != 1:
        _refuse(
            f"they stand at different batches: (epoch, batch) is {', '.join(map(str, sorted(positions)))}"
        )
    epoch, batch = positions.pop()
    if any(type(number) is not int or number < 0 for number in (epoch, batch)):
        _refuse(f"epoch {epoch!r}, batch {batch!r} is no position")
    if not batch:
        return epoch, 0
    first, own = states[0]["sharding"], now["sharding"]
    if own is None or not isinstance(first, Mapping) or any(state["sharding"] != first for state in states):
        _refuse(
            "they stand in the middle of an epoch, and only what a DataLoader with torch's own DistributedSampler has "
            "taken is known to other ranks"
        )
    if first["ranks"] != len(states) or own["ranks"] != world:
        _refuse(
            f"the saved DistributedSampler had {first['ranks']} replicas on {len(states)} ranks, and this one has "
            f"{own['ranks']} on {world}"
        )
    if differing := [name for name in ("samples", "shuffle", "seed") if first[name] != own[name]]:
        _refuse(f"this DistributedSampler has another {' and '.join(differing)}")
    batches = now["loader"].get("batches")
    if batches is not None and batch == states[0]["loader"].get("batches"):
        return epoch, batches
    taken, together = batch * first["batch_size"] * len(states), own["batch_size"] * world
    if type(taken) is not int or taken < 1 or taken % together:
        _refuse(
            f"{taken!r} samples of the epoch were trained, which are not whole batches for {world} ranks that take "
            f"{together} at once"
        )
    return epoch, taken // together


def _refuse(why: str) -> NoReturn:
    raise OptionError(
        f"the readers can't go on with another number of ranks: {why}. Load a version that was saved between two "
        "epochs, or use as many ranks as saved it, or set the positions of the readers yourself"
    )


def find_generators(loader: object, named: Mapping[str, Any]) -> dict[str, Generator]:
    """Generators that are named, and those that a loader, its samplers and its dataset hold as attributes, by path."""
    for name, value in named.items():
        if not _is_generator(value):
            raise OptionError(
                f"generator {name!r} is of type {type(value).__name__}; give a torch.Generator of the CPU, a "
                "numpy.random.Generator or RandomState, or a random.Random"
            )
    generators = dict(named)
    for path, part in _parts(loader, "loader", []):
        for name, value in getattr(part, "__dict__", {}).items():
            if _is_generator(value) and not any(value is known for known in generators.values()):
                generators[f"{path}.{name}"] = value
    return generators


def _parts(part: object, path: str, seen: list[object]) -> Iterator[tuple[str, object]]:
    # By identity: datasets may compare in ways of their own, and may refer to each other in circles.
    if part is None or any(part is one for one in seen):
        return
    seen.append(part)
    yield path, part
    for name in _PARTS:
        yield from _parts(getattr(part, "__dict__", {}).get(name), f"{path}.{name}", seen)


def _is_generator(value: object) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


def _access(
    generator: Generator,
) -> tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], object]]:
    """What returns a generator's state, as plain values; what gives it one; and what checks that this can take it."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state"), partial(_check_bits, bits)
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state, check_torch
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate, lambda state: check_python(*state)
    return generator.get_state, generator.set_state, lambda state: check_numpy(*state)


def generator_states(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Their states, by name, as plain values."""
    return {name: _access(generator)[0]() for name, generator in generators.items()}


def set_generators(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Give generators the states that `check_generator_states` has checked."""
    for name, generator in generators.items():
        _access(generator)[1](states[name])


def check_generator_states(generators: Mapping[str, Generator], states: Any) -> None:
    """Check that `set_generators` can take these states."""
    if not isinstance(states, Mapping) or states.keys() != generators.keys():
        names = sorted(states) if isinstance(states, Mapping) else states
        raise ValueError(f"it has the generators {names!r:.200}, and the loader {sorted(generators)!r:.200}")
    for name, generator in generators.items():
        _access(generator)[2](states[name])


def _check_bits(bits: np.random.BitGenerator, state: Any) -> None:
    """Check a bit generator's state: one of the same kind can take it, and has it afterwards."""
    trial = copy.deepcopy(bits)
    try:
        for name, value in {**state, **state["state"]}.items():
            if name in _MOST and not 0 <= value <= _MOST[name]:
                raise ValueError(f"its {name} is out of range")
        trial.state = state
        if not is_same_state(trial.state, state):
            raise ValueError("a number is out of range")
    except (IndexError, OverflowError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"it has no state of a numpy generator {type(bits).__name__}: {error!r}") from error


def is_same_state(one: Any, other: Any) -> bool:
    """Whether states of generators are equal, which are nested plain values, arrays and tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same_state(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(is_same_state, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other))
    return bool(one == other)
