"""Deletes the versions that retention chose, so that a crash at any point leaves every visible version whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import replace

from cnr_backends import Backend, Transfer
from cnr_store.catalog.catalog import list_ids
from cnr_store.format import layout
from cnr_store.format.record_document import encode_void
from cnr_store.format.state import dumps
from cnr_store.maintenance.collection.store_snapshot import StoreSnapshot
from cnr_store.maintenance.objects import delete_objects


class Deletion:
    """One run of retention. Its tombstones are its own, so that it alone may take them back.

    Call `tombstone`, take another snapshot, `untombstone` what is needed after all, `hide` the rest, then
    `delete_objects` and `delete_stale_marks`.
    """

    def __init__(self, backend: Backend, transfer: Transfer, by: str) -> None:
        self._backend = backend
        self._transfer = transfer
        self._by = by
        self._run = secrets.token_hex(8)
        self.freed_bytes = 0

    def tombstone(self, versions: Iterable[str]) -> None:
        """Put a tombstone on each version. From then on no writer begins to depend on it."""
        data = dumps({"by": self._by, "time": time.time()})
        for _ in self._transfer.map(
            lambda version: self._backend.put(self._tombstone(version), data), versions
        ):
            pass

    def untombstone(self, versions: Iterable[str]) -> None:
        """Remove this run's tombstones from versions that a writer depended on before they were tombstoned."""
        delete_objects(self._backend, self._transfer, map(self._tombstone, versions))

    def hide(self, versions: Collection[str], snapshot: StoreSnapshot) -> StoreSnapshot:
        """Make versions invisible, newest first, so that a version goes before those it depends on.

        A void record replaces the commit record. Its key stays taken, so a commit that is still under way elsewhere
        fails.

        Returns
        -------
        The snapshot without them.
        """
        aborted = dict(snapshot.aborted)
        for version in sorted(versions, reverse=True):
            aborted[version] = time.time()
            void = encode_void(self._by, secrets.token_hex(16), aborted[version])
            self._backend.put(layout.record_key(version), void)
            self.freed_bytes += snapshot.versions[version].record_bytes - len(void)
        return replace(
            snapshot,
            versions={name: known for name, known in snapshot.versions.items() if name not in aborted},
            aborted=aborted,
            tombstoned=snapshot.tombstoned.union(versions),
        )

    def delete_objects(self, version: str) -> bool:
        """Delete all objects of an aborted id and its fold, except the void record. Tells whether there were any."""
        record, fold = layout.record_key(version), layout.record_key(version, layout.FOLDS)
        found = sorted(self._backend.list_keys(layout.version_key(version, prefix=layout.FOLDS)))
        listed = self._backend.list_keys(layout.version_key(version))
        found += sorted(item for item in listed if item[0] != record)
        if any(key == fold for key, _ in found):
            self._backend.delete(fold)
        delete_objects(self._backend, self._transfer, (key for key, _ in found if key != fold))
        self.freed_bytes += sum(nbytes for _, nbytes in found)
        return bool(found)

    def delete_aborted_records(self, versions: Iterable[str]) -> None:
        """Delete the void records of ids under which nothing can be committed any more."""
        delete_objects(self._backend, self._transfer, map(layout.record_key, versions))

    def delete_stale_marks(self, snapshot: StoreSnapshot) -> None:
        """Delete tombstones and pins of ids that have no objects left."""
        marked = snapshot.tombstoned | snapshot.pinned
        if not marked:
            return
        left = list_ids(self._backend, layout.VERSIONS) | list_ids(self._backend, layout.FOLDS)
        for version in sorted(marked - left):
            for prefix in (layout.TOMBSTONES, layout.PINS):
                marks = sorted(self._backend.list_keys(layout.version_key(version, prefix=prefix)))
                delete_objects(self._backend, self._transfer, (key for key, _ in marks))

    def _tombstone(self, version: str) -> str:
        return layout.version_key(version, self._run, prefix=layout.TOMBSTONES)


def deletable(snapshot: StoreSnapshot, now: float, grace_seconds: float) -> list[str]:
    """Aborted ids whose objects may be deleted: those of deleted versions and ended runs at once, others after the
    grace time.

    Folds of versions that are not listed may be deleted, too.
    """
    ended = snapshot.newest is not None and snapshot.newest.ends is not None
    aborted = [
        version
        for version, when in snapshot.aborted.items()
        if ended or version in snapshot.tombstoned or when + grace_seconds <= now
    ]
    return sorted({*aborted, *(snapshot.folds.keys() - snapshot.names)})


def deletable_records(
    snapshot: StoreSnapshot, emptied: Iterable[str], now: float, grace_seconds: float
) -> list[str]:
    """Ids among `emptied` whose void record may be deleted, so that nothing of them is left.

    A writer commits one attempt after the other. Once a later attempt of its claim is listed, the record of an
    earlier one can only be created by a request that the network still carries: the grace time covers that. The last
    attempt of each claim stays aborted for ever, because its writer may be stopped right before its commit.
    """
    # The last attempt of each claim: an id is the claim's, a dot and the attempt's number, and sorts by them.
    last = set({name.partition(".")[0]: name for name in sorted(snapshot.names)}.values())
    return [
        version
        for version in emptied
        if version not in last
        and version in snapshot.aborted
        and snapshot.aborted[version] + grace_seconds <= now
    ]
