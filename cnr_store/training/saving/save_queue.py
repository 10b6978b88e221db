"""Writes saves in the background, one after the other; a save that fails forgets no row."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cnr_backends import Backend
from cnr_store.errors import (
    BaseLostError,
    CheckpointError,
    ClosedError,
    OutageError,
    RanksError,
    StateError,
    SupersededError,
    TrackingError,
)
from cnr_store.format.record import Record
from cnr_store.maintenance.collection.retention import room_advice
from cnr_store.ranks.group import Group
from cnr_store.ranks.protocol import Team
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.process.process_exit import finish_before_exit, is_exiting
from cnr_store.training.process.threads import ReentrantGuard
from cnr_store.training.saving.agreement import compare_together
from cnr_store.training.saving.auto_maintenance import BackgroundMaintenance
from cnr_store.training.saving.explanation import Explanation, SaveStats, save_line
from cnr_store.training.saving.options import Options
from cnr_store.training.saving.pending_save import PendingSave, run_on_done
from cnr_store.training.saving.planner import Planner
from cnr_store.training.saving.snapshot import Snapshot
from cnr_store.training.saving.tally import RowSets, Tally
from cnr_store.training.tracking.audit import Audit, warn_unflagged
from cnr_store.training.tracking.small_tables import SmallTables
from cnr_store.training.tracking.tracker import Tracker
from cnr_store.writing.patience import Patience
from cnr_store.writing.plan import Plan
from cnr_store.writing.writer import Writer

log = logging.getLogger("cnr_store")
_ABOUT = (
    "This is about the save of step %d, whose result nobody asked for. %sThat of step %d was not begun%s."
)
_COMPILES_FIRST = "save of step %d: rows beyond snapshot_bytes wait for the compiler. See `cnr warm`"


class SaveQueue:
    """Starts saves on the training thread and writes them on another, at most one at a time.

    `upkeep`: is told of each commit.
    `guard`: refuses calls from within `on_done`.
    `group`: the ranks that save together.

    `number`: how many saves this rank has begun or refused. After an interrupt, ranks differ in it.
    `tally`: where rows are, over all ranks.
    `planner`, `writer`: decide what a version holds, and write it to the store.
    `tracker`, `audit`: know the rows that may have changed, and check by samples that no others did.
    `is_preempted`: whether a signal asks the process to end soon.
    `outage`: what saves have met of storage that fails.
    `fold_bytes`: bytes of the folds that no save's stats have counted yet.
    """

    def __init__(
        self,
        backend: Backend,
        trained: TrainedModel,
        options: Options,
        upkeep: BackgroundMaintenance,
        guard: ReentrantGuard,
        group: Group,
    ) -> None:
        self._group = group
        self.tally = Tally(group, trained.tables)
        self._teams: list[Team] = []  # of saves whose keys all ranks may still read
        self.number = 0
        self.planner = Planner(trained, options, self.tally)
        self.is_preempted: Callable[[], bool] = bool
        self.fold_bytes = 0
        self._patience = Patience(
            options.failures.retry_seconds,
            options.limits.max_write_bytes_per_second,
            is_ending=lambda: self._closing or self._in_haste(),
            in_haste=self._in_haste,
        )
        self.outage = self._patience.outage
        self.writer = Writer(backend, options.limits.workers, self._patience, room_advice)
        self.audit = Audit.from_option(options.tracking.audit)
        self._small: SmallTables | None = None  # of the last save
        self._options = options
        self._closing = self._is_hasty = False
        self._failures = 0  # in a row
        self._live_pace: float | None = None
        self._upkeep, self._guard = upkeep, guard
        self._pending: tuple[PendingSave, RowSets] | None = None
        self._untold: PendingSave | None = None  # it failed before a load, and no save came behind
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="cnr-save")
        self.tracker = Tracker(trained.tables, trained.optimizers, options.trusted, trained.sharded)
        self.tracker.logs, self.tracker.compares_all = group.world == 1, options.audits_all
        # Before the first save, so that no save waits for a compiler between its start and its commit.
        steps = options.codecs.compile_steps(trained.tables)
        self._compiled = self._executor.submit(lambda: any(self._closing or is_exiting() for _ in steps))

    @property
    def latest(self) -> PendingSave | None:
        """The save whose outcome `finish_latest` has not applied yet, or a failed one that no save has followed."""
        return self._untold if self._pending is None else self._pending[0]

    def new_team(self, number: int) -> Team:
        """The ranks that make the save of this number, in which none of them has any earlier one under way."""
        self.number = number
        for team in self._teams:
            team.forget()
        self._teams = [Team(self._group, number)]
        return self._teams[0]

    def refuse(self, error: BaseException) -> None:
        """Let the next save fail, which other ranks may have begun and this one, interrupted, has not."""
        self.number += 1
        Team(self._group, self.number).give_up(error)

    def progress(self) -> int:
        """A number that moves while a save is being written, here or on the ranks that this one waits for."""
        return self.writer.backend.operations + sum(team.beats.count for team in self._teams)

    def start(self, snapshot: Snapshot, team: Team, *, may_hold: bool) -> None:
        """Take the changed rows, hand the save to the background, and wait while that reads the model.

        An interrupt at any point leaves either a save under way or none, and never a row forgotten.

        `team`: from `new_team`.
        `may_hold`: whether this save, while it reads the model, may wait for storage that fails.
        """
        pending, planner, dirty = snapshot.pending, self.planner, snapshot.dirty
        fails = f"the save of step {pending.step} can't begin"
        try:
            planner.choose_step(snapshot.arrays)
            snapshot.sets = planner.sets(snapshot.arrays, dirty, snapshot.compared)
            # Before the swap, which fills `dirty`: after an interrupt, what it took must be given back.
            self._pending = pending, snapshot.sets
            self.tracker.swap(dirty)
            self.tally.join(dirty)
            plan = self._plan(snapshot)
            reads_model = planner.reads_model
            self._patience.begin(training_waits=reads_model, may_hold=may_hold)
            # Before the write begins, or the process might end in between.
            finish_before_exit(pending.future)
            self._executor.submit(self._write, pending, snapshot.sets, plan, snapshot.sizes, team)
            if reads_model:
                if not self._compiled.done():
                    log.info(_COMPILES_FIRST, pending.step)
                pending.rows_taken.wait()
        except BaseException as error:
            pending.result_taken = True  # the caller gets this error
            team.give_up(error)
            if pending.future.cancel():  # it has not begun, and never will
                self.tracker.restore(dirty)
                self._pending = None
                if not isinstance(error, RanksError):
                    self._group.break_off()  # others may still count their rows together with this one
            else:
                pending.interrupted.set()
                self._patience.may_hold = False
                pending.rows_taken.wait()
            if isinstance(error, RanksError):  # the connection broke because another rank failed
                raise team.told(error, lambda cause: f"{fails}: {cause}") from error
            if isinstance(error, RuntimeError) and not isinstance(error, CheckpointError):
                raise ClosedError(f"{fails}: {error}") from error
            raise

    def explain(self, arrays: Sequence[RowArray]) -> Explanation:
        """What a delta now would hold of each table, and why. Waits for the save under way."""
        tracker, dirty = self.tracker, self.tracker.flagged()
        if self._pending is not None:
            pending, sets = self._pending
            is_undone = pending.result_taken and pending.future.cancelled()
            if is_undone or (pending.settled.wait() and pending.error is None):
                self.finish_latest()
            else:  # its outcome is the next save's to tell, and that one has its rows
                dirty = {
                    name: rows | sets.dirty[name] if sets.dirty[name].shape == rows.shape else rows
                    for name, rows in dirty.items()
                }
        unsafe, _ = tracker.whole_reasons(), self.planner.judge(arrays)
        names = tracker.to_compare(unsafe)
        compared = self.planner.compare(arrays, names) if self.planner.compares(names, full=False) else {}
        sets = self.planner.sets(arrays, dirty, compared)
        found = self.planner.explain(sets, arrays, tracker.ways(), unsafe)
        found.live_pace = self._live_pace
        return found

    def _plan(self, snapshot: Snapshot) -> Callable[[], Plan]:
        planner, arrays, sets = self.planner, snapshot.arrays, snapshot.sets
        snapshot.small = self._small = SmallTables.among(arrays, self._small)
        names = self.tracker.to_compare(snapshot.unsafe)
        if planner.compares(names, snapshot.full):
            found = compare_together(
                self._group,
                f"save of step {snapshot.pending.step}: compare",
                sorted(array.path for array in arrays if array.table.name in names),
                lambda: planner.compare(arrays, names),
                lambda: planner.comparison.blocks,
            )
            snapshot.compared.update(found)
        changed = planner.count(snapshot)
        decision = planner.decide(snapshot, changed)
        if not decision.full:  # a full version holds every row, flagged or not
            warn_unflagged(sets.unflagged(snapshot.unsafe))
            others = [array for array in arrays if array.path not in snapshot.compared]
            self.audit.check(others, snapshot.dirty, self.tracker.make_whole)
        self.audit.renew(arrays, snapshot.dirty)
        return planner.plan(decision, snapshot, changed)

    def _write(
        self,
        pending: PendingSave,
        sets: RowSets,
        plan: Callable[[], Plan],
        sizes: tuple[int, int],
        team: Team,
    ) -> None:
        try:
            if not pending.future.set_running_or_notify_cancel():
                return
            record = self._timed_write(pending, plan(), sizes, team)
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            try:
                self.outage.miss(pending.step, error)
                if not isinstance(error, OutageError) or self._in_haste():  # or the outage was told of
                    log.error("save of step %d failed: %s", pending.step, error)
            finally:
                pending.settle(error)
        else:
            try:
                if team.rank == 0:
                    # Before the result is set: whoever waits for it may then wait for the maintenance of this commit.
                    self._upkeep.schedule(record, self.writer.removable)
                    assert pending.stats is not None
                    log.info(save_line(pending.stats, record))
                self.outage.end()
            finally:
                pending.settle(record)
            self.planner.foresee_commit(record, sets)
        finally:
            # Training waits for both events, and a caller's log handler may have raised above.
            pending.rows_taken.set()
            try:
                run_on_done(pending, self._options.on_done, self._guard)
            finally:
                pending.callbacks_done.set()

    def _timed_write(self, pending: PendingSave, plan: Plan, sizes: tuple[int, int], team: Team) -> Record:
        def rows_taken() -> None:
            self._patience.training_waits = False
            pending.end_reading(reads_model=plan.live_bytes > 0)

        writer, began = self.writer, time.perf_counter()
        encoding, putting = writer.encoding_seconds, writer.backend.seconds_putting
        record = writer.write(plan, rows_taken, team)
        pending.written = SaveStats(
            rows=record.rows,
            table_rows=sizes[0],
            bytes=record.nbytes,
            ratio=record.nbytes / max(1, sizes[1]),
            seconds_stalled=0.0,  # `PendingSave.stats` has it: `save` may not have returned yet
            seconds_writing=time.perf_counter() - began,
            seconds_encoding=writer.encoding_seconds - encoding,
            seconds_putting=writer.backend.seconds_putting - putting,
            seconds_waiting=self._patience.seconds_waited,
            ranks=record.policy.get("ranks"),
            fold_bytes=self.fold_bytes,
            live_bytes=plan.live_bytes,
        )
        self.fold_bytes = 0
        return record

    def finish_latest(self, next_step: int | None = None) -> None:
        """Wait for the save under way and apply its outcome, on the training thread.

        A failure whose result nobody took is raised if `next_step` is given: to the save of that step. If an interrupt
        cuts this short, the next call does all of it again.
        """
        if self._pending is None:
            self._untold = self._untold if next_step is None else None
            return
        pending, sets = self._pending
        if pending.result_taken and pending.future.cancelled():  # `start` and its undoing were interrupted
            self.tracker.restore(sets.dirty)
            self._pending = None
            return
        pending.callbacks_done.wait()  # on_done may take the result
        error = pending.future.exception()
        if error is None:
            self.planner.apply_commit(pending.future.result(), sets)
            if pending.live_pace:
                self._live_pace = pending.live_pace
        else:
            self.tracker.restore(sets.dirty)
        # The next delta would need the lost base, too.
        if isinstance(error, BaseLostError):
            self.planner.drop_bases()
            self.writer.renew(None)
        self._failures = 0 if error is None else self._failures + (not isinstance(error, OutageError))
        self._pending, self._untold = None, None if error is None or next_step is not None else pending
        if error is None or next_step is None or pending.result_taken or self._may_go_on(error):
            return
        pending.result_taken = True
        in_a_row = f"It is failure {self._failures} in a row. " if self._failures > 1 else ""
        again = "" if isinstance(error, SupersededError) else ": call save again"
        error.add_note(_ABOUT % (pending.step, in_a_row, next_step, again))
        raise error

    def _may_go_on(self, error: BaseException) -> bool:
        """Whether training goes on after a failed save, whose rows the next one has."""
        return isinstance(error, OutageError) or (
            self._options.failures.on_failure == "log"
            and self._failures < self._options.failures.max_failures
            and isinstance(error, Exception)
            and not isinstance(error, SupersededError | StateError | TrackingError)
        )

    def hurry(self, orderly: bool = False) -> None:
        """End soon: limit no rate any more. Nor is anything tried again, unless the end is `orderly`."""
        self._closing, self._is_hasty = True, self._is_hasty or not orderly

    def _in_haste(self) -> bool:
        return self._is_hasty or self.is_preempted() or is_exiting()

    def close(self) -> None:
        """Stop tracking, wait for the thread that writes, accept no more saves, and free the memory."""
        self.hurry()  # an interrupt may have cut `finish_latest` short
        self.tracker.close()
        self._executor.shutdown()
        self.planner.close()
