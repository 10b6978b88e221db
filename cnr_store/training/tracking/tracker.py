"""Knows which rows of each table may have changed since the last save, or that it can't know.

Hooks around the steps of optimizers flag each row that a step had a gradient for. They also compare the version
counters, which torch raises at each change in place, of the parameter and of what the given optimizers keep for its
rows. A change that no gradient explains makes the table *whole*: all its rows are compared with what is stored, or
written where nothing is known of that.

A row looked up before a save may be updated after it, and the step itself flags it then: in whatever order forwards,
backwards, steps and saves come. Tables that no given optimizer owns may be updated by what is no optimizer of torch.
So they are whole if gradients of them were computed, in this interval or in the one before, and no step was seen since.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cnr_store.errors import ModelMismatchError, listed
from cnr_store.policies.whole_tables import ADVICE, describe, summary
from cnr_store.training.distributed.pieces import is_dtensor
from cnr_store.training.distributed.sharded import ShardedModule
from cnr_store.training.distributed.torchrec_door import torchrec
from cnr_store.training.model.arguments import check_row_ids
from cnr_store.training.model.names import named_modules
from cnr_store.training.model.patterns import NOTHING, Exclusion
from cnr_store.training.model.tables import Table, check_weight, table_weights
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.training.tracking.optimizer_rules import (
    Classes,
    may_move_untouched_rows,
    most_changes,
    unclear_state,
    written_slots,
)
from cnr_store.training.tracking.step_pass import SteppedTables
from cnr_store.training.tracking.table_tracker import OUTSIDE, STATE_OUTSIDE, TableTracker

log = logging.getLogger("cnr_store")
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Hook = Callable[[Optimizer, Args, Kwargs], None]
_Layout = dict[str, tuple[int, set[str], bool]]

LISTENERS: weakref.WeakSet[Tracker] = weakref.WeakSet()
"""Trackers that are called around every step of every optimizer, while they live."""
_UNENDED = "a step with a closure did not end, and may have changed any row"


class Tracker:
    """Flags the rows of tables that may have changed, from one `swap` to the next.

    Steps, `swap`, `restore` and `clear` belong to the training thread. Replays of a captured CUDA graph run no hooks:
    `mark` their rows.

    `tables`: from `tables.find_tables`.
    `optimizers`: those that update the tables. Steps of other optimizers are seen, too.
    `trusted`: further classes whose steps move neither rows without a gradient nor what is kept for these: see
    `trusted_classes`.
    `sharded`: TorchRec's modules that look up rows of `tables`.

    `stepped`: finds the tables among the parameters of an optimizer.
    `logs`: whether `whole_reasons` logs what it finds. Of many ranks, the first logs what all of them found.
    `compares_all`: whether saves compare all tables, also those of which hooks tell the changed rows.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizers: Sequence[Optimizer] = (),
        trusted: Classes = (),
        sharded: Sequence[ShardedModule] = (),
    ) -> None:
        self.logs, self.compares_all = True, False
        self._optimizers = list(optimizers)
        self._trusted = trusted
        self._trackers = {table.name: TableTracker(table, self._optimizers) for table in tables}
        self.stepped = SteppedTables(self._trackers.values(), self._optimizers)
        self._logged: set[tuple[str, str]] = set()
        self._hooks = ExitStack()
        self._find_owners()
        by_key = {tracker.table.key: tracker for tracker in self._trackers.values()}

        def mark(key: str, _first_row: int, rows: torch.Tensor) -> None:  # which keeps no `Tracker` alive
            by_key[key].mark(rows)

        self._lookups = [(module, torchrec().LookupHooks(module, mark)) for module in sharded]
        for _, lookups in self._lookups:
            self._hooks.callback(lookups.remove)
        self._close = weakref.finalize(self, self._hooks.close)
        _hook_steps()
        LISTENERS.add(self)

    def close(self) -> None:
        """Remove every hook; nothing is flagged any more."""
        LISTENERS.discard(self)
        self._close()

    # Hooks

    def before_step(self, optimizer: Optimizer, has_closure: bool = False) -> None:
        """Look for changes that no step made, before `optimizer` makes its own, and before its own hooks.

        A closure may make gradients within the step.
        """
        self.stepped.note_step(optimizer)
        trusts = type(optimizer) in self._trusted
        every = self.stepped.pass_over(optimizer)
        left = every.before(optimizer)
        for _position, tracker in every.stepped if trusts else left:
            for owner, reason in ((None, OUTSIDE), (optimizer, STATE_OUTSIDE)):
                if tracker.changes(owner):
                    tracker.make_whole(reason)
                    tracker.acknowledge(owner)
            if trusts:
                self._before_trusted(tracker, has_closure)

    def _before_trusted(self, tracker: TableTracker, has_closure: bool) -> None:
        """Flag rows now: the step may set its gradient to zero, or raise after its update."""
        gradient = tracker.table.parameter.grad
        tracker.had_gradient = gradient is not None
        if gradient is not None and not tracker.resized:
            tracker.mark_gradient(gradient)
        if has_closure:  # its gradients are not there yet
            tracker.make_whole(OUTSIDE if tracker.whole is _UNENDED else _UNENDED)

    def after_step(self, optimizer: Optimizer, has_closure: bool = False) -> None:
        """Flag the rows that the step had gradients for."""
        for position, tracker in self.stepped.pass_over(optimizer).after(optimizer, self._trusted):
            self._settle(optimizer, position, tracker, has_closure)

    def _settle(self, optimizer: Optimizer, position: int, tracker: TableTracker, has_closure: bool) -> None:
        """Flag the rows of one table that a step had gradients for.

        A trusted class may have changed the table uncounted, and removed the gradient: its own or its closure's.
        """
        parameter, trusted = tracker.table.parameter, self._trusted
        gradient = parameter.grad
        changes = max(tracker.changes(), tracker.changes(optimizer, written_slots(optimizer, trusted)))
        may_have_had = False
        if type(optimizer) in trusted:
            may_have_had = tracker.had_gradient or (has_closure and parameter.requires_grad)
            if tracker.whole is _UNENDED:
                tracker.whole = None
        if gradient is None and not changes and not may_have_had:
            return
        tracker.note_step(optimizer)
        if reason := may_move_untouched_rows(optimizer, position, parameter.dtype, trusted):
            tracker.make_whole(reason)
        elif tracker.resized or gradient is None or changes > most_changes(optimizer, gradient, trusted):
            beyond = f"a step of {type(optimizer).__name__} changed it by more than its gradient"
            tracker.make_whole(OUTSIDE if math.isinf(tracker.changes()) else beyond)
        else:
            tracker.mark_gradient(gradient)
        # Last: were this interrupted, the changes would still need an explanation.
        tracker.acknowledge()
        tracker.acknowledge(optimizer)

    def _find_owners(self) -> None:
        """Note which tables the given optimizers own; parameter groups may be added at any time."""
        owned = {
            id(tracker) for each in self._optimizers for _, tracker in self.stepped.pass_over(each).stepped
        }
        for tracker in self._trackers.values():
            tracker.has_optimizer = id(tracker) in owned
            if not tracker.has_optimizer and (handle := tracker.watch_gradients()):
                self._hooks.callback(handle.remove)

    # What a checkpointer calls

    def mark(self, name: str, ids: object) -> None:
        """Flag rows of a table, after they or what optimizers keep for them were changed by hand.

        A table whose parameter or state was replaced by another tensor is whole all the same.

        `name`: the table's.
        `ids`: integers of any shape: a tensor, an array, or a sequence.
        """
        self.adopt_replaced()
        tracker = self.named(name)
        rows = check_row_ids(name, ids, tracker.table.rows)
        first = tracker.table.first_row
        held = rows[(rows >= first) & (rows < first + tracker.table.local_rows)]
        if held.numel():
            tracker.mark(held - first)
        if tracker.replaced:
            tracker.make_whole("it, or what an optimizer keeps for its rows, was replaced")
        tracker.acknowledge_all()

    def make_whole(self, name: str, reason: str) -> None:
        """Declare that the rows of a table that changed in this interval are not known."""
        self.named(name).make_whole(reason)

    def to_compare(self, unsafe: Collection[str]) -> Collection[str]:
        """Names of the tables that a save compares: those of which hooks can't tell the changed rows, or all."""
        return self._trackers.keys() if self.compares_all else unsafe

    def whole_reasons(self) -> dict[str, str]:
        """Why tables are saved whole if the interval ends now, by name; call it before `swap`.

        Each reason is logged once for a table, in one warning for all tables.
        """
        reasons = self.reasons()
        if self.logs:
            self.warn(reasons)
        return reasons

    def reasons(self) -> dict[str, str]:
        """`whole_reasons`, without a word in the log."""
        return self._judge()[0]

    def _judge(self) -> tuple[dict[str, str], set[int]]:
        """`whole_reasons`, and by id the trackers without a change that is not acknowledged, as far as passes tell."""
        self.adopt_replaced()
        self._find_owners()
        for module, lookups in self._lookups:
            if reason := lookups.check():  # some may not have been seen
                for tracker in self._trackers.values():
                    if any(tracker.table.key == table.name for table in module.tables):
                        tracker.make_whole(reason)
        overwritten, moved = self.stepped.overwritten(), self._moved_by_settings()
        unchanged = set(map(id, self.stepped.unchanged(self._optimizers)))
        reasons: dict[str, str] = {}
        for name, tracker in self._trackers.items():
            known = id(tracker) in unchanged and not tracker.is_declared_whole
            own = None if known else tracker.whole_reason
            if reason := overwritten.get(name) or own or moved.get(name):
                reasons[name] = reason
        return reasons, unchanged

    def warn(self, reasons: Mapping[str, str]) -> None:
        """Log of which tables hooks can't tell the changed rows, each reason once."""
        new = {name: reason for name, reason in reasons.items() if (name, reason) not in self._logged}
        self._logged.update(new.items())
        if len(new) == 1:
            log.warning("table %r is compared with what is stored: %s. %s", *new.popitem(), ADVICE)
        elif new:
            told = len(new), describe(summary(new)), ADVICE
            log.warning("%d tables are compared with what is stored: %s. %s", *told)

    def ways(self) -> dict[str, str]:
        """Which rows of each table are flagged, for people."""
        return {
            name: "rows looked up" if tracker.table.is_fused else "rows with a gradient"
            for name, tracker in self._trackers.items()
        }

    def flagged(self) -> dict[str, Bitmap]:
        """What `swap` would return now; the interval goes on."""
        whole = self.whole_reasons()
        return {name: tracker.flagged(name in whole) for name, tracker in self._trackers.items()}

    def _moved_by_settings(self) -> dict[str, str]:
        """Why tables are whole whose given optimizer, with its present settings, may move any row."""
        moved: dict[str, str] = {}
        for optimizer in self._optimizers:
            judged: dict[tuple[int, torch.dtype], str | None] = {}  # tables of a group share its settings
            for position, tracker in self.stepped.pass_over(optimizer).stepped:
                parameter = tracker.table.parameter
                key = position, parameter.dtype
                if key not in judged:
                    judged[key] = may_move_untouched_rows(optimizer, *key, self._trusted)
                reason = judged[key] or unclear_state(optimizer, parameter, self._trusted)
                if reason is not None and parameter.requires_grad:
                    moved[tracker.table.name] = reason
        return moved

    def swap(self, into: dict[str, Bitmap] | None = None) -> dict[str, Bitmap]:
        """End the interval and begin a new one.

        `into`: takes the bitmaps before the new interval begins, so that a caller who is interrupted can `restore`
        them.

        Returns: By table name, the packed bitmap of the rows that may have changed; every bit is set for a table that
        must be saved whole.
        """
        whole, unchanged = self._judge()
        if self.logs:
            self.warn(whole)
        flagged = {} if into is None else into
        flagged.update({name: tracker.flagged(name in whole) for name, tracker in self._trackers.items()})
        try:
            self.stepped.begin_interval()
            for tracker in self._trackers.values():
                tracker.begin_interval(is_settled=id(tracker) in unchanged)
            return flagged
        except BaseException:
            # An interrupt between two tables, say: those that have begun would forget their rows.
            self.restore(flagged)
            raise

    def restore(self, bitmaps: Mapping[str, Bitmap]) -> None:
        """Flag the rows of a failed save again. `ModelMismatchError` if there is no such table; nothing was flagged."""
        for tracker, flagged in [(self.named(name), flagged) for name, flagged in bitmaps.items()]:
            tracker.give_back(flagged)

    def clear(self, slots: Iterable[tuple[Optimizer, Mapping[str, Mapping[str, torch.Tensor]]]] = ()) -> None:
        """Begin a new interval in which nothing has changed yet: the rows of the tables were just loaded.

        `slots` are those that optimizers are yet to be given, by table and key: others there count as changed.
        """
        self.adopt_replaced()
        self.stepped.begin_interval()
        for tracker in self._trackers.values():
            tracker.begin_interval()
        for optimizer, by_table in slots:
            for name, given in by_table.items():
                self._trackers[name].count_from(optimizer, given)

    def named(self, name: str) -> TableTracker:
        """What is known of a table."""
        if name not in self._trackers:
            raise ModelMismatchError(f"no table {name!r}; there are {sorted(self._trackers)}")
        return self._trackers[name]

    def adopt_replaced(self) -> None:
        """Follow modules whose parameter was replaced by another one; the table is whole then."""
        for tracker in self._trackers.values():
            # All modules of a table have one: see `ModelStructure`. TorchRec's are none of them.
            for module in tracker.table.modules[:1]:
                weight = module._parameters.get("weight")
                if weight is not None and weight is not tracker.table.parameter:
                    tracker.make_whole("its parameter was replaced in the model")
                    self.stepped.replace_parameter(tracker, weight)
                    tracker.table.parameter = weight


