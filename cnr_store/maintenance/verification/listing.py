"""Lists the versions, folds and attempts of a store, reports losses that lists show, and checks root and claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cnr_backends import Backend, ObjectNotFoundError, Transfer
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.claims import ClaimRecord, decode_claim, list_claims, store_id
from cnr_store.catalog.objects import list_ids, list_marked, list_tags, read_tag
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout, validate
from cnr_store.format.arrays import Doc, group_document
from cnr_store.format.record import Record
from cnr_store.format.state import loads
from cnr_store.maintenance.verification.glance import read_each
from cnr_store.maintenance.verification.inspect_version import STATE
from cnr_store.maintenance.verification.report import Finding, Leftovers, find_leftovers


def check_root(catalog: Catalog) -> tuple[bool, list[Finding]]:
    """Whether readers recognize the store, and what is wrong with the groups above its versions.

    `FormatError` if it is a store of another format.
    """
    store = store_id(catalog.backend)
    root = group_document({"cnr": {"format": layout.FORMAT, "store": store}})
    expected = {
        f"{layout.VERSIONS}/{layout.NODE}": group_document(),
        layout.ROOT_KEY: {} if store == "-" else root,
    }
    opens, findings = True, []
    try:
        catalog.find_format()
    except FormatError as error:
        opens = False
        what = f"{error}. Until {layout.ROOT_KEY} is restored, or removed, no version can be opened"
        findings.append(Finding(what, key=layout.ROOT_KEY))
        del expected[layout.ROOT_KEY]
    else:
        catalog.check_format()  # nothing is wrong with a store of another format, so this is no finding
    for key, doc in expected.items():
        findings += _check_group(catalog.backend, key, doc)
    return opens, findings


def _check_group(backend: Backend, key: str, doc: Doc) -> Iterator[Finding]:
    try:
        sound = loads(backend.get(key), key) == doc
    except (ObjectNotFoundError, FormatError):
        sound = False
    if not sound:
        yield Finding(
            f"{backend.url}: {key} is lost or altered; plain Zarr readers need it, this library does not",
            key=key,
        )


def check_claims(backend: Backend, newest: str) -> Iterator[Finding]:
    """Whether claims can be read: they say what their writers depend on, and retention must know that.

    The claim of the `newest` version, or a newer one, must be there. Older ones may have been deleted by retention.
    """
    names = list_claims(backend)
    attempt = layout.VersionId.parse(newest)
    if attempt is not None and max(names, default="") < layout.claim_name(attempt.claim.generation):
        key = layout.writer_key(layout.claim_name(attempt.claim.generation))
        what = f"{backend.url}: {key} is lost; if the writer of {newest} still runs, its next save will fail once"
        yield Finding(what, key=key)
    for name in names:
        key, claim = layout.writer_key(name), None
        try:
            claim = decode_claim(backend.get(key), name)
        except ObjectNotFoundError:  # deleted meanwhile
            continue
        except ValueError as error:  # FormatError is one
            yield Finding(f"{backend.url}: the claim {key} is damaged: {error}", key=key)
        yield from _check_mark(backend, claim, layout.writer_key(name, layout.CLOSED))


def _check_mark(backend: Backend, claim: ClaimRecord | None, key: str) -> Iterator[Finding]:
    try:
        mark = validate.proven(loads(backend.get(key), key), dict, "it")
        if mark.keys() != {"token", "time"} or (claim is not None and mark["token"] != claim.id.token):
            raise ValueError("it is another claim's")
        validate.proven(mark["time"], validate.Time, "time")
    except ObjectNotFoundError:  # its run is open
        return
    except ValueError as error:  # FormatError is one
        yield Finding(
            f"{backend.url}: {key}, which says that a run is over, is damaged ({error}), so the run may count as open",
            key=key,
        )


@dataclass(frozen=True)
class Attempt:
    """An id without a commit record: its save was aborted, did not end, or its record is missing."""

    id: str
    void: bool  # whether a void record says that it was aborted
    staged: bool  # whether its manifest or its state is there, which a save writes after all data
    left: Leftovers | None  # its objects; None if it has none

    @classmethod
    def from_listing(cls, version: str, listed: dict[str, int]) -> Attempt:
        """The attempt whose folder holds these objects, sizes by key. The record's is removed from them."""
        void = listed.pop(layout.record_key(version), None) is not None
        staged = any(layout.version_key(version, name) in listed for name in ("manifest", STATE))
        return cls(version, void, staged, find_leftovers(layout.version_key(version), listed))

    def finding(self, url: str, named_by: str | None) -> Finding:
        """The loss, sure or possible, of an attempt's record. For attempts that neither void nor tombstone explains."""
        key, home = layout.record_key(self.id), f"version {self.id} of {url}"
        if named_by is not None:
            what = f"{home}: {key} is lost; it was committed, for {named_by} refers to it"
        else:
            what = (
                f"{home}: {key} is missing while what a save writes after all its data is there: it is lost, or its "
                "writer is about to commit, or died then. Without it the version before is the latest"
            )
        return Finding(what, self.id, key)


