"""A data loader whose position can be saved: it counts the batches that training took, not those that were fetched."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from cnr_store.errors import OptionError
from cnr_store.policies.checks import integer
from cnr_store.training.data.loader_replay import (
    Replay,
    check_generator_states,
    check_loader,
    divide,
    find_generators,
    generator_states,
    is_same_state,
    set_generators,
)
from cnr_store.training.model.rng_state import check_rng_state, rng_state, set_rng_state

log = logging.getLogger("cnr_store")
T = TypeVar("T")
_FIELDS = frozenset({"epoch", "batch", "loader", "reused", "sharding", "start", "generators", "present"})


class TrackedReader(Generic[T]):
    """Yields a loader's batches and counts them, so that a restored run trains no sample twice and skips none.

    Iterating yields the rest of the current epoch; the next loop is the next epoch. A batch counts as trained once it
    is yielded: save after its step, and put nothing that prefetches between the reader and training. Batches that
    workers have fetched ahead are kept for later, and fetched again after a restore.

    A restored reader begins the epoch with the same random numbers as before and continues after the batches that were
    taken. Map-style data doesn't load those again; anything else reads and drops them. What a dataset itself changes
    while it is read, other than its random number generators, is not saved.

    Parameters
    ----------
    loader
        A `torch.utils.data.DataLoader`, or anything that can be iterated once per epoch.
    replay
        Whether to load the batches before the position again and drop them for map-style data, too. Datasets that draw
        random numbers in their workers need it.
    generators
        Random number generators that the order of samples depends on, by name. The global ones, and those that the
        loader, its samplers and its dataset hold as attributes, are known already.

    Raises
    ------
    OptionError
        The loader has a `state_dict` of its own, can't be iterated, or yields batches in no fixed order; or a
        generator can't be saved.
    """

    def __init__(
        self, loader: Iterable[T], *, replay: bool = False, generators: Mapping[str, Any] | None = None
    ) -> None:
        check_loader(loader)
        self._own = find_generators(loader, generators or {})
        self._source = Replay(loader, replay)
        self._epoch = 0
        self._taken = 0
        self._start: Mapping[str, Any] | None = None  # random numbers that this epoch began with
        # States of the loader's own generators at a position that was loaded, until it is resumed.
        self._present: Mapping[str, Any] | None = None
        # Whether workers of an earlier epoch serve this one; None before it begins.
        self._reused: bool | None = None
        self._live: Iterator[T] | None = None

    def __len__(self) -> int:
        """Batches of a whole epoch, at any position in it. A loader without a length raises its own TypeError."""
        return len(self._source)

    def __bool__(self) -> bool:
        """Always true, as for other loaders, even with no batches."""
        return True

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0: the one that the next loop continues."""
        return self._epoch

    @property
    def batch(self) -> int:
        """Batches of this epoch that were yielded."""
        return self._taken

    def __iter__(self) -> Iterator[T]:
        """Yield the rest of the current epoch."""
        while drawn := self._draw():
            yield drawn[0]

    def interval(self, batches: int) -> Interval[T]:
        """Yield exactly `batches` batches, across epochs. The next interval continues after them.

        What is returned is an iterator, and its length is the number of batches that are left of the interval.

        Raises
        ------
        OptionError
            `batches` is no integer of at least 0, or an epoch has no batch at all (raised while iterating).
        """
        return Interval(self, integer("batches", batches, minimum=0))

    def _draw(self) -> tuple[T] | None:
        """The next batch, or None at the end of the epoch."""
        try:
            if self._live is None:
                self._live = self._begin()
            batch = next(self._live)
        except StopIteration:
            self._epoch, self._taken = self._epoch + 1, 0
            self._start = self._present = self._reused = self._live = None
            return None
        except BaseException:
            self._live = None  # its position is unknown now: begin the epoch again and skip the batches taken
            raise
        self._taken += 1
        return (batch,)

    def _begin(self) -> Iterator[T]:
        self._source.set_epoch(self._epoch)
        if self._reused is None:
            self._reused = self._source.has_workers
        if self._start is None:
            self._start = {"global": _global_state(), "own": generator_states(self._own)}
            return self._source.begin(self._reused)
        current = _global_state()
        set_rng_state(self._start["global"])
        set_generators(self._own, self._start["own"])
        try:
            live = self._source.resume(self._taken, self._reused, self._states)
            self._go_on_drawing(current)
            return live
        finally:
            set_rng_state(current)

    def _go_on_drawing(self, current: Mapping[str, Any]) -> None:
        """Give the loader's own generators the states that they had at the position, and warn of shared ones.

        What else draws from them may be training. Samplers that draw when an epoch begins, as torch's do, are none the
        worse for it. One that draws for each sample does not repeat what it drew in the interrupted run.

        `current`: the states of the global generators, which are not yet put back.
        """
        found = self._states()
        if self._present is not None and self._source.is_loader:
            set_generators(self._own, self._present)
        self._present = None
        expected = {**self._states(), **_named("global", current)}
        if any(not is_same_state(expected[name], found[name]) for name in self._source.draws_late):
            log.warning(
                "the loader draws random numbers for each batch, from generators that something else draws from as "
                "well: the rest of epoch %d may repeat samples and leave out others. Give its sampler, or its dataset, "
                "a generator of its own",
                self._epoch,
            )

    def _states(self) -> dict[str, Any]:
        """The states of all generators that the loader may draw from."""
        return {**_named("global", _global_state()), **_named("own", generator_states(self._own))}

    def state_dict(self) -> dict[str, Any]:
        """The position, and the random numbers that the epoch began with; plain values that a save can store."""
        return {
            "epoch": self._epoch,
            "batch": self._taken,
            "loader": self._source.kind(),
            "reused": self._source.has_workers if self._reused is None else self._reused,
            "sharding": self._source.sharding(),
            "start": self._start,
            "generators": None if self._start else generator_states(self._own),
            "present": (self._present or generator_states(self._own)) if self._start else None,
        }

    def split_state(self, states: Sequence[Any], rank: int, world: int) -> dict[str, Any]:
        """The state with which this reader goes on where another number of ranks had readers.

        Between two epochs that is always possible. In the middle of one it is for a `DataLoader` with torch's own
        `DistributedSampler`, if what was taken of the epoch is a number of whole batches for the ranks of now: then no
        sample is trained twice, and none is left out.

        Parameters
        ----------
        states
            What `state_dict` of each rank's reader gave, by rank.
        rank, world
            This process's number, and how many ranks there are.

        Raises
        ------
        OptionError
            It is not possible, and why. Nothing was changed.
        """
        try:
            return self._split(states, rank, world)
        except OptionError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise OptionError(f"not states of readers, one for each rank: {error!r}") from error

    def _split(self, states: Sequence[Any], rank: int, world: int) -> dict[str, Any]:
        now = self.state_dict() | {"start": None, "present": None}
        for each, state in enumerate(states):
            if not isinstance(state, Mapping) or not state.keys() >= _FIELDS:
                raise OptionError(f"that of rank {each} is no state of a TrackedReader")
        now["epoch"], now["batch"] = divide(states, now, world)
        generators = [state["start"]["own"] if state["start"] else state["generators"] for state in states]
        if rank < len(states):
            now |= {"generators": generators[rank], "reused": states[rank]["reused"]}
        elif all(is_same_state(each, generators[0]) for each in generators):
            now["generators"] = generators[0]  # which ranks may share, to shuffle alike
        else:
            now["generators"] = generator_states(self._own)
        if now["batch"]:
            begun = states[rank]["start"]["global"] if rank < len(states) else _global_state()
            now |= {"start": {"global": begun, "own": now["generators"]}, "generators": None}
        return now

    def load_state_dict(self, state: Any) -> None:
        """Continue at the position where `state` was taken.

        Raises
        ------
        OptionError
            `state` is no state of a reader, or belongs to other data or another kind of loader. Nothing was changed.
        """
        if state is None:
            raise OptionError("None is not a state of this reader: the version was saved without reader=")
        try:
            self._check(state)
        except OptionError:
            raise
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise OptionError(
                f"not a state of this reader: {error}; give it the loader that was saved"
            ) from error
        self._epoch, self._taken, self._start = state["epoch"], state["batch"], state["start"]
        self._reused, self._live, self._present = state["reused"], None, state["present"]
        if self._start is None:
            set_generators(self._own, state["generators"])

    def _check(self, state: Any) -> None:
        if not isinstance(state, Mapping) or state.keys() != _FIELDS:
            raise ValueError(
                f"it is of type {type(state).__name__}, or has other fields than {', '.join(sorted(_FIELDS))}"
            )
        if any(type(state[field]) is not int or state[field] < 0 for field in ("epoch", "batch")):
            raise ValueError("its epoch or its batch is no count")
        if state["loader"] != (kind := self._source.kind()):
            raise ValueError(f"its loader is {state['loader']!r:.300}, this one {kind!r}")
        if type(state["reused"]) is not bool:
            raise ValueError("it does not say whether workers were reused")
        start = state["start"]
        if start is None and not state["batch"]:
            check_generator_states(self._own, state["generators"])
            return
        if not isinstance(start, Mapping):
            raise ValueError("the random numbers that its epoch began with are missing or malformed")
        check_rng_state(start["global"])
        check_generator_states(self._own, start["own"])
        if state["present"] is not None:
            check_generator_states(self._own, state["present"])


class Interval(Iterator[T]):
    """The batches of `TrackedReader.interval`; its length is how many are left."""

    def __init__(self, reader: TrackedReader[T], batches: int) -> None:
        self._reader = reader
        self._left = batches

    def __len__(self) -> int:
        return self._left

    def __next__(self) -> T:
        while self._left:
            was_fresh = self._reader.batch == 0
            if drawn := self._reader._draw():
                self._left -= 1
                return drawn[0]
            if was_fresh:
                raise OptionError(
                    f"the loader has no batch in epoch {self._reader.epoch - 1}, and the interval needs {self._left} "
                    "more"
                )
        raise StopIteration


def _named(kind: str, states: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{kind} {name}": state for name, state in states.items()}


def _global_state() -> dict[str, Any]:
    """The states of the global generators that a loader may draw from: all but CUDA's."""
    return {name: state for name, state in rng_state().items() if name != "cuda"}
