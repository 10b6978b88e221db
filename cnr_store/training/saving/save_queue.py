"""Saves in the background, one after the other, none of which forgets a row."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

from torch.optim import Optimizer

from cnr_store.errors import BaseLostError, CheckpointError, ClosedError
from cnr_store.format.record import Record
from cnr_store.policies.policy import Costs, Decision, PolicyName
from cnr_store.training.model.optimizer_state import table_slots
from cnr_store.training.model.row_arrays import RowArray, row_arrays
from cnr_store.training.model.tables import Table
from cnr_store.training.saving.pending_save import LeasedRows, PendingSave, ReentrantGuard, finish_before_exit
from cnr_store.training.saving.planner import Bitmaps, Planner
from cnr_store.training.saving.snapshot import DenseSnapshot
from cnr_store.training.tracking.audit import Audit
from cnr_store.training.tracking.tracker import Tracker
from cnr_store.writing.plan import Plan, RowsWrite
from cnr_store.writing.writer import Writer

log = logging.getLogger("cnr_store")


class SaveCallbacks:
    """Whom the outcome of a save is told: `committed` first, then `on_done`, both on the thread that writes.

    Parameters
    ----------
    committed
        Called with the record of each version, before anybody learns that it is there. It must not raise.
    on_done
        The caller's, called with each save that was committed or has failed. What it raises is only logged.
    turn
        Refused to `on_done`, since whoever has it may be waiting for that.
    """

    def __init__(
        self,
        committed: Callable[[Record], None],
        on_done: Callable[[PendingSave], object] | None,
        turn: ReentrantGuard,
    ) -> None:
        self.committed = committed
        self._on_done = on_done
        self._turn = turn

    def tell(self, pending: PendingSave) -> None:
        """Call back, unless the save never began."""
        if self._on_done is None or pending.future.cancelled():
            return
        try:
            with self._turn.call_back():
                self._on_done(pending)
        except BaseException:  # the pool would drop it in silence; the save is what it is
            log.exception("on_done of the save of step %d failed", pending.step)


class SaveQueue:
    """Begins saves on the training thread and writes them on another, at most one at a time.

    Parameters
    ----------
    planner, writer
        What a version gets, and how it comes into the store.
    tracker, audit
        Which rows may have changed, and whether that is true.
    outcomes
        Whom the outcome is told.
    policy, costs
        When versions are whole.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizers: Sequence[Optimizer],
        planner: Planner,
        writer: Writer,
        tracker: Tracker,
        audit: Audit,
        outcomes: SaveCallbacks,
        policy: PolicyName,
        costs: Costs,
    ) -> None:
        self._tables = tables
        self._optimizers = optimizers
        self._planner = planner
        self._writer = writer
        self._tracker = tracker
        self._audit = audit
        self._outcomes = outcomes
        self._policy: PolicyName = policy
        self._costs = costs
        self._pending: tuple[PendingSave, Bitmaps] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="cnr-save")

    def ahead(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread that writes, before the first save."""
        self._executor.submit(work)

    @property
    def latest(self) -> PendingSave | None:
        """The save whose outcome has not been taken into account."""
        return None if self._pending is None else self._pending[0]

    def begin(self, pending: PendingSave, taken: DenseSnapshot, full: bool) -> None:
        """Take the changed rows, hand all to the background, and wait while it reads the model.

        An interrupt at any point leaves either a save under way or none, never a row forgotten.
        """
        arrays = row_arrays(self._tables, self._optimizers)
        self._planner.warn_unknown_slots(partial(table_slots, self._optimizers, self._tables))
        unsafe = self._tracker.whole_reasons()
        rows_done = threading.Event()
        dirty: Bitmaps = {}
        try:
            self._pending = (pending, dirty)
            self._tracker.swap(dirty)
            decision = self._decide(arrays, dirty, unsafe, taken, full)
            rows = self._planner.rows(decision, arrays, dirty, unsafe, pending)
            plan = self._plan(pending.step, taken, decision, rows)
            finish_before_exit(pending.future)
            self._executor.submit(self._write, pending, plan, rows_done)
            if any(isinstance(write.source, LeasedRows) for write in rows):
                rows_done.wait()
        except BaseException as error:
            pending.asked = True  # the caller has this error
            if pending.future.cancel():  # it has not begun, and never will
                self._tracker.restore(dirty)
                self._pending = None
            else:
                pending.abandoned.set()
                rows_done.wait()
            if isinstance(error, RuntimeError) and not isinstance(error, CheckpointError):
                raise ClosedError(f"the save of step {pending.step} can't begin: {error}") from error
            raise

    def _decide(
        self,
        arrays: Sequence[RowArray],
        dirty: Bitmaps,
        unsafe: dict[str, str],
        taken: DenseSnapshot,
        full: bool,
    ) -> Decision:
        beside_bytes = sum(write.values.nbytes for write in taken.dense)
        decision = self._planner.decide(
            self._policy, self._costs, arrays, dirty, unsafe, full=full, beside_bytes=beside_bytes
        )
        if not decision.full:  # or all is written, whatever is believed of it
            self._audit.check(arrays, dirty, self._tracker.make_whole)
        self._audit.renew(arrays, dirty)
        return decision

    def _plan(self, step: int, taken: DenseSnapshot, decision: Decision, rows: Sequence[RowsWrite]) -> Plan:
        lineage = self._planner.lineage
        return Plan(
            step=step,
            previous=lineage.version,
            rows=rows,
            dense=taken.dense,
            state=taken.state,
            policy=asdict(decision),
            needs=lineage.needs((write.path, write.base) for write in rows if write.base is not None),
            restores=lineage.restores,
            metadata=taken.metadata,
        )

    def _write(self, pending: PendingSave, plan: Plan, rows_done: threading.Event) -> None:
        try:
            if not pending.future.set_running_or_notify_cancel():
                return
            record = self._writer.write(plan, rows_done.set)
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            try:
                log.error("save of step %d failed: %s", plan.step, error)
            finally:
                pending.future.set_exception(error)
        else:
            try:
                self._outcomes.committed(record)
            finally:
                pending.future.set_result(record)
        finally:
            # Training waits for each of these; a log's handler, which is foreign code, may raise before.
            rows_done.set()
            try:
                self._outcomes.tell(pending)
            finally:
                pending.told.set()

    def settle(self, tell_before: int | None = None) -> None:
        """Wait for the save under way and take its outcome into account, on the training thread.

        If it failed and nobody has asked for its result, it is raised to the save of step `tell_before`. What was
        interrupted half way is done again by the next call.
        """
        if self._pending is None:
            return
        pending, dirty = self._pending
        if pending.future.cancelled():  # interrupted twice: once as it began, and once in giving it up
            self._tracker.restore(dirty)
            self._pending = None
            return
        error = pending.future.exception()
        pending.told.wait()  # whoever is called back may ask for the failure
        if error is None:
            self._planner.committed(pending.future.result(), dirty)
        else:
            self._tracker.restore(dirty)
        if isinstance(error, BaseLostError):
            self._planner.forget()
            self._writer.renew(None)
        self._pending = None
        if error is not None and tell_before is not None and not pending.asked:
            pending.asked = True
            error.add_note(
                f"This is about the save of step {pending.step}, whose result nobody asked for. That of step "
                f"{tell_before} was not begun: call save again."
            )
            raise error

    def close(self) -> None:
        """Wait for the thread that writes, and take no more."""
        self._executor.shutdown()