def outside_graphs(function: Hook) -> Hook:
    """Have compiled code break its graph to call `function`, which the compiler can't trace through."""
    uncompiled: Hook = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch types a part of itself

    @functools.wraps(function)
    def call(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
        # Eager code is spared torch's wrapper, which takes longer than a small table's hook.
        (uncompiled if torch.compiler.is_compiling() else function)(optimizer, args, kwargs)

    return call


@functools.cache
def _hook_steps() -> None:
    # Once and for good: torch fails if these hooks are added or removed while it calls them, and a tracker may be
    # collected at any time.
    register_optimizer_step_pre_hook(_before_step)


@outside_graphs
def _before_step(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    door = torchrec()
    listeners = [] if door is not None and door.passes_steps_on(optimizer) else list(LISTENERS)
    if listeners:
        _put_after_step_first(optimizer)
    for listener in listeners:
        listener.before_step(optimizer, _has_closure(optimizer, args, kwargs))


@outside_graphs
def _after_step(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    for listener in list(LISTENERS):
        listener.after_step(optimizer, _has_closure(optimizer, args, kwargs))


def _has_closure(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> bool:
    """Whether a step was given something to call: torch counts the optimizer itself among its arguments."""
    return any(callable(each) and each is not optimizer for each in (*args, *kwargs.values()))


def _put_after_step_first(optimizer: Optimizer) -> None:
    """Have `_after_step` called right after the update, because hooks of others may raise or change gradients.

    It becomes the first of the optimizer's own hooks, which torch calls before those of all optimizers. Another hook
    may be put first at any time, so each step looks again.
    """
    hooks = optimizer._optimizer_step_post_hooks
    if next(iter(hooks.values()), None) is not _after_step:
        others = {key: hook for key, hook in hooks.items() if hook is not _after_step}
        hooks.clear()
        optimizer.register_step_post_hook(_after_step)
        hooks.update(others)


class ModelStructure:
    """Which modules of a model have its tables' parameters, and under which names.

    A table that is put in another one's place has no hooks, and what was saved of that one is not its own. Another
    parameter in the same modules is no change here: the tracker follows it.

    `model`: has the tables.
    `sharded`: TorchRec's modules in it. The memory of their tables was noted when they were found, and is to stay.
    `excluded`: tables that are passed over.
    """

    def __init__(
        self, model: nn.Module, sharded: Sequence[ShardedModule] = (), excluded: Exclusion = NOTHING
    ) -> None:
        self._model, self._excluded = model, excluded
        self._modules = list(model.modules())  # kept, or a new module might get the id of an old one
        self._layout = _layout(model, excluded)
        self._sharded = [(each, torchrec().memory_of(each)) for each in sharded]  # kept, as the modules are

    def check(self) -> None:
        """Look through the model again."""
        layout, known = _layout(self._model, self._excluded), self._layout
        if differing := sorted(name for name in {*layout, *known} if layout.get(name) != known.get(name)):
            raise ModelMismatchError(
                f"table parameters of the model are not what and where they were when this checkpointer was made: "
                f"{listed(differing)}. Each came or went, is in another module, shares its parameter with others, or "
                "is a DTensor only now or only then; make a new checkpointer"
            )
        for sharded, memory in self._sharded:
            if torchrec().memory_of(sharded) != memory:
                raise ModelMismatchError(
                    f"the tables of {sharded.path or 'the model'!r} lie in other memory than when this checkpointer "
                    "was made, as after DistributedModelParallel.reshard; make a new checkpointer"
                )


def _layout(model: nn.Module, excluded: Exclusion) -> _Layout:
    """By stored name of each parameter that is a table: its module's id, all its names, whether it is a DTensor."""
    modules = list(named_modules(model, remove_duplicate=False))
    names: dict[int, set[str]] = {}
    for path, _, _, weight in table_weights(model, excluded, remove_duplicate=False):
        check_weight(path, weight)
        names[id(weight)] = set()
    layout: _Layout = {}
    for path, module in modules:
        for attribute, parameter in module._parameters.items():
            if id(parameter) in names:
                name = f"{path}.{attribute}" if path else attribute
                names[id(parameter)].add(name)
                layout[name] = id(module), names[id(parameter)], is_dtensor(parameter)
    return layout
