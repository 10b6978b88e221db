"""What a store holds, as retention needs it: who writes, what is committed, pinned, tombstoned, aborted and folded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cnr_backends import Backend, ObjectExistsError, ObjectNotFoundError, StorageFullError, Transfer
from cnr_store.catalog import claims
from cnr_store.catalog.claims import ClaimRecord
from cnr_store.catalog.objects import list_ids, list_marked, read_tags
from cnr_store.catalog.version_info import find_figures
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.format.record_document import decode_record, encode_void, void_time

WORKERS = 16


@dataclass(frozen=True)
class Committed:
    """What retention must know of a version."""

    id: str
    step: int
    bases: Mapping[str, str]  # by path of each array that is a delta, the version it is based on
    needs: tuple[str, ...]  # the versions its writer depended on, whether or not they are folded
    record_bytes: int
    # The finite numbers in its metadata, by name, as `find_figures` finds them
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StoreSnapshot:
    """What a store held at one moment."""

    newest: ClaimRecord | None  # the newest claim, None if there is none
    pinned: frozenset[str]  # pinned, tombstoned: ids with a pin, and ids with a tombstone
    tagged: Mapping[str, str]  # the id that each tag names
    tombstoned: frozenset[str]
    versions: Mapping[str, Committed]  # the committed versions, oldest first
    aborted: Mapping[str, float]  # ids of aborted attempts, with the time
    names: frozenset[str]  # ids of all attempts listed
    folds: Mapping[str, frozenset[str]]  # by id, the paths that its fold holds; none for an incomplete fold
    # Why attempts of older generations could not be aborted, although asked for; None if all were
    full: StorageFullError | None = None

    def depends_on(self, version: str) -> set[str]:
        """The next versions in the chains of its arrays, as far as they are committed."""
        folded = self.folds.get(version, frozenset())
        bases = {base for path, base in self.versions[version].bases.items() if path not in folded}
        return bases & self.versions.keys()


class SnapshotReader:
    """Takes snapshots of a store. What can't change is read once.

    Folds are read for every snapshot: a damaged one may be deleted by hand, and then the chain beneath it is needed.

    `backend`: the store.
    `own`: the claim of the process that asks, None if it has none.
    """

    def __init__(self, backend: Backend, own: ClaimId | None) -> None:
        self._backend = backend
        self._own = own
        self._known: dict[str, Committed | float] = {}

    def take(self, transfer: Transfer, *, void: bool) -> StoreSnapshot:
        """Take a snapshot. With `void`, first abort every attempt without a record whose writer can't commit it.

        That is every attempt of older generations, and of the newest if its claim is closed.

        Without, they count as aborted now. If the storage is full, not all are aborted, and the snapshot says so.

        A process whose own claim is not the newest aborts nothing. The order of the listings matters: a writer that
        saw no newer claim had staged its attempt before the claim that is the newest here. So the attempt is listed,
        and its late commit fails.
        """
        newest = claims.newest_claim(self._backend)
        may_abort = self._own in (None, newest.id if newest else None)
        pinned, tagged = list_marked(self._backend, layout.PINS), read_tags(self._backend)
        tombstoned = list_marked(self._backend, layout.TOMBSTONES)
        folded = list_ids(self._backend, layout.FOLDS)  # before the versions: none is older than its version
        names = list_ids(self._backend, layout.VERSIONS)
        self._known = {
            name: known
            for name, known in self._known.items()
            # What is tombstoned may have been deleted since.
            if name in names and not (name in tombstoned and isinstance(known, Committed))
        }
        unread = sorted(names - self._known.keys())
        unaborted, full = [], None
        for name, known in zip(unread, transfer.map(self._read, unread), strict=True):
            if known is not None:
                self._known[name] = known
            elif may_abort and _can_not_commit(name, newest):
                unaborted.append(name)
        self._check_tagged(tagged, tombstoned)
        if void:
            full = self._abort_all(unaborted)
        folds = dict(zip(folded, transfer.map(self._fold, folded), strict=True))
        versions = {
            name: known for name, known in sorted(self._known.items()) if isinstance(known, Committed)
        }
        aborted = {name: known for name, known in self._known.items() if not isinstance(known, Committed)}
        if not void:
            aborted |= dict.fromkeys(unaborted, time.time())
        return StoreSnapshot(newest, pinned, tagged, tombstoned, versions, aborted, names, folds, full)

    def _check_tagged(self, tagged: Mapping[str, str], tombstoned: frozenset[str]) -> None:
        """Refuse a tag that names no version: what it was to keep may be another one, or needed to mend it."""
        for name, version in tagged.items():
            if not isinstance(self._known.get(version), Committed) and version not in tombstoned:
                raise CorruptionError(
                    f"{self._backend.url}: the tag {name!r} names version {version}, which is lost, so nothing is "
                    f"deleted; put it back, tag another version {name!r}, or remove the tag (`cnr untag`)"
                )

    def _read(self, version: str) -> Committed | float | None:
        try:
            data = self._backend.get(layout.record_key(version))
        except ObjectNotFoundError:
            return None
        record = decode_record(data, version)
        if record is None:
            return void_time(data)
        bases = {path: entry.base for path, entry in record.arrays.items() if entry.base is not None}
        figures = find_figures(record.metadata)
        return Committed(record.id, record.step, bases, record.needs, record.record_bytes, figures)

    def _abort_all(self, names: Iterable[str]) -> StorageFullError | None:
        """Abort attempts one after the other, until the storage is full; returns its error then."""
        try:
            for name in names:
                known = self._abort(name)
                if known is not None:
                    self._known[name] = known
        except StorageFullError as error:
            return error
        return None

    def _abort(self, version: str) -> Committed | float | None:
        now = time.time()
        void = encode_void(str(self._own or "gc"), secrets.token_hex(16), now)
        try:
            self._backend.with_reserve(lambda: self._backend.create(layout.record_key(version), void))
        except ObjectExistsError:  # its writer committed meanwhile, or another process aborted it
            return self._read(version)
        return now

    def _fold(self, version: str) -> frozenset[str]:
        try:
            data = self._backend.get(layout.record_key(version, layout.FOLDS))
            record = decode_record(data, version, layout.FOLDS)
        except (ObjectNotFoundError, CorruptionError, FormatError):
            return frozenset()  # as if it were missing: the version's chain is kept
        arrays = record.arrays.items() if record is not None else ()
        return frozenset(path for path, entry in arrays if entry.kind == "whole")


def _can_not_commit(version: str, newest: ClaimRecord | None) -> bool:
    attempt = VersionId.parse(version)
    if newest is None:
        return False  # it was listed before the first claim was made
    if attempt is None:
        return True
    return attempt.claim < newest.id or (newest.closed and attempt.claim == newest.id)
