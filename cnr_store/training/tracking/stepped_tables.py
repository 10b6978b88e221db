"""Which tables an optimizer steps, or changes through other tensors over their memory.

Not every step searches through all parameters.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from cnr_store.training.model.optimizer_state import parts_of
from cnr_store.training.model.tensors import overlapping
from cnr_store.training.tracking.step_pass import StepPass
from cnr_store.training.tracking.table_tracker import TableTracker

log = logging.getLogger("cnr_store")


class SteppedTables:
    """Finds the tracked tables among the parameters of an optimizer.

    The result is kept while the groups hold the same parameters.

    `trackers`: of the tables.
    `given`: the optimizers whose state is saved.
    """

    def __init__(self, trackers: Iterable[TableTracker], given: Sequence[Optimizer] = ()) -> None:
        self._trackers = {id(tracker.table.parameter): tracker for tracker in trackers}
        self._given = given
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that stepped in this interval
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose state was looked for
        self._passes: weakref.WeakKeyDictionary[Optimizer, StepPass] = weakref.WeakKeyDictionary()

    def pass_over(self, optimizer: Optimizer) -> StepPass:
        """What goes through the tables that an optimizer steps."""
        parameters = [list(map(id, group["params"])) for group in optimizer.param_groups]
        found = self._passes.get(optimizer)
        if found is None or found.parameters != parameters:
            trackers = self._trackers
            stepped = [
                (position, trackers[parameter])
                for position, group in enumerate(parameters)
                for parameter in group
                if parameter in trackers
            ]
            found = self._passes[optimizer] = StepPass(optimizer, parameters, stepped)
        return found

    def renew_pass(self, optimizer: Optimizer) -> None:
        """Make another pass at the next step: counters may have been replaced."""
        self._passes.pop(optimizer, None)

    def unchanged(self, optimizers: Sequence[Optimizer]) -> list[TableTracker]:
        """Tables of one of these optimizers, without a change that is not acknowledged, as far as a pass tells."""
        steppers = Counter(id(tracker) for each in optimizers for _, tracker in self.pass_over(each).stepped)
        return [
            tracker
            for each in optimizers
            for tracker in self.pass_over(each).unchanged(each)
            if steppers[id(tracker)] == 1
        ]

    def forget_passes(self) -> None:
        """Make other passes: trackers may have got other bitmaps and counters."""
        self._passes.clear()

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """A context in which trackers begin an interval. Passes over those that keep bitmaps and counters stay."""
        # An interrupt leaves none: each knows bitmaps that may have been taken.
        passes = list(self._passes.items())
        self._passes.clear()
        self._strangers.clear()
        yield
        for optimizer, each in passes:
            if each.begin_interval(optimizer):
                self._passes[optimizer] = each

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer begins a step."""
        if not any(optimizer is each for each in self._given):
            self._strangers.add(optimizer)

    def overwritten(self) -> dict[str, str]:
        """Why tables are whole over whose memory optimizers stepped parameters of others in this interval, by name."""
        found: dict[str, str] = {}
        tables = [tracker.table.parameter for tracker in self._trackers.values()] if self._strangers else []
        for optimizer in self._strangers:
            own = [one for group in optimizer.param_groups for one in group["params"]]
            others = {id(one) for one in own} - self._trackers.keys()
            for pair in overlapping([*tables, *own]) if others else ():
                for tensor, other in (pair, pair[::-1]):
                    if id(other) in others and (tracker := self._trackers.get(id(tensor))) is not None:
                        why = (
                            f"a step of {type(optimizer).__name__} changed another parameter over its memory"
                        )
                        found[tracker.table.name] = why
        return found

    def warn_of_strangers(self, owned: Callable[[], Collection[int]], objects: object) -> None:
        """Log once of each optimizer that was not given, steps parameters of the model, and has state not saved.

        Of one that steps within another one, such as a wrapper, the state may be in the other's ``state_dict``.
        `owned` gives the ids of the parameters that are saved; `objects` is further state that is.
        """
        for optimizer in self._strangers - self._known:
            ids = owned()
            stepped = [one for group in optimizer.param_groups for one in group["params"] if id(one) in ids]
            kept = [*filter(torch.is_tensor, parts_of([optimizer.state.get(one) for one in stepped]))]
            if not kept:
                continue
            self._known.add(optimizer)
            saved = parts_of([objects, [each.state_dict() for each in self._given]])
            if {*map(id, kept)} - {*map(id, saved)}:
                log.warning(
                    "%d parameters of the model are updated by %s, whose state is in no version; give all optimizers "
                    "that train: Checkpointer(url, model, optimizer)",
                    *(len(stepped), type(optimizer).__name__),
                )

    def replace_parameter(self, tracker: TableTracker, parameter: object) -> None:
        """Look for `parameter` instead of the one that the tracker's table had."""
        self._trackers.pop(id(tracker.table.parameter), None)
        self._trackers[id(parameter)] = tracker
        self._passes.clear()
