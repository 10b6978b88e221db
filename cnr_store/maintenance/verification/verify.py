"""Verifies a store: what is damaged, what is lost, and what can still be restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from cnr_backends import Backend, Transfer, open_backend
from cnr_store.catalog.catalog import Catalog, Url, Version
from cnr_store.chains.array_reader import chain
from cnr_store.errors import CorruptionError, EmptyStoreError, FormatError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.maintenance.objects import Progress, no_progress
from cnr_store.maintenance.verification.deep_checks import DeepCheck
from cnr_store.maintenance.verification.inspect_version import Soundness, VersionCheck
from cnr_store.maintenance.verification.listing import Listing, check_claims, check_root
from cnr_store.maintenance.verification.report import Finding, VerifyReport
from cnr_store.maintenance.verification.restorability import Home, Restorability, find_readable

_MAX_RUNS = 3


def verify(
    url: Url,
    version: Version | None = None,
    *,
    deep: bool = False,
    workers: int = 4,
    progress: Progress | None = None,
    **storage_options: object,
) -> VerifyReport:
    """Check a store, or one version with everything that it depends on. Nothing is changed.

    A quick check validates every record, manifest and state, and compares existence and size of every object. A deep
    check reads every byte: checksums, seals and payloads of every chunk, and every row's presence.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, or ``latest``; None for all versions and what lies beside them.
    deep
        Whether every byte is read.
    workers
        Threads that read. Memory is what they have in flight, plus the records and a few manifests.
    progress
        Called with (bytes done, bytes known so far), now and then, on the caller's thread.
    storage_options
        For the filesystem, as in fsspec.

    Returns
    -------
    VerifyReport
        Damage is reported, never raised.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
        There is nothing to check.
    FormatError
        The place holds something else than a store, or a store of another format.
    cnr_backends.BackendError
        The storage does not answer.
    """
    backend = open_backend(url, **storage_options)
    with Transfer(workers, 2 * workers) as transfer:
        # Versions that were deleted or folded during a run look damaged in it, so it is repeated.
        for _ in range(_MAX_RUNS - 1):
            run = _Run(backend, deep, transfer, progress)
            try:
                report = run.check(version)
            except VersionNotFoundError:
                if version is not None:
                    raise
                continue
            if not (run.outdated or run.found_deleted()):
                return report
        run = _Run(backend, deep, transfer, progress)
        report = run.check(version)
        # Retention may be faster than any run: what it deleted during this one is no damage either.
        deleted = run.found_deleted()
        problems = tuple(each for each in report.problems if _home(each) not in deleted)
        return replace(report, problems=problems)


def _home(finding: Finding) -> Home | None:
    if finding.version is None:
        return None
    in_fold = (finding.key or "").startswith(f"{layout.FOLDS}/")
    return layout.FOLDS if in_fold else layout.VERSIONS, finding.version


class _Run:
    """One check of a store.

    `outdated`: whether a chain led to a version or fold that was deleted or made during the run.
    """

    def __init__(self, backend: Backend, deep: bool, transfer: Transfer, progress: Progress | None) -> None:
        self._backend = backend
        self._catalog = Catalog(backend)
        self._deep = deep
        self._transfer = transfer
        self._progress = progress or no_progress
        self._done = self._known = 0
        self._listing = Listing(self._catalog, transfer)
        self._results: dict[Home, Soundness] = {}
        self._followed: set[tuple[Home, str]] = set()
        self._problems: dict[str, Finding] = {}
        self.outdated = False

    def check(self, version: Version | None) -> VerifyReport:
        opens, problems = check_root(self._catalog)
        self._report(problems)
        if version is None:
            self._list_store()
        else:
            self._list_version(version)
        listing = self._listing
        listing.check_attempts()
        self._report(listing.problems)
        self._check_objects(listing.folds)
        self._check_objects(listing.records)
        results = self._results.values()
        for result in results:
            self._problems |= {finding.what: finding for finding in result.findings}
        restorability = Restorability(self._catalog, self._results, self._problems)
        restorable = list(self._restorable(restorability, listing.records))
        return VerifyReport(
            deep=self._deep,
            versions=tuple(record.id for record in listing.records),
            restorable=tuple(restorable if opens else ()),
            problems=tuple(
                replace(finding, versions=restorability.fallen(finding))
                for finding in self._problems.values()
            ),
            suspicious=tuple(listing.suspicious),
            leftovers=(*listing.leftovers, *(result.leftovers for result in results if result.leftovers)),
            voids=tuple(attempt.id for attempt in listing.attempts if attempt.void),
            objects=sum(result.objects for result in results),
            nbytes=sum(result.nbytes for result in results),
        )

    def _restorable(self, restorability: Restorability, records: Iterable[Record]) -> Iterator[str]:
        for record in records:
            is_restorable, finding = restorability.check(record)
            if finding is not None:
                self._report([finding])
            if is_restorable:
                yield record.id
        self.outdated = restorability.outdated

    def found_deleted(self) -> set[Home]:
        """The versions and folds that were found damaged and are deleted by now."""
        damaged = {home for home, result in self._results.items() if result.findings}
        names = {prefix: set(self._backend.list_names(prefix)) for prefix, _ in damaged}
        return {
            (prefix, version)
            for prefix, version in damaged
            if version not in names[prefix] or (prefix == layout.VERSIONS and self._catalog.is_gone(version))
        }

    def _report(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._problems.setdefault(finding.what, finding)

    def _list_store(self) -> None:
        ids = self._catalog.ids()[::-1]
        if not ids:
            self._catalog.check_format()
            raise EmptyStoreError(f"{self._backend.url} holds no version at all: check the URL")
        self._report(check_claims(self._backend, ids[-1]))
        self._listing.read(ids)
        self._listing.read_folds()
        self._listing.check_kept()

    def _list_version(self, version: Version) -> None:
        """Read the record asked for, and report newer ones that may be lost."""
        listing = self._listing
        try:
            wanted = self._catalog.resolve(version)
        except CorruptionError:
            return  # a damaged tag: `Listing.check_attempts` reports it
        if isinstance(wanted, str) and layout.VersionId.parse(wanted):
            listing.read([wanted])
        elif (isinstance(wanted, str) and wanted != "latest") or not self._catalog.ids():
            self._catalog.find(wanted)  # raises, and says what is missing
        else:
            listing.read_newest(wanted)
        if not (listing.records or listing.problems or any(attempt.left for attempt in listing.attempts)):
            raise VersionNotFoundError(
                f"{self._backend.url} has no committed version {wanted}; `cnr_store.versions` and `cnr ls` list "
                "the versions"
            )

    def _check_objects(self, records: Iterable[Record]) -> None:
        """Check the objects of these, then of whatever their chains depend on."""
        todo = list(records)
        while todo:
            todo = [record for record in todo if (record.prefix, record.id) not in self._results]
            self._known += sum(record.nbytes for record in todo)
            for check in self._transfer.map(lambda record: VersionCheck(self._backend, record).run(), todo):
                self._finish(check)
            links = [link for record in todo for link in self._new_links(record)]
            todo = list({(link.prefix, link.id): link for link in links}.values())

    def _finish(self, check: VersionCheck) -> None:
        record, end = check.record, self._done + check.record.nbytes
        if self._deep:
            deep_check = DeepCheck(check, lambda path: self._base_rows(record, path))
            for nbytes in deep_check.run(self._transfer):
                if nbytes:
                    self._done = min(self._done + nbytes, end)
                    self._progress(self._done, self._known)
        self._done = end
        self._progress(self._done, self._known)
        self._results[record.prefix, record.id] = check.soundness

    def _base_rows(self, record: Record, path: str) -> int | None:
        base = record.arrays[path].base
        older = None if base is None else find_readable(self._catalog, base)
        return None if older is None or path not in older.arrays else older.arrays[path].shape[0]

    def _new_links(self, record: Record) -> Iterator[Record]:
        """Records that a version's chains lead to, as far as they are sound and were not followed before."""
        if record.prefix != layout.VERSIONS:
            return
        for path, entry in record.arrays.items():
            if entry.kind != "delta":
                continue
            try:
                for link in chain(self._catalog, record, path):
                    place = (link.prefix, link.id), path
                    if place in self._followed:
                        break
                    self._followed.add(place)
                    yield link
            except (CorruptionError, FormatError):
                continue  # `Restorability` reports it
