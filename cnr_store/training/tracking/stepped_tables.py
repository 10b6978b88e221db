"""Which tables an optimizer steps, or changes through other tensors over their memory.

Not every step searches through all parameters. What a step did to these tables is settled here, too.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from cnr_store.training.model.memory import overlapping
from cnr_store.training.model.optimizer_state import parts_of
from cnr_store.training.tracking.optimizer_rules import (
    Classes,
    is_noop_step,
    max_version_bumps,
    may_miss_its_rows,
    may_move_untouched_rows,
    unsound_sums,
    written_slots,
)
from cnr_store.training.tracking.step_pass import StepPass, Stepped
from cnr_store.training.tracking.table_tracker import OUTSIDE, TableTracker

log = logging.getLogger("cnr_store")

_Address = tuple[int, tuple[int, ...], tuple[int, ...]] | None
"""Where a tensor's memory begins, its shape and its strides; None for one without a single memory."""


class _Found(NamedTuple):
    """What is known of an optimizer: the ids of its parameters by group, and what they are of tables.

    The parameters that are no tables may get other memory at any time, so their addresses are kept, too.
    """

    ids: list[list[int]]
    others: list[torch.Tensor]
    addresses: list[_Address]
    parameters: list[torch.Tensor]  # kept, so that no other one gets the id of one of them
    stepped: Stepped
    sharing: list[TableTracker]


class SteppedTables:
    """Finds the tracked tables among the parameters of an optimizer.

    The result is kept until `forget`, while the groups hold the same parameters.

    `trackers`: of the tables.
    `given`: the optimizers whose state is saved.
    """

    def __init__(self, trackers: Iterable[TableTracker], given: Sequence[Optimizer] = ()) -> None:
        self._trackers = {id(tracker.table.parameter): tracker for tracker in trackers}
        self._given = given
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose state was looked for
        self._found: weakref.WeakKeyDictionary[Optimizer, _Found] = weakref.WeakKeyDictionary()
        self._passes: weakref.WeakKeyDictionary[Optimizer, StepPass] = weakref.WeakKeyDictionary()
        self._sound: weakref.WeakKeyDictionary[Optimizer, set[TableTracker]] = weakref.WeakKeyDictionary()
        self._looked_at: weakref.WeakKeyDictionary[Optimizer, Stepped] = weakref.WeakKeyDictionary()

    def by(self, optimizer: Optimizer) -> Stepped:
        """The tables that an optimizer steps, each with the position of its parameter group."""
        return self._find(optimizer).stepped

    def sharing(self, optimizer: Optimizer) -> list[TableTracker]:
        """The tables over whose memory an optimizer steps other parameters."""
        return self._find(optimizer).sharing

    def pass_over(self, optimizer: Optimizer) -> StepPass:
        """What goes through the tables that an optimizer steps."""
        stepped = self._find(optimizer).stepped
        found = self._passes.get(optimizer)
        if found is None or found.stepped != stepped:
            found = self._passes[optimizer] = StepPass(optimizer, stepped)
        return found

    def renew_pass(self, optimizer: Optimizer) -> None:
        """Make another pass at the next step: counters may have been replaced."""
        self._passes.pop(optimizer, None)

    def check_sums(self, optimizer: Optimizer, stepped: Stepped) -> None:
        """Before a step, make tables whole whose rows it may move by `unsound_sums`.

        It looks at each table once, and again after `doubt`.

        `stepped`: the tables that the optimizer steps; the same list while nothing changes.
        """
        if self._looked_at.get(optimizer) is stepped:
            return
        on_cuda = any(tracker.table.parameter.is_cuda for _, tracker in stepped)
        if on_cuda and torch.cuda.is_current_stream_capturing():
            return  # a captured graph can't wait for the device, and moves nothing yet
        sound = self._sound.setdefault(optimizer, set())
        for _, tracker in stepped:
            if tracker not in sound:
                reason = unsound_sums(optimizer, tracker.table.parameter)
                if reason is None:
                    sound.add(tracker)
                else:
                    tracker.make_whole(reason)
        self._looked_at[optimizer] = stepped

    def check_rows(self, tracker: TableTracker, rows: torch.Tensor) -> None:
        """Doubt a table if `rows`, changed by hand, have `unsound_sums`."""
        parameter = tracker.table.parameter
        if any(
            unsound_sums(each, parameter, rows) for each, sound in self._sound.items() if tracker in sound
        ):
            self.doubt([tracker])

    def doubt(self, trackers: Iterable[TableTracker]) -> None:
        """Have `check_sums` look at tables again that were changed otherwise than by steps."""
        self._looked_at.clear()
        for tracker in trackers:
            for sound in self._sound.values():
                sound.discard(tracker)

    def unchanged(self, optimizers: Sequence[Optimizer]) -> list[TableTracker]:
        """Tables of one of these optimizers, without a change that is not acknowledged, as far as a pass tells."""
        steppers = Counter(id(tracker) for each in optimizers for _, tracker in self.by(each))
        return [
            tracker
            for each in optimizers
            for tracker in self.pass_over(each).unchanged(each)
            if steppers[id(tracker)] == 1
        ]

    def forget(self) -> None:
        """Search anew: parameters may have got other memory, and trackers other bitmaps and counters."""
        self._found.clear()
        self._passes.clear()

    def forget_all(self) -> None:
        """`forget`, and `doubt` all tables."""
        self.forget()
        self._looked_at.clear()
        self._sound.clear()

    @contextmanager
    def renewed(self, whole: Iterable[TableTracker]) -> Iterator[None]:
        """A context in which trackers begin an interval. Passes over those that keep bitmaps and counters stay.

        `whole` are those whose changes in the last one are not known.
        """
        self.doubt(whole)
        # An interrupt leaves none: each knows bitmaps that may have been taken.
        passes = list(self._passes.items())
        self.forget()
        yield
        for optimizer, each in passes:
            if each.begin_interval(optimizer):
                self._passes[optimizer] = each

    def _find(self, optimizer: Optimizer) -> _Found:
        ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        found = self._found.get(optimizer)
        if found is None or found.ids != ids or found.addresses != _addresses(found.others):
            stepped = [
                (position, self._trackers[parameter])
                for position, group in enumerate(ids)
                for parameter in group
                if parameter in self._trackers
            ]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            others = [parameter for parameter in parameters if id(parameter) not in self._trackers]
            sharing = self._over(parameters)
            found = _Found(ids, others, _addresses(others), parameters, stepped, sharing)
            self._found[optimizer] = found
        return found

    def warn_of_strangers(self, owned: Callable[[], Collection[int]], objects: object) -> None:
        """Log once of each optimizer that was not given, steps parameters of the model, and has state not saved.

        Of one that steps within another one, such as a wrapper, the state may be in the other's ``state_dict``.
        `owned` gives the ids of the parameters that are saved; `objects` is further state that is.
        """
        for optimizer, found in self._found.items():
            if optimizer in self._known or any(optimizer is each for each in self._given):
                continue
            ids = owned()
            stepped = [one for one in found.parameters if id(one) in ids]
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled steps would trace it
    def _over(self, parameters: Iterable[torch.Tensor]) -> list[TableTracker]:
        """The tables whose memory is that of `parameters`, too."""
        tables = [tracker.table.parameter for tracker in self._trackers.values()]
        others = {id(parameter): parameter for parameter in parameters if id(parameter) not in self._trackers}
        return [
            self._trackers[id(tensor)]
            for pair in overlapping([*tables, *others.values()])
            for tensor, other in (pair, pair[::-1])
            if id(tensor) in self._trackers and id(other) in others
        ]

    def replace_parameter(self, tracker: TableTracker, parameter: object) -> None:
        """Look for `parameter` instead of the one that the tracker's table had."""
        self._trackers.pop(id(tracker.table.parameter), None)
        self._trackers[id(parameter)] = tracker
        self.forget()


