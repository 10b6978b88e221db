"""Writes saves in the background, one after the other; a save that fails forgets no row."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cnr_backends import Backend
from cnr_store.errors import BaseLostError, CheckpointError, ClosedError
from cnr_store.format.record import Record
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.saving.options import Options
from cnr_store.training.saving.pending_save import PendingSave
from cnr_store.training.saving.planner import Planner
from cnr_store.training.saving.process_exit import finish_before_exit
from cnr_store.training.saving.reentrant_guard import ReentrantGuard
from cnr_store.training.saving.snapshot import Bitmaps, LiveRows, Snapshot
from cnr_store.training.tracking.audit import Audit
from cnr_store.training.tracking.tracker import Tracker
from cnr_store.writing.plan import Plan
from cnr_store.writing.writer import Writer

log = logging.getLogger("cnr_store")


class SaveCallbacks:
    """Callbacks run after each save, on the thread that writes.

    Parameters
    ----------
    on_commit
        Called with the record of each committed version, and the greatest version of other writers that retention may
        remove, before the save's result is set. It must not raise.
    on_done
        The caller's own: called with each save that was committed or has failed. What it raises is only logged.
    guard
        Refuses calls from within `on_done`, because the thread that holds it may be waiting for `on_done`.
    """

    def __init__(
        self,
        on_commit: Callable[[Record, str], None],
        on_done: Callable[[PendingSave], object] | None,
        guard: ReentrantGuard,
    ) -> None:
        self.on_commit = on_commit
        self._on_done = on_done
        self._guard = guard

    def run_on_done(self, pending: PendingSave) -> None:
        """Call `on_done`, unless the save never began."""
        if self._on_done is None or pending.future.cancelled():
            return
        try:
            with self._guard.refuse_this_thread():
                self._on_done(pending)
        except BaseException:  # the pool would drop it unseen, and the save's outcome stays what it is
            log.exception("on_done of the save of step %d failed", pending.step)


class SaveQueue:
    """Starts saves on the training thread and writes them on another, at most one at a time.

    Parameters
    ----------
    callbacks
        Run after each save.

    Attributes
    ----------
    planner, writer
        Decide what a version holds, and write it to the store.
    tracker, audit
        Know the rows that may have changed, and check by samples that no others did.
    """

    def __init__(
        self,
        backend: Backend,
        trained: TrainedModel,
        options: Options,
        audit: Audit,
        callbacks: SaveCallbacks,
    ) -> None:
        self.planner = Planner(trained, options)
        self.writer = Writer(backend, options.workers)
        self.audit = audit
        self._callbacks = callbacks
        self._pending: tuple[PendingSave, Bitmaps] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="cnr-save")
        self.tracker = Tracker(trained.tables, trained.optimizers, options.trusted_optimizers)
        # Before the first save, so that no save waits for a compiler between its start and its commit.
        self._executor.submit(self.planner.compile_codecs)

    @property
    def latest(self) -> PendingSave | None:
        """The save whose outcome `finish_latest` has not applied yet."""
        return None if self._pending is None else self._pending[0]

    def start(self, pending: PendingSave, snapshot: Snapshot, full: bool) -> None:
        """Take the changed rows, hand the save to the background, and wait while that reads the model.

        An interrupt at any point leaves either a save under way or none, and never a row forgotten.
        """
        snapshot.unsafe = self.tracker.whole_reasons()
        try:
            # Before the swap, which fills `dirty`: after an interrupt, what it took must be given back.
            self._pending = (pending, snapshot.dirty)
            self.tracker.swap(snapshot.dirty)
            plan = self._plan(pending, snapshot, full)
            # Before the write begins, or the process might end in between.
            finish_before_exit(pending.future)
            self._executor.submit(self._write, pending, plan)
            if any(isinstance(write.source, LiveRows) for write in plan.rows):
                pending.rows_taken.wait()
        except BaseException as error:
            pending.result_taken = True  # the caller gets this error
            if pending.future.cancel():  # it has not begun, and never will
                self.tracker.restore(snapshot.dirty)
                self._pending = None
            else:
                pending.interrupted.set()
                pending.rows_taken.wait()
            if isinstance(error, RuntimeError) and not isinstance(error, CheckpointError):
                raise ClosedError(f"the save of step {pending.step} can't begin: {error}") from error
            raise

    def _plan(self, pending: PendingSave, snapshot: Snapshot, full: bool) -> Plan:
        decision = self.planner.decide(snapshot, full)
        if not decision.full:  # a full version holds every row, flagged or not
            self.audit.check(snapshot.arrays, snapshot.dirty, self.tracker.make_whole)
        self.audit.renew(snapshot.arrays, snapshot.dirty)
        return self.planner.plan(decision, snapshot, pending)

    def _write(self, pending: PendingSave, plan: Plan) -> None:
        try:
            if not pending.future.set_running_or_notify_cancel():
                return
            record = self.writer.write(plan, pending.rows_taken.set)
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            try:
                log.error("save of step %d failed: %s", plan.step, error)
            finally:
                pending.future.set_exception(error)
        else:
            try:
                # Before the result is set: whoever waits for it may then wait for the maintenance of this commit.
                self._callbacks.on_commit(record, self.writer.removable)
            finally:
                pending.future.set_result(record)
        finally:
            # Training waits for both events, and a caller's log handler may have raised above.
            pending.rows_taken.set()
            try:
                self._callbacks.run_on_done(pending)
            finally:
                pending.callbacks_done.set()

    def finish_latest(self, next_step: int | None = None) -> None:
        """Wait for the save under way and apply its outcome, on the training thread.

        A failure whose result nobody took is raised if `next_step` is given: to the save of that step. If an interrupt
        cuts this short, the next call does all of it again.
        """
        if self._pending is None:
            return
        pending, dirty = self._pending
        if pending.future.cancelled():  # `start` was interrupted, and so was its undoing
            self.tracker.restore(dirty)
            self._pending = None
            return
        error = pending.future.exception()
        pending.callbacks_done.wait()  # on_done may take the result
        if error is None:
            self.planner.apply_commit(pending.future.result(), dirty)
        else:
            self.tracker.restore(dirty)
        # The next delta would need the lost base, too.
        if isinstance(error, BaseLostError):
            self.planner.drop_bases()
            self.writer.renew(None)
        self._pending = None
        if error is not None and next_step is not None and not pending.result_taken:
            pending.result_taken = True
            error.add_note(
                f"This is about the save of step {pending.step}, whose result nobody asked for. That of step "
                f"{next_step} was not begun: call save again."
            )
            raise error

    def close(self) -> None:
        """Stop tracking, wait for the thread that writes, and accept no more saves."""
        self.tracker.close()
        self._executor.shutdown()
