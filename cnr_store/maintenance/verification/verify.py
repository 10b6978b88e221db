"""Verifies a store: what is damaged, what is lost, and what can still be restored."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from cnr_backends import Backend, Transfer, open_backend
from cnr_store.catalog.catalog import Catalog, Url, Version
from cnr_store.chains.array_reader import ArrayReader, chain, find_readable, own_chain, region_rows
from cnr_store.errors import CorruptionError, EmptyStoreError, FormatError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.maintenance.objects import Progress, no_progress
from cnr_store.maintenance.verification.deep_checks import DeepCheck
from cnr_store.maintenance.verification.inspect_version import STATES, RowSpan, Soundness, VersionCheck
from cnr_store.maintenance.verification.listing import Listing, check_claims, check_root
from cnr_store.maintenance.verification.report import Finding, VerifyReport

_MAX_RUNS = 3

Home = tuple[str, str]
"""Prefix and id of a version or a fold."""

Place = tuple[Home, str]
"""An array, by its path, under a home."""

_REPORTED = ""
"""In place of a message: another finding says it."""


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
        # Of a whole store, chains lead to what is listed, or the run is outdated.
        followed = () if version is None else listing.records
        links = (link for record in followed for link in self._links(record))
        self._check_objects([*listing.folds, *listing.records, *links])
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
        """Check the objects of these, each once."""
        homes = {(record.prefix, record.id): record for record in records}
        self._known = sum(record.nbytes for record in homes.values())
        for check in self._transfer.map(lambda each: VersionCheck(self._backend, each).run(), homes.values()):
            self._finish(check)

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

    def _links(self, record: Record) -> Iterator[Record]:
        """What a version's chains lead to, as far as they are sound: `Restorability` reports it where they are not."""
        for path, entry in record.arrays.items():
            if entry.kind == "delta":
                with suppress(CorruptionError, FormatError):
                    yield from chain(self._catalog, record, path)


@dataclass(frozen=True)
class _Chain:
    """An array's chain from one link on."""

    reason: str | None  # why it can't be read: a message, or `_REPORTED`. None if it can.
    max_rows: int  # how many rows its objects have room for
    top: Record | None  # its first link; None where that is not known
    broken: frozenset[Place] = frozenset()  # where it can't be read