def _addresses(parameters: Iterable[torch.Tensor]) -> list[_Address]:
    return [
        (each.data_ptr(), each.shape, each.stride()) if each.layout is torch.strided else None
        for each in parameters
    ]


def settle_step(optimizer: Optimizer, stepped: Stepped, trusted: Classes, has_closure: bool = False) -> None:
    """Flag the rows that a step had gradients for, table by table.

    A class of the caller's may have changed a table uncounted, and removed the gradient: its own or its closure's.
    """
    is_trusted = type(optimizer) in trusted
    judged: tuple[int, torch.dtype] | None = None
    reason, max_changes, written = None, 0.0, written_slots(optimizer, trusted)
    for position, tracker in stepped:
        parameter = tracker.table.parameter
        gradient = parameter.grad
        changes = max(tracker.changes, tracker.slot_changes(optimizer, written))
        may_have_had = tracker.had_gradient or (is_trusted and has_closure and parameter.requires_grad)
        if gradient is None and not changes and not may_have_had:
            continue
        if judged != (position, parameter.dtype):  # tables of a group share its settings
            judged = position, parameter.dtype
            reason = may_move_untouched_rows(optimizer, *judged, trusted)
            max_changes = max_version_bumps(optimizer, position, trusted)
        if gradient is None and not changes and reason is None and not is_trusted:
            continue  # a hook removed the gradient before the update
        tracker.note_step(optimizer)
        if reason is not None:
            tracker.make_whole(reason)
        elif (
            tracker.resized
            or gradient is None
            or changes > max_changes
            or (changes and gradient.is_sparse and is_noop_step(optimizer, gradient))
            or may_miss_its_rows(optimizer, position, parameter, gradient)
        ):
            beyond = f"a step of {type(optimizer).__name__} changed it by more than its gradient"
            tracker.make_whole(OUTSIDE if math.isinf(tracker.changes) else beyond)
        else:
            tracker.mark_gradient(gradient)
        # Last: were this interrupted, the changes would still need an explanation.
        tracker.acknowledge()
        tracker.acknowledge_slots(optimizer)
