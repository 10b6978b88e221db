"""Which versions, folds and attempts a store lists, and what the mere lists say of losses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cnr_backends import Transfer
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.maintenance.objects import list_ids
from cnr_store.maintenance.verification.inspect_version import leftovers
from cnr_store.maintenance.verification.report import Finding, Leftovers
from cnr_store.maintenance.verification.strays import Attempt


@dataclass
class Listed:
    """What was listed.

    Attributes
    ----------
    records, folds
        Those that are sound.
    attempts
        Ids of versions without a record.
    problems, suspicious
        Records that are damaged or surely lost; those that may be.
    leftovers
        What attempts left behind.
    """

    records: list[Record] = field(default_factory=list)
    folds: list[Record] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    suspicious: list[Finding] = field(default_factory=list)
    leftovers: list[Leftovers] = field(default_factory=list)


class Listing:
    """Reads the records of a store and judges what has none."""

    def __init__(self, catalog: Catalog, transfer: Transfer) -> None:
        self._catalog = catalog
        self._backend = catalog.backend
        self._transfer = transfer
        self.found = Listed()

    def read(self, versions: Iterable[str]) -> None:
        """Read the records of these versions."""
        for each in self._transfer.map(self._record, versions):
            if isinstance(each, Finding):
                self.found.problems.append(each)
            elif isinstance(each, Attempt):
                self.found.attempts.append(each)
            else:
                self.found.records.append(each)

    def read_newest(self, wanted: str | int) -> None:
        """Read records newest first, up to that of the latest version or the newest of a step.

        Where the latest one is damaged it is not another one.
        """
        for version in self._catalog.ids():
            self.read([version])
            if self.found.records and wanted in ("latest", self.found.records[-1].step):
                del self.found.records[:-1]
                return
            if wanted == "latest" and self.found.problems:
                return
        self.found.records.clear()

    def _record(self, version: str) -> Record | Attempt | Finding:
        try:
            record = self._catalog.find_record(version)
        except (CorruptionError, FormatError) as error:
            return Finding(str(error), version, layout.record_key(version))
        return Attempt.of(self._backend, version) if record is None else record

    def read_folds(self) -> None:
        """Read the records of all folds."""
        for version in sorted(list_ids(self._backend, layout.FOLDS)):
            try:
                fold = self._catalog.find_fold(version)
            except (CorruptionError, FormatError) as error:
                key = layout.record_key(version, layout.FOLDS)
                self.found.problems.append(Finding(str(error), version, key))
                continue
            if fold is None:
                self._judge_fold(version)
            else:
                self.found.folds.append(fold)

    def _judge_fold(self, version: str) -> None:
        place = layout.version_key(version, prefix=layout.FOLDS)
        listed = dict(self._backend.list_keys(place))
        if (left := leftovers(place, listed)) is not None:
            self.found.leftovers.append(left)
        if any(key.endswith("/manifest") for key in listed):
            key = layout.record_key(version, layout.FOLDS)
            what = (
                f"fold of version {version}: {key} is missing while all else seems to be there: it is lost, or folding "
                "ended just before. Without it the version is read along its own chain"
            )
            self.found.suspicious.append(Finding(what, version, key))

    def judge(self) -> None:
        """Say what attempts without a record and tombstones mean, once all is read."""
        found, url = self.found, self._backend.url
        doomed, named = list_ids(self._backend, layout.TOMBSTONES), self._named()
        for attempt in found.attempts:
            if attempt.left is None:
                continue
            found.leftovers.append(attempt.left)
            if not attempt.void and attempt.id not in doomed:
                by = named.get(attempt.id)
                if by is not None:
                    found.problems.append(attempt.finding(url, by))
                elif attempt.staged:  # any other is what each crash in a save leaves
                    found.suspicious.append(attempt.finding(url, by))
        for version in sorted({record.id for record in found.records} & doomed):
            key = layout.version_key(version, prefix=layout.TOMBSTONES)
            what = f"version {version} of {url} is marked for removal; nothing may lean on it any more"
            found.suspicious.append(Finding(what, version, key))

    def _named(self) -> dict[str, str]:
        """Ids that prove by being named that they were committed, and what names them."""
        named = dict.fromkeys(list_ids(self._backend, layout.PINS), "a pin")
        named |= {fold.id: fold.home for fold in self.found.folds}
        for record in self.found.records:
            named |= {need: record.home for need in (*record.needs, record.previous) if need is not None}
        return named