class Listing:
    """Reads the records of a store: call `read` or `read_newest`, `read_folds`, then `check_attempts`.

    `records`, `folds`: sound records, of versions and of folds.
    `attempts`: versions without a record.
    `problems`, `suspicious`: records that are damaged or surely lost; records that may be lost.
    `leftovers`: objects that attempts left.
    """

    def __init__(self, catalog: Catalog, transfer: Transfer) -> None:
        self._catalog, self._backend, self._transfer = catalog, catalog.backend, transfer
        self.records: list[Record] = []
        self.folds: list[Record] = []
        self.attempts: list[Attempt] = []
        self.problems: list[Finding] = []
        self.suspicious: list[Finding] = []
        self.leftovers: list[Leftovers] = []

    def read(self, versions: Sequence[str]) -> None:
        """Read the records of these versions."""
        missing = self._read(self._catalog.find_record, versions, layout.VERSIONS, self.records)
        self.attempts += self._transfer.map(
            lambda version: Attempt.from_listing(version, self._list(version, layout.VERSIONS)), missing
        )

    def _read(
        self,
        find: Callable[[str], Record | None],
        versions: Sequence[str],
        prefix: str,
        records: list[Record],
    ) -> list[str]:
        """Add the records that are sound, and findings of those that are not. Returns the ids that have none."""
        found, damaged = read_each(self._transfer, find, versions)
        records += found.values()
        for version, error in damaged.items():
            self.problems.append(Finding(str(error), version, layout.record_key(version, prefix)))
        return [version for version in versions if version not in found and version not in damaged]

    def read_newest(self, wanted: str | int) -> None:
        """Read records newest first, up to that of the latest version or the newest of a step.

        If the latest one is damaged, an older one is not taken for it.
        """
        for version in self._catalog.ids():
            self.read([version])
            if self.records and wanted in ("latest", self.records[-1].step):
                del self.records[:-1]
                return
            if wanted == "latest" and self.problems:
                return
        self.records.clear()

    def read_folds(self) -> None:
        """Read the records of all folds."""
        folded = sorted(list_ids(self._backend, layout.FOLDS))
        for version in self._read(self._catalog.find_fold, folded, layout.FOLDS, self.folds):
            self._check_fold_attempt(version)

    def _check_fold_attempt(self, version: str) -> None:
        listed = self._list(version, layout.FOLDS)
        left = find_leftovers(layout.version_key(version, prefix=layout.FOLDS), listed)
        if left is not None:
            self.leftovers.append(left)
        if any(key.endswith("/manifest") for key in listed):
            key = layout.record_key(version, layout.FOLDS)
            what = (
                f"fold of version {version}: {key} is missing, although the objects that are written before it are "
                "there: it is lost, or folding ended just before. Without it the version is read along its own chain"
            )
            self.suspicious.append(Finding(what, version, key))

    def _list(self, version: str, prefix: str) -> dict[str, int]:
        """Sizes of the objects of a version, or of its fold, by key."""
        return dict(self._backend.list_keys(layout.version_key(version, prefix=prefix)))

    def check_attempts(self) -> None:
        """Report what attempts without a record, and tombstones, mean. Call it when all records are read."""
        url, named = self._backend.url, self._named_ids()
        tombstoned = list_marked(self._backend, layout.TOMBSTONES)
        for attempt in self.attempts:
            if attempt.left is None:
                continue
            self.leftovers.append(attempt.left)
            if attempt.void or attempt.id in tombstoned:
                continue
            if attempt.id in named:
                self.problems.append(attempt.finding(url, named[attempt.id]))
            elif attempt.staged:  # any other attempt is what every crash in a save leaves
                self.suspicious.append(attempt.finding(url, None))
        for version in sorted(tombstoned.intersection(record.id for record in self.records)):
            key = layout.version_key(version, prefix=layout.TOMBSTONES)
            what = f"version {version} of {url} is marked for removal; no new version or pin may depend on it"
            self.suspicious.append(Finding(what, version, key))

    def _named_ids(self) -> dict[str, str]:
        """Ids that were committed, since something else names them, and what that is."""
        named = dict.fromkeys(list_marked(self._backend, layout.PINS), "a pin")
        named |= self._tagged_ids
        named |= {fold.id: fold.home for fold in self.folds}
        for record in self.records:
            named |= {need: record.home for need in (*record.needs, record.previous) if need is not None}
        return named

    @cached_property
    def _tagged_ids(self) -> dict[str, str]:
        tagged: dict[str, str] = {}
        for name in list_tags(self._backend):
            try:
                version = read_tag(self._backend, name)
            except CorruptionError as error:
                self.problems.append(Finding(str(error), key=layout.tag_key(name)))
                continue
            if version is not None:
                tagged[version] = f"the tag {name}"
        return tagged

    def check_kept(self) -> None:
        """Report versions of which nothing is left, although a tag or a pin keeps them."""
        tagged = self._tagged_ids
        kept = dict.fromkeys(list_ids(self._backend, layout.PINS), "a pin") | tagged
        # A version that retention deletes has a tombstone until its id is listed no more.
        there = list_ids(self._backend, layout.TOMBSTONES) | list_ids(self._backend, layout.VERSIONS)
        for version in sorted(kept.keys() - there):
            what = (
                f"version {version} of {self._backend.url} is lost with all its objects, although {kept[version]} "
                f"keeps it; put versions/{version} back, or remove the {'tag' if version in tagged else 'pin'}"
            )
            # A pin alone may also be left of a call that was killed.
            (self.problems if version in tagged else self.suspicious).append(Finding(what, version))
