"""Upkeep of the store behind a training job's saves."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait

from cnr_backends import Backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.format.record import Record
from cnr_store.maintenance.collection.retention import Retention, Rules
from cnr_store.maintenance.folding.compact import fold
from cnr_store.training.saving.pending_save import finish_before_exit

log = logging.getLogger("cnr_store")


class BackgroundMaintenance:
    """Looks after the store behind each commit, in a thread of its own: neither training nor the next save waits.

    At most one run is under way and one waits: a newer commit's takes the place of one that has not begun, since
    each looks at all that there is.

    Parameters
    ----------
    rules
        Which versions are kept.
    max_chain
        Fold a version when reading it touches more than so many; None folds nothing.
    workers
        Threads that fold.
    """

    def __init__(self, backend: Backend, rules: Rules, max_chain: int | None, workers: int) -> None:
        self._kept = RetentionJob(backend, rules)
        self._chains = CompactionJob(backend, max_chain, workers)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="cnr-upkeep")
        self._latest: Future[None] | None = None

    def after(self, record: Record) -> None:
        """Look after the store that has got this version. A failure is logged: no save fails because of it."""
        if self._latest is not None:
            self._latest.cancel()
            self._latest = None
        try:
            self._latest = self._executor.submit(self._attempt, record)
        except RuntimeError as error:  # the pool's word for a process that ends
            log.warning("no upkeep after version %s: %s", record.id, error)
        else:
            finish_before_exit(self._latest)

    def _attempt(self, record: Record) -> None:
        try:
            self._kept.apply(record)
            self._chains.apply(record)
        except Exception as error:  # noqa: BLE001 - the version is committed, and a later run tries again
            log.warning("upkeep after version %s failed: %s", record.id, error)

    def take_folded(self) -> str | None:
        """The version that was folded since the last call, if any."""
        return self._chains.take()

    def wait(self) -> None:
        """Wait for what is under way or waits."""
        if self._latest is not None:
            wait([self._latest])

    def close(self) -> None:
        """Wait, and take no more."""
        self._executor.shutdown()


class RetentionJob:
    """Applies a job's rules of retention under the claim that it writes with."""

    def __init__(self, backend: Backend, rules: Rules) -> None:
        self._backend = backend
        self._rules = rules
        self._own: ClaimId | None = None
        self._retention: Retention | None = None

    def apply(self, record: Record) -> None:
        """Remove what the rules don't ask for, if the claim of this commit is still the newest."""
        if self._rules.remove_nothing:
            return
        attempt = VersionId.parse(record.id)
        assert attempt is not None  # a committed record's id is proven
        if self._retention is None or attempt.claim != self._own:
            self._own = attempt.claim
            self._retention = Retention(self._backend, self._rules, own=self._own)
        report = self._retention.run()
        if report.stopped is not None:
            log.warning("nothing was removed from %s: %s", self._backend.url, report.stopped)


class CompactionJob:
    """Folds a version of a job when reading it touches more than `max_chain` versions; None folds nothing."""

    def __init__(self, backend: Backend, max_chain: int | None, workers: int) -> None:
        self._backend = backend
        self._max_chain = max_chain
        self._workers = workers
        self._folded: str | None = None

    def apply(self, record: Record) -> None:
        """Fold the version that was just committed, if it leans on too many.

        Not while a fold waits to be taken up: this version was planned without it, and the next one is shorter.
        """
        if self._max_chain is None or 1 + len(record.needs) <= self._max_chain or self._folded is not None:
            return
        fold(Catalog(self._backend), record, self._workers)
        self._folded = record.id

    def take(self) -> str | None:
        """The version that was folded since the last call, if any."""
        folded, self._folded = self._folded, None
        return folded
