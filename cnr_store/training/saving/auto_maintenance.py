"""Retention and compaction of the store while a job trains."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from cnr_backends import Backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.version_info import find_figures
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.format.record import Record
from cnr_store.maintenance.collection.retention import Collector
from cnr_store.maintenance.folding.compact import CompactReport, fold
from cnr_store.training.process.process_exit import finish_before_exit
from cnr_store.training.process.threads import Latch
from cnr_store.training.saving.options import Options

log = logging.getLogger("cnr_store")


class BackgroundMaintenance:
    """Maintains the store after each commit, in a thread of its own: neither training nor the next save waits for it.

    It removes the versions that no retention rule keeps, and folds the new version if reading it touches more than
    `max_chain` versions. At most one run is under way and one is queued. A newer commit replaces the queued run,
    because each run covers the whole store.
    """

    def __init__(self, backend: Backend, options: Options) -> None:
        self._backend = backend
        self._options = options
        self._retention: tuple[ClaimId, Collector] | None = None
        self._folded: CompactReport | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="cnr-upkeep")
        self._latest: Future[None] | None = None
        self._latest_done = Latch()
        self._told_of_no_figure = False

    def schedule(self, record: Record, removable: str) -> None:
        """Queue a run after the commit of `record`. A failure is logged; no save fails because of it.

        `removable`: the greatest version of other writers that may be removed: see `Collector`.
        """
        if self._latest is not None:
            if self._latest.cancel():  # not a run that has begun
                self._latest_done.set()
            self._latest = None
        self._tell_of_no_figure(record)
        done = Latch()
        try:
            self._latest = self._executor.submit(self._run, record, removable, done)
        except RuntimeError as error:  # the interpreter is shutting down
            log.warning("no upkeep after version %s: %s", record.id, error)
        else:
            self._latest_done = done
            finish_before_exit(self._latest)

    def _tell_of_no_figure(self, record: Record) -> None:
        """Warn once that `keep_best` does not count a version, because its metadata lacks the figure."""
        best = self._options.rules.keep_best
        if best is None or self._told_of_no_figure or best[0] in find_figures(record.metadata):
            return
        self._told_of_no_figure = True
        log.warning(
            "step %d: its metadata has no finite number %r, so keep_best=%r does not keep this version: give "
            "save(metadata={%r: ...}) one number. This is told once",
            *(record.step, best[0], best, best[0]),
        )

    def _run(self, record: Record, removable: str, done: Latch) -> None:
        try:
            if not self._options.rules.remove_nothing:
                self._remove(record, removable)
            # Not while the last fold waits to be popped: this version was planned without it, and the next one will
            # be shorter.
            max_chain = self._options.retention.max_chain
            if max_chain is not None and 1 + len(record.needs) > max_chain and self._folded is None:
                self._folded = fold(Catalog(self._backend), record, self._options.limits.workers)
        except Exception as error:  # noqa: BLE001 - the version is committed, and a later run tries again
            log.warning("upkeep after version %s failed: %s", record.id, error)
        finally:
            done.set()

    def _remove(self, record: Record, removable: str) -> None:
        """Remove the versions that no rule keeps, if the claim of this commit is still the newest."""
        attempt = VersionId.parse(record.id)
        assert attempt is not None  # the id of a committed record is valid
        if self._retention is None or self._retention[0] != attempt.claim:
            self._retention = (
                attempt.claim,
                Collector(self._backend, self._options.rules, own=attempt.claim, removable=removable),
            )
        report = self._retention[1].run()
        if report.stopped is not None:
            log.warning("nothing was removed from %s: %s", self._backend.url, report.stopped)

    def pop_folded(self) -> CompactReport | None:
        """What was folded since the last call, or None."""
        folded, self._folded = self._folded, None
        return folded

    def wait(self) -> None:
        """Wait for the run under way and the one that is queued."""
        if self._latest is not None:
            self._latest_done.wait()

    def close(self) -> None:
        """Wait, and accept no more runs."""
        self._executor.shutdown()
