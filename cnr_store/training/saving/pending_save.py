"""A save under way."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace

from cnr_store.catalog.version_info import VersionInfo, html_facts
from cnr_store.errors import ClosedError, SaveError, SkippedError
from cnr_store.format.record import Record
from cnr_store.training.process.threads import Latch, ReentrantGuard
from cnr_store.training.saving.explanation import SaveStats

log = logging.getLogger("cnr_store")


class PendingSave:
    """A save under way, as `Checkpointer.save` returns it.

    Attributes
    ----------
    step
        The step that is saved.
    stall_seconds
        How long `save` held the training thread.
    skipped
        Whether nothing is written, because another save was still being written. `result` then raises
        `SkippedError`.
    stats
        What was written and how long that took, as `SaveStats`. None before the commit, and of a save that failed or
        was skipped.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_seconds = 0.0
        self.skipped = False
        # The rest is for the queue that writes it.
        self.future: Future[Record] = Future()
        # Until it is set, only the thread that writes asks `future` anything: an interrupt right after its lock was
        # taken would keep it.
        self.settled = Latch()
        self.error: BaseException | None = None
        self.result_taken = False  # somebody knows the outcome
        self.interrupted = threading.Event()  # training goes on although rows are still in the model
        self.rows_taken = Latch()  # nothing is read from the model any more
        self.callbacks_done = Latch()
        self.began = time.perf_counter()
        self.written: SaveStats | None = None
        self._process = os.getpid()

    @classmethod
    def skip(cls, step: int, step_under_way: int) -> PendingSave:
        """A skipped save at `step`, because the save of `step_under_way` is still being written."""
        pending = cls(step)
        pending.skipped = pending.result_taken = True
        pending.settle(
            SkippedError(
                f"the save of step {step} was skipped, as that of step {step_under_way} was still being written; the "
                "rows are part of the next one (save(..., overlap='wait') waits instead)"
            )
        )
        return pending

    def settle(self, outcome: Record | BaseException) -> None:
        """Tell the outcome to all that wait for it."""
        if isinstance(outcome, BaseException):
            self.error = outcome
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
        self.settled.set()

    def end_reading(self, *, reads_model: bool) -> None:
        """Note that nothing is read from the model any more. A second call changes nothing.

        Parameters
        ----------
        reads_model
            Whether anything was.

        Raises
        ------
        SaveError
            Training may have gone on meanwhile.
        """
        try:
            if reads_model and not self.rows_taken.is_set():
                self.check_uninterrupted()
        finally:
            self.rows_taken.set()

    def check_uninterrupted(self) -> None:
        """Raise `SaveError` if training may go on before its rows were read."""
        if self.interrupted.is_set():
            raise SaveError(f"the save of step {self.step} was interrupted while it read the model")

    @property
    def stats(self) -> SaveStats | None:
        if self.written is None:
            return None
        return replace(self.written, seconds_stalled=self.seconds()["stalled"])

    def seconds(self) -> dict[str, float]:
        """Until now: how long `save` has held training, and how long ago it was called."""
        saved = time.perf_counter() - self.began
        # A quick save is written before `Checkpointer.save` has returned.
        return {"stalled": self.stall_seconds or saved, "saved": saved}

    @property
    def live_pace(self) -> float | None:
        """Bytes a second, if rows beyond `snapshot_bytes` were encoded while training waited."""
        stats = self.stats
        return stats.live_bytes / stats.seconds_stalled if stats and stats.live_bytes else None

    def __repr__(self) -> str:
        return f"<PendingSave of step {self.step}: {self._state()}>"

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        stats = self.stats
        return html_facts(
            {"step": self.step, "save": self._state()} | ({} if stats is None else asdict(stats))
        )

    def _state(self) -> str:
        if self.skipped:
            return "skipped"
        if not self.done():
            return "writing"
        if self.error is not None:
            return "failed"
        return f"committed {self.future.result().id}"

    def done(self) -> bool:
        """Whether the save was committed, has failed or was skipped."""
        return self.settled.is_set()

    def result(self, timeout: float | None = None) -> VersionInfo:
        """Wait for the commit, at most `timeout` seconds, and return the version.

        Raises
        ------
        SaveError, SupersededError
            The save failed, and why. The next save has its rows.
        ClosedError
            This process is a fork of the process that writes the save, and never learns the outcome.
        TimeoutError
            The save is still being written.
        """
        self.exception(timeout)
        return VersionInfo.from_record(self.future.result())

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait at most `timeout` seconds, and return what `result` would raise, or None after a commit.

        Raises
        ------
        ClosedError
            This process is a fork of the process that writes the save, and never learns the outcome.
        TimeoutError
            The save is still being written.
        """
        if os.getpid() != self._process and not self.done():
            raise ClosedError(
                f"the save of step {self.step} is written by process {self._process}: ask for its result there"
            )
        # A timeout raises here: then nobody has the outcome, and the next save must still raise a failure.
        if not self.settled.wait(timeout):
            raise TimeoutError(f"the save of step {self.step} is still being written")
        self.result_taken = True
        return self.error


def run_on_done(
    pending: PendingSave, on_done: Callable[[PendingSave], object] | None, guard: ReentrantGuard
) -> None:
    """Call the caller's `on_done`, unless the save never began. What it raises is only logged.

    `guard`: refuses calls from within, because the thread that holds it may be waiting for `on_done`.
    """
    if on_done is None or not pending.done():
        return
    try:
        with guard.refuse_this_thread():
            on_done(pending)
    except BaseException:  # the pool would drop it unseen, and the save's outcome stays what it is
        log.exception("on_done of the save of step %d failed", pending.step)