class Restorability:
    """Follows every array's chain as readers do: newest first, up to a whole link or a fold.

    The result for each link is kept, since following every chain to its end would take time with the square of the
    number of versions.

    `results`: the result of the check of every home that the chains lead to.
    `reported`: messages of all findings so far, which are not given again.

    `outdated`: whether a chain led to a home that was not checked, because it was deleted or made meanwhile.
    """

    def __init__(self, catalog: Catalog, results: Mapping[Home, Soundness], reported: Container[str]) -> None:
        self._catalog = catalog
        self._results = results
        self._reported = reported
        self._chains: dict[Place, _Chain] = {}
        self._failed: set[str] = set()
        self._fallen: dict[Place, set[str]] = {}
        self.outdated = False

    def check(self, record: Record) -> tuple[bool, Finding | None]:
        """Whether a version can be restored whole, and what no object's finding says of its chains."""
        own = self._results[record.prefix, record.id]
        reasons = {
            path: reason for path in record.arrays if (reason := self._why_broken(record, path)) is not None
        }
        documents_sound = own.manifest and own.state
        finding = None
        unreported = [(path, reason) for path, reason in reasons.items() if reason != _REPORTED]
        if unreported:
            (path, what), *others = unreported
            more = f" (and {len(others)} more of its arrays)" if others else ""
            finding = Finding(what + more, record.id, path=path)
        elif reasons and documents_sound and all(self._is_sound(record, path) for path in record.arrays):
            key = layout.record_key(record.id, layout.FOLDS)
            what = (
                f"version {record.id}: only its fold is damaged, the versions that it was made of are sound: with no "
                f"job's retention running, remove {key}, and the version can be restored"
            )
            finding = Finding(what, record.id, key)
        is_restorable = documents_sound and not reasons
        if not is_restorable:
            self._failed.add(record.id)
        return is_restorable, finding

    def fallen(self, finding: Finding) -> tuple[str, ...]:
        """Ids of the versions checked so far that can't be restored because of a finding, oldest first."""
        home, key, path = _home(finding), finding.key, finding.path
        if home is None:
            return ()
        prefix, version = home
        is_record = key == layout.record_key(version, prefix)
        needed = path is not None or is_record or (key or "").endswith("/manifest")
        places = [place for place in self._fallen if needed and place[0] == home and path in (place[1], None)]
        ids = {each for place in places for each in self._fallen[place]}
        # Of its own version, an object's loss is told where no array is concerned, or none in particular.
        is_state = (key or "").startswith(layout.version_key(version, STATES))
        if key is None or is_record or is_state or key == layout.version_key(version, "manifest"):
            ids |= {version} & self._failed
        return tuple(sorted(ids))

    def _why_broken(self, record: Record, path: str) -> str | None:
        """Why an array can't be read: a message, or `_REPORTED`. None if it can."""
        entry = record.arrays[path]
        if entry.kind == "dense":
            home = record.prefix, record.id
            if path not in self._results[home].unreadable:
                return None
            self._fallen.setdefault((home, path), set()).add(record.id)
            return _REPORTED
        links = self._chain(record, path)
        if links.reason == _REPORTED and self._hides_damage(record, path, links.broken):
            # Neither do versions on top of this one read what is damaged.
            links = replace(links, reason=None, broken=frozenset())
            self._chains[(record.prefix, record.id), path] = links
        for place in links.broken:
            self._fallen.setdefault(place, set()).add(record.id)
        if links.reason is None and links.max_rows < entry.shape[0]:
            return (
                f"version {record.id}, {path}: {entry.shape[0]} rows are recorded, more than the objects of its chain "
                "have room for"
            )
        return links.reason

    def _hides_damage(self, record: Record, path: str, broken: Iterable[Place]) -> bool:
        """Whether newer links hold all rows of the damaged chunks, so that no reader asks for these."""
        newer_rows, damaged = 0, list[RowSpan]()
        try:
            for link in chain(self._catalog, record, path):
                home, entry = (link.prefix, link.id), link.arrays[path]
                if (home, path) in broken:
                    result = self._results[home]
                    findings = [finding for finding in result.findings if finding.path == path]
                    for finding in findings:
                        # One damaged chunk at least lies within these rows, and all its rows must be newer.
                        if finding.rows is None or newer_rows < _least_rows(
                            finding.rows, result.chunk_rows[path], entry.shape[0]
                        ):
                            return False
                        damaged.append(finding.rows)
                    if not findings:  # its manifest is damaged
                        return False
                newer_rows += entry.rows
            reader = ArrayReader(Catalog(self._catalog.backend), record, path)
            step = region_rows(reader.links, reader.columns * reader.dtype.itemsize)
            for first, last in damaged:
                end = min(last + 1, reader.shape[0])
                for begin in range(first, end, step):
                    reader.read(begin, reader.new_rows(min(step, end - begin)))
        except (CorruptionError, FormatError, VersionNotFoundError):
            return False
        return bool(damaged)

    def _chain(self, record: Record, path: str) -> _Chain:
        """A version's chain, followed as far as the first link that is known."""
        new, beneath = [], _Chain(None, 0, None)
        try:
            for link in chain(self._catalog, record, path):
                known = self._chains.get(((link.prefix, link.id), path))
                if known is not None:
                    beneath = known
                    break
                new.append(link)
        except (CorruptionError, FormatError) as error:
            reason = _REPORTED if str(error) in self._reported else str(error)
            beneath = _Chain(reason, 0, None, self._lost_beneath(new[-1] if new else record, path))
        for link in reversed(new):
            result = self._results.get((link.prefix, link.id))
            rows = 0 if result is None else result.max_rows.get(path, 0) + beneath.max_rows
            place, broken = ((link.prefix, link.id), path), beneath.broken
            if result is not None and not result.can_read(path):
                broken |= {place}
            beneath = _Chain(self._why_link_broken(link, path, result, beneath), rows, link, broken)
            self._chains[place] = beneath
        return beneath

    def _lost_beneath(self, link: Record, path: str) -> frozenset[Place]:
        """Where a chain may end beneath a link, since a record can't be read."""
        # The base of a link is looked up before the link is yielded.
        ids = [version for version, _ in islice(own_chain(self._catalog, link.id, path), 3)]
        homes = [(prefix, each) for each in ids for prefix in (layout.VERSIONS, layout.FOLDS)]
        return frozenset((home, path) for home in homes if home not in self._results)

    def _why_link_broken(
        self, link: Record, path: str, result: Soundness | None, beneath: _Chain
    ) -> str | None:
        if result is None:
            self.outdated = True
            return f"{link.home}, {path}: versions were deleted or folded during the check; run verify again"
        if beneath.reason is not None:
            return beneath.reason
        if not result.can_read(path):
            return _REPORTED
        if beneath.top is not None:
            entry, base = link.arrays[path], beneath.top.arrays[path]
            if (base.shape[1:], base.element) != (entry.shape[1:], entry.element):
                return (
                    f"{link.home}, {path}: {entry.shape} {entry.element} depends on {beneath.top.home}, which has "
                    f"{base.shape} {base.element}"
                )
        return None

    def _is_sound(self, record: Record, path: str) -> bool:
        """Whether an array could be read if nothing were folded."""
        last = None
        for version, last in own_chain(self._catalog, record.id, path):
            result = self._results.get((layout.VERSIONS, version))
            if last is None or result is None or not result.can_read(path):
                return False
        return last is not None and last.arrays[path].base is None


def _least_rows(rows: RowSpan, chunk_rows: int, array_rows: int) -> int:
    """How many rows a chunk has at least that lies within the first and last row of these."""
    end = min(rows[1] + 1, array_rows)
    return min(end - rows[0], chunk_rows if end < array_rows else (end - 1) % chunk_rows + 1)
