"""A data loader whose position can be saved: by the batches that training took, not those that workers fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from cnr_store.errors import OptionError
from cnr_store.training.data.generators import (
    check_generator_states,
    check_generators,
    find_generators,
    generator_states,
    set_generators,
)
from cnr_store.training.data.loader_replay import source_of
from cnr_store.training.model.arguments import check_count
from cnr_store.training.model.rng_state import check_rng_state, rng_state, set_rng_state

T = TypeVar("T")
_FIELDS = {"epoch", "batch", "loader", "reused", "start", "generators"}


class TrackedReader(Generic[T]):
    """Gives out a loader's batches and knows how many were taken, so that no sample is trained twice or skipped.

    Iterating gives the rest of the present epoch; the next loop is the next epoch. A batch counts as trained from the
    moment it is given out: save after its step, and let nothing stand between the reader and training that takes
    batches ahead. What workers have fetched beyond that is held for later, and fetched again after a restore.

    A restored reader begins the epoch as it was begun, with the same random numbers, and goes on behind the
    batches that were taken: map-style data without loading those again, anything else by reading and dropping them.

    Parameters
    ----------
    loader
        A `torch.utils.data.DataLoader`, or anything that can be iterated once an epoch.
    replay
        Load the batches before the position again and drop them, also for map-style data: for datasets
        that draw random numbers in their workers.
    generators
        Random number generators that the order depends on, by name, beside the global ones and those that
        the loader, its samplers and its dataset hold as attributes.

    Raises
    ------
    OptionError
        A loader that has a state of its own, can't be iterated, or gives out batches in no fixed order.
    """

    def __init__(
        self, loader: Iterable[T], *, replay: bool = False, generators: Mapping[str, Any] | None = None
    ) -> None:
        self._source = source_of(loader, replay)
        self._own = find_generators(loader) | check_generators(generators or {})
        self._epoch = 0
        self._taken = 0
        self._start: Mapping[str, Any] | None = None  # what the present epoch was begun with
        self._reused: bool | None = None  # whether workers of before are to do this epoch; None: as it comes
        self._live: Iterator[T] | None = None

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever the reader stands in it; of a loader that has no length, its TypeError."""
        return len(self._source)

    def __bool__(self) -> bool:
        """True, as for other loaders: whether there is a reader, however many batches it has."""
        return True

    @property
    def epoch(self) -> int:
        """Number of the present epoch, from 0: the one that the next loop goes on with."""
        return self._epoch

    @property
    def batch(self) -> int:
        """Batches of this epoch that were given out."""
        return self._taken

    def __iter__(self) -> Iterator[T]:
        while drawn := self._draw():
            yield drawn[0]

    def interval(self, batches: int) -> Iterator[T]:
        """Exactly so many batches, over the borders of epochs; those after them are held for the next interval.

        Raises
        ------
        OptionError
            `batches` is no count, or (while iterating) an epoch has no batch at all.
        """
        return self._emit(check_count("batches", batches, minimum=0))

    def _emit(self, batches: int) -> Iterator[T]:
        while batches:
            was_fresh = self._taken == 0
            drawn = self._draw()
            if drawn:
                batches -= 1
                yield drawn[0]
            elif was_fresh:
                raise OptionError(
                    f"the loader has no batch in epoch {self._epoch - 1}; {batches} are still due"
                )

    def _draw(self) -> tuple[T] | None:
        """The next batch, or None at the end of the epoch."""
        try:
            if self._live is None:
                self._live = self._begin()
            batch = next(self._live)
        except StopIteration:
            self._epoch, self._taken = self._epoch + 1, 0
            self._start = self._reused = self._live = None
            return None
        except BaseException:
            self._live = None  # it may stand beyond the batch that failed
            raise
        self._taken += 1
        return (batch,)

    def _begin(self) -> Iterator[T]:
        self._source.tell_epoch(self._epoch)
        if self._reused is None:
            self._reused = self._source.reuses_workers
        if self._start is None:
            self._start = {"global": _global_state(), "own": generator_states(self._own)}
            return self._source.begin(self._reused)
        present = _global_state()
        set_rng_state(self._start["global"])
        set_generators(self._own, self._start["own"])
        try:
            return self._source.resume(self._taken, self._reused)
        finally:
            set_rng_state(present)

    def state_dict(self) -> dict[str, Any]:
        """What to save: the position, and the random numbers that the epoch was begun with."""
        return {
            "epoch": self._epoch,
            "batch": self._taken,
            "loader": self._source.kind(),
            "reused": self._source.reuses_workers if self._reused is None else self._reused,
            "start": self._start,
            "generators": None if self._start else generator_states(self._own),
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on where `state` was taken.

        Raises
        ------
        OptionError
            It is no such state, or belongs to other data or another kind of loader. Nothing was changed.
        """
        if state is None:
            raise OptionError("None is not a state of this reader: the version was saved without reader=")
        try:
            self._check(state)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise OptionError(
                f"not a state of this reader: {error}; give it the loader that was saved"
            ) from error
        self._epoch, self._taken, self._start = state["epoch"], state["batch"], state["start"]
        self._reused, self._live = state["reused"], None
        if self._start is None:
            set_generators(self._own, state["generators"])

    def _check(self, state: Any) -> None:
        if not isinstance(state, Mapping) or state.keys() != _FIELDS:
            raise ValueError(
                f"it is of type {type(state).__name__}, or has other fields than {', '.join(sorted(_FIELDS))}"
            )
        for field in ("epoch", "batch"):
            if type(state[field]) is not int or state[field] < 0:
                raise ValueError(f"its {field} is no count")
        if state["loader"] != self._source.kind():
            raise ValueError(f"its loader is {state['loader']!r:.300}, this one {self._source.kind()!r}")
        if type(state["reused"]) is not bool:
            raise ValueError("it does not say whether workers were reused")
        start = state["start"]
        if start is None:
            if state["batch"]:
                raise ValueError("it stands in an epoch and does not say how that was begun")
            check_generator_states(self._own, state["generators"])
            return
        if not isinstance(start, Mapping):
            raise ValueError("how its epoch was begun is malformed")
        check_rng_state(start["global"])
        check_generator_states(self._own, start["own"])


def _global_state() -> dict[str, Any]:
    """The global generators that a loader may draw from: those of the CPU."""
    return {name: state for name, state in rng_state().items() if name != "cuda"}
