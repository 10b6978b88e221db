"""Knows which rows of each table may have changed since the last save, or that it can't know.

Two witnesses flag rows. Forward hooks mark every id looked up. Step hooks mark each row that an optimizer had
a gradient for, and compare the version counters, which torch raises at each change in place, of the parameter
and of what the given optimizers keep beside it: a change that no hook accounts for makes the table *whole*, so
that all its rows are saved.

A row looked up before a save may be updated after it. If a given optimizer owns the table, the step itself
flags the row, in whatever order forwards, backwards, steps and saves come: batches in a pipeline, gradients
accumulated over many. For other tables a step may go unseen; there every row looked up in one interval is
flagged in the next one, too. Only where no optimizer was given at all are lookups trusted to explain changes
that no step accounts for.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from cnr_store.errors import ModelMismatchError
from cnr_store.training.model.tables import Table
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.training.tracking.lookup_hooks import hook_lookups
from cnr_store.training.tracking.optimizer_rules import (
    Classes,
    is_noop_step,
    max_version_bumps,
    may_move_untouched_rows,
)
from cnr_store.training.tracking.step_hooks import Handle, remove_all, unwatch_steps, watch_steps
from cnr_store.training.tracking.stepped_tables import SteppedTables
from cnr_store.training.tracking.table_tracker import OUTSIDE, STATE_OUTSIDE, TableTracker

log = logging.getLogger("cnr_store")


class Tracker:
    """Flags the rows of tables that may have changed, from one `swap` to the next.

    Parameters
    ----------
    tables
        As `tables.find_tables` gives them.
    optimizers
        Those that update them. Steps of other optimizers are noticed, too.
    trusted
        Further classes whose steps leave rows without a gradient, and what is kept beside these, as they are: see
        `trusted_classes`.

    Lookups, steps, `swap`, `restore` and `clear` belong to the training thread. Replays of a captured CUDA
    graph run no hooks: tell of their rows with `mark`.
    """

    def __init__(
        self, tables: Sequence[Table], optimizers: Sequence[Optimizer] = (), trusted: Classes = ()
    ) -> None:
        self._optimizers = list(optimizers)
        self._trusted = trusted
        self._watches = {table.name: TableTracker(table, self._optimizers) for table in tables}
        self._stepped = SteppedTables(self._watches.values())
        self._begun: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._logged: set[tuple[str, str]] = set()
        self._find_owned()
        handles: list[Handle] = []
        for watch in self._watches.values():
            for module in watch.table.modules:
                hook_lookups(module, watch, handles)
        self._close = weakref.finalize(self, remove_all, handles)
        watch_steps(self)

    def close(self) -> None:
        """Remove every hook; nothing is flagged any more."""
        unwatch_steps(self)
        self._close()

    # Hooks

    def before_step(self, optimizer: Optimizer) -> None:
        """Notice what was changed since the last step, and by none."""
        for name, reason in self._unfinished([optimizer] if optimizer in self._begun else []).items():
            self._watches[name].make_whole(reason)
        self._begun.add(optimizer)
        believed = type(optimizer) in self._trusted
        for _position, watch in self._stepped.of(optimizer):
            if watch.changes:
                if watch.changed_elsewhere:
                    watch.make_whole(OUTSIDE)
                watch.account()
            if watch.slot_changes(optimizer):
                watch.make_whole(STATE_OUTSIDE)
                watch.account_slots(optimizer)
            if believed and not watch.resized and (gradient := watch.table.parameter.grad) is not None:
                watch.mark_gradient(gradient)  # which the step may clear, or fail behind its update

    def after_step(self, optimizer: Optimizer) -> None:
        """Flag the rows that the step had gradients for."""
        self._begun.discard(optimizer)
        asked: tuple[int, torch.dtype] | None = None
        reason, counted = None, 0.0
        for position, watch in self._stepped.of(optimizer):
            parameter = watch.table.parameter
            gradient = parameter.grad
            changes = max(watch.changes, watch.slot_changes(optimizer))
            if gradient is None and not changes:
                continue
            watch.account()
            watch.account_slots(optimizer)
            if asked != (position, parameter.dtype):
                asked = position, parameter.dtype
                reason = may_move_untouched_rows(optimizer, *asked, self._trusted)
                counted = max_version_bumps(optimizer, position, self._trusted)
            if reason is not None:
                watch.make_whole(reason)
            elif (
                watch.resized
                or gradient is None
                or changes > counted
                or (changes and gradient.is_sparse and is_noop_step(optimizer, gradient))
            ):
                watch.make_whole(f"a step of {type(optimizer).__name__} changed it by more than its gradient")
            else:
                watch.mark_gradient(gradient)

    def _unfinished(self, begun: Iterable[Optimizer]) -> dict[str, str]:
        """Tables that steps which have begun, and of which no end was seen, may have changed unnoticed.

        Where torch counts changes, they tell.
        """
        return {
            watch.table.name: f"a step of {type(optimizer).__name__} did not end, and may have changed any row"
            for optimizer in begun
            for position, watch in self._stepped.of(optimizer)
            if not max_version_bumps(optimizer, position, self._trusted)
        }

    def _find_owned(self) -> None:
        """Tell watches whether the given optimizers own their tables; parameter groups may be added at any time."""
        found = {id(watch) for optimizer in self._optimizers for _, watch in self._stepped.of(optimizer)}
        for watch in self._watches.values():
            watch.owned = id(watch) in found

    # What a checkpointer asks

    def mark(self, name: str, ids: object) -> None:
        """Flag rows of the table that were changed by hand, after the change.

        What optimizers keep beside rows is not meant: where that was changed by hand, the table is whole.

        Parameters
        ----------
        name
            A table's.
        ids
            Integers of any shape: a tensor, an array, or a sequence.

        Raises
        ------
        ModelMismatchError
            No such table, an id is no integer in ``[0, rows)``, or modules no longer share their parameter;
            nothing was flagged.
        """
        self.adopt_replaced()
        watch = self._named(name)
        try:
            tensor = ids if isinstance(ids, torch.Tensor) else torch.as_tensor(ids, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelMismatchError(
                f"table {name!r}: ids are no numbers ({error}); give integers"
            ) from error
        rows = watch.table.rows
        if tensor.numel():
            if tensor.dtype is torch.bool:
                raise ModelMismatchError(
                    f"table {name!r}: ids are a mask of torch.bool; give row numbers, as with mask.nonzero()"
                )
            if tensor.is_floating_point() or tensor.is_complex():
                raise ModelMismatchError(f"table {name!r}: ids are {tensor.dtype}; give integers")
            tensor = tensor.to(torch.int64)  # of unsigned ones torch knows no least
            low, high = int(tensor.min()), int(tensor.max())
            if low < 0 or high >= rows:
                raise ModelMismatchError(f"table {name!r}: ids from {low} to {high}, but it has {rows} rows")
            watch.mark(tensor)
        if watch.replaced:
            watch.make_whole("it, or what an optimizer keeps for its rows, was replaced")
        watch.account_all()

    def distrust(self, name: str, reason: str) -> None:
        """Declare that the rows of a table that changed in this interval are not known.

        Raises
        ------
        ModelMismatchError
            No such table.
        """
        self._named(name).make_whole(reason)

    def whole_reasons(self) -> dict[str, str]:
        """Tables that must be saved whole if the interval ends now, with the reason; ask before `swap`.

        Each reason is logged once for a table.
        """
        self.adopt_replaced()
        self._find_owned()
        moved = self._moved() | self._unfinished(list(self._begun))
        reasons: dict[str, str] = {}
        for name, watch in self._watches.items():
            reason = self._reason(watch) or moved.get(name)
            if reason is not None:
                reasons[name] = reason
        for name, reason in reasons.items():
            if (name, reason) not in self._logged:
                self._logged.add((name, reason))
                log.warning("table %r is saved whole: %s", name, reason)
        return reasons

    def _reason(self, watch: TableTracker) -> str | None:
        if watch.whole is not None:
            return watch.whole
        if watch.table.shared_with:
            return f"its memory is shared with {', '.join(watch.table.shared_with)}"
        if watch.table.parameter.is_inference():
            return "it was made in inference mode, where torch counts no changes"
        if watch.resized:
            return "its number of rows changed"
        if watch.changed_elsewhere:
            return OUTSIDE
        return STATE_OUTSIDE if watch.slots_changed else None

    def _moved(self) -> dict[str, str]:
        """Tables whose given optimizer, with its present settings, may move any row."""
        moved: dict[str, str] = {}
        for optimizer in self._optimizers:
            for position, watch in self._stepped.of(optimizer):
                parameter = watch.table.parameter
                reason = may_move_untouched_rows(optimizer, position, parameter.dtype, self._trusted)
                if reason is not None and parameter.requires_grad:
                    moved[watch.table.name] = reason
        return moved

    def swap(self, into: dict[str, Bitmap] | None = None) -> dict[str, Bitmap]:
        """End the interval: the packed bitmaps of the rows that may have changed in it, by table name.

        Of a table that must be saved whole every bit is set. A new interval begins, once they are in `into`: a
        caller that is interrupted before it has what this returns gives that back.
        """
        whole = self.whole_reasons()
        flagged = {} if into is None else into
        flagged.update({name: watch.flagged(name in whole) for name, watch in self._watches.items()})
        try:
            for watch in self._watches.values():
                watch.begin(carry=not watch.owned)
            return flagged
        except BaseException:
            # Interrupted between two tables, say: those that have begun would forget their rows.
            self.restore(flagged)
            raise

    def restore(self, bitmaps: Mapping[str, Bitmap]) -> None:
        """Give the bitmaps of a failed save back: their rows are flagged again.

        Raises
        ------
        ModelMismatchError
            There is no such table; nothing was flagged.
        """
        watches = [(self._named(name), flagged) for name, flagged in bitmaps.items()]
        for watch, flagged in watches:
            watch.give_back(flagged)

    def clear(self) -> None:
        """Begin a new interval in which nothing has changed yet: the tables were just loaded."""
        self.adopt_replaced()
        for watch in self._watches.values():
            watch.begin()

    def _named(self, name: str) -> TableTracker:
        if name not in self._watches:
            raise ModelMismatchError(f"no table {name!r}; there are {sorted(self._watches)}")
        return self._watches[name]

    def adopt_replaced(self) -> None:
        """Follow modules whose parameter was replaced by another one; the table is whole then.

        Raises
        ------
        ModelMismatchError
            Modules that shared one parameter no longer do.
        """
        for name, watch in self._watches.items():
            weights = [module._parameters.get("weight") for module in watch.table.modules]
            weight = weights[0]
            if weight is None or any(other is not weight for other in weights):
                raise ModelMismatchError(
                    f"table {name!r}: its modules no longer share one parameter; make a new checkpointer"
                )
            if weight is not watch.table.parameter:
                watch.make_whole("its parameter was replaced in the model")
                self._stepped.follow(watch, weight)
                watch.table.parameter = weight
