"""Proves a store: what is damaged, what is lost, and what can still be restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cnr_backends import Backend, Transfer, open_backend
from cnr_store.catalog.catalog import Catalog, Url, Version, VersionInfo
from cnr_store.chains.array_reader import chain
from cnr_store.errors import CorruptionError, EmptyStoreError, FormatError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.maintenance.verification.deep_checks import DeepCheck
from cnr_store.maintenance.verification.inspect_version import Soundness, VersionCheck
from cnr_store.maintenance.verification.listing import Listing
from cnr_store.maintenance.verification.report import Finding, Leftovers, VerifyReport
from cnr_store.maintenance.verification.restorability import Home, Restorability
from cnr_store.maintenance.verification.strays import check_claims, check_root

Progress = Callable[[int, int], None]
_RUNS = 3


def verify(
    url: Url,
    version: Version | None = None,
    *,
    deep: bool = False,
    workers: int = 4,
    progress: Progress | None = None,
    **storage_options: object,
) -> VerifyReport:
    """Check a store, or one version with everything that it leans on. Nothing is changed.

    A quick check proves every record, manifest and state, and compares existence and size of every object. A deep
    one reads every byte: checksums, seals and payloads of every chunk, and every row's presence.

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
        Damage is in the report, never raised.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
        There is nothing to check.
    FormatError
        The place holds something else than a store.
    cnr_backends.BackendError
        The storage does not answer.
    """
    backend = open_backend(url, **storage_options)
    with Transfer(workers, 2 * workers) as transfer:
        # Versions that were removed or folded in the middle look damaged: look again, at what there is now.
        for _ in range(_RUNS - 1):
            verification = _Verification(backend, deep, transfer, progress)
            try:
                report = verification.run(version)
            except VersionNotFoundError:
                if version is not None:
                    raise
                continue
            if not (verification.overtaken or verification.removed_meanwhile()):
                return report
        return _Verification(backend, deep, transfer, progress).run(version)


class _Verification:
    """One look at a store.

    Attributes
    ----------
    overtaken
        Whether it met what had been folded or removed since it began.
    """

    def __init__(self, backend: Backend, deep: bool, transfer: Transfer, progress: Progress | None) -> None:
        self._backend = backend
        self._catalog = Catalog(backend)
        self._deep = deep
        self._opens = True
        self._transfer = transfer
        self._progress = progress or (lambda done, known: None)
        self._done = self._known = 0
        self._sound: dict[Home, Soundness] = {}
        self._followed: set[tuple[Home, str]] = set()
        self.overtaken = False
        self._problems: dict[str, Finding] = {}
        self._suspicious: list[Finding] = []
        self._leftovers: list[Leftovers] = []
        self._voids: list[str] = []

    def run(self, version: Version | None) -> VerifyReport:
        records = self._whole_store() if version is None else self._one(version)
        self._inspect(records)
        for sound in self._sound.values():
            self._problems |= {finding.what: finding for finding in sound.findings}
            if sound.leftovers is not None:
                self._leftovers.append(sound.leftovers)
        restorable = tuple(self._restorable(records))
        return VerifyReport(
            self._deep,
            tuple(record.id for record in records),
            restorable,
            tuple(self._problems.values()),
            tuple(self._suspicious),
            tuple(self._leftovers),
            tuple(self._voids),
            sum(sound.objects for sound in self._sound.values()),
            sum(sound.nbytes for sound in self._sound.values()),
        )

    def _restorable(self, records: Iterable[Record]) -> Iterator[str]:
        restorability = Restorability(self._catalog, self._sound, self._problems)
        for record in records:
            sound, finding = restorability.judge(record)
            if finding is not None:
                self._problem(finding)
            if sound and self._opens:
                yield record.id
        self.overtaken = restorability.overtaken

    def removed_meanwhile(self) -> bool:
        """Whether a version that was found damaged is not there any more."""
        damaged = {room_id for room_id, sound in self._sound.items() if sound.findings}
        names = {prefix: set(self._backend.list_names(prefix)) for prefix, _ in damaged}
        again = Catalog(self._backend)
        return any(
            version not in names[prefix] or (prefix == layout.VERSIONS and _is_gone(again, version))
            for prefix, version in damaged
        )

    def _check_root(self) -> None:
        self._opens, findings = check_root(self._catalog)
        for finding in findings:
            self._problem(finding)

    def _problem(self, finding: Finding) -> None:
        self._problems.setdefault(finding.what, finding)

    def _whole_store(self) -> list[Record]:
        ids = self._catalog.ids()[::-1]
        if not ids:
            self._catalog.check_format()
            raise EmptyStoreError(f"{self._backend.url} holds no version at all: check the URL")
        self._check_root()
        for finding in check_claims(self._backend, ids[-1]):
            self._problem(finding)
        discovery = Listing(self._catalog, self._transfer)
        discovery.read(ids)
        discovery.read_folds()
        self._take(discovery)
        self._inspect(discovery.found.folds)
        return discovery.found.records

    def _one(self, version: Version) -> list[Record]:
        """The record asked for, if it can be read; what seems to be lost after it is said, too."""
        self._check_root()
        discovery = Listing(self._catalog, self._transfer)
        wanted = version.id if isinstance(version, VersionInfo) else version
        if isinstance(wanted, str) and layout.VersionId.parse(wanted):
            discovery.read([wanted])
        elif (isinstance(wanted, str) and wanted != "latest") or not self._catalog.ids():
            self._catalog.find(wanted)  # says what is missing
        else:
            discovery.read_newest(wanted)
        found = discovery.found
        if not found.records and not found.problems and not any(each.left for each in found.attempts):
            raise VersionNotFoundError(
                f"{self._backend.url} has no committed version {wanted}; `versions` lists those there are"
            )
        self._take(discovery)
        return found.records

    def _take(self, discovery: Listing) -> None:
        discovery.judge()
        found = discovery.found
        for finding in found.problems:
            self._problem(finding)
        self._suspicious += found.suspicious
        self._leftovers += found.leftovers
        self._voids += [attempt.id for attempt in found.attempts if attempt.void]

    def _inspect(self, records: Iterable[Record]) -> None:
        """Check these, then whatever their chains lean on."""
        todo = list(records)
        while todo:
            todo = [each for each in todo if (each.prefix, each.id) not in self._sound]
            self._known += sum(each.nbytes for each in todo)
            for inspection in self._transfer.map(self._look, todo):
                self._read(inspection)
            todo = list(
                {(link.prefix, link.id): link for each in todo for link in self._links(each)}.values()
            )

    def _look(self, record: Record) -> VersionCheck:
        inspection = VersionCheck(self._backend, record)
        inspection.look()
        return inspection

    def _read(self, inspection: VersionCheck) -> None:
        record, end = inspection.record, self._done + inspection.record.nbytes
        if self._deep:
            proving = DeepCheck(inspection, lambda path: self._base_rows(record, path))
            for proof in self._transfer.map(lambda task: task(), proving.tasks()):
                proving.settle(proof)
                if proof.nbytes:
                    self._done = min(self._done + proof.nbytes, end)
                    self._progress(self._done, self._known)
            proving.conclude()
        self._done = end
        self._progress(self._done, self._known)
        self._sound[record.prefix, record.id] = inspection.soundness

    def _base_rows(self, record: Record, path: str) -> int | None:
        base = record.arrays[path].base
        try:
            found = None if base is None else self._catalog.find_record(base)
        except (CorruptionError, FormatError):
            return None
        entry = None if found is None else found.arrays.get(path)
        return None if entry is None else entry.shape[0]

    def _links(self, record: Record) -> Iterator[Record]:
        """What the arrays of a version lean on, as far as their chains hold and were not followed before."""
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
                continue  # said when it is asked what can be restored


def _is_gone(catalog: Catalog, version: str) -> bool:
    try:
        return catalog.find_record(version) is None
    except (CorruptionError, FormatError):
        return False
