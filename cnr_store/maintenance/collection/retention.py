"""Retention: which versions are kept; all others, and the leftovers of crashed attempts, are deleted.

`docs/design-notes/retention.md` argues why nothing needed is deleted, whichever process is stopped or killed at
whichever point.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from cnr_backends import Backend, BackendError, StorageFullError, Transfer, open_backend
from cnr_store.catalog.catalog import Catalog, Url
from cnr_store.catalog.claims import end_run as end_newest_run
from cnr_store.catalog.claims import is_own_version, newest_claim
from cnr_store.errors import CheckpointError, EmptyStoreError, OptionError
from cnr_store.format.layout import ClaimId
from cnr_store.maintenance.collection.deletion import (
    REASON,
    Deletion,
    FoldLeftovers,
    Left,
    deletable,
    deletable_records,
    find_fold_leftovers,
)
from cnr_store.maintenance.collection.rules import Rules, check_figure, choose
from cnr_store.maintenance.collection.store_snapshot import WORKERS, SnapshotReader, StoreSnapshot
from cnr_store.maintenance.objects import Progress, no_progress
from cnr_store.options import KeepBest
from cnr_store.policies.checks import number

GRACE_SECONDS = 3600.0


@dataclass(frozen=True)
class GcReport:
    """What retention did, or with `dry_run` would do now.

    Attributes
    ----------
    kept
        Why each version is kept, by id, oldest first.
    removed
        Ids of the versions deleted, oldest first.
    leftovers
        Ids of crashed or failed attempts whose objects were deleted.
    freed_bytes
        Bytes of all objects deleted, but for what marks versions as removed (about 200 bytes each).
    left
        Why the objects of other crashed or failed attempts stay, by id; of a version that is kept, why those of a fold
        that has not ended.
    left_bytes
        Bytes of these objects.
    stopped
        Why no version was deleted, or None.
    dry_run
        Whether nothing was changed, and this is what would be done.
    """

    kept: Mapping[str, str]
    removed: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    freed_bytes: int = 0
    left: Mapping[str, str] = field(default_factory=dict)
    left_bytes: int = 0
    stopped: str | None = None
    dry_run: bool = False


def gc(
    url: Url,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: KeepBest | None = None,
    *,
    dry_run: bool = False,
    end_run: bool = False,
    grace_seconds: float = GRACE_SECONDS,
    progress: Progress | None = None,
    **storage_options: Any,
) -> GcReport:
    """Delete the versions that no rule keeps, and the leftovers of crashed attempts.

    The newest version, pinned ones, the version the newest writer goes on from (unless it closed its `Checkpointer`),
    and every version that a kept one depends on are always kept. Without a rule only leftovers are deleted. `gc` may
    run beside training and beside another `gc`. After one that was killed, it finishes the work.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    keep_last
        How many of the newest versions are kept.
    keep_every
        A number of steps; the newest version at or before each multiple of it is kept.
    keep_best
        The versions with the best figure: its name in the metadata, ``"max"`` or ``"min"``, and how many are kept, such
        as ``("auc", "max", 3)``. Versions without it, or with NaN, are not among them.
    dry_run
        Change nothing, and report what would be deleted.
    end_run
        First end the run of the newest writer, if it has not closed its `Checkpointer`: it is dead, or shall stop. It
        can't commit any more, and nothing is kept for it. Its unfinished save is deleted at once. A job that has loaded
        and not yet saved goes on.
    grace_seconds
        How many seconds ago an attempt must have been given up before its objects are deleted.
    progress
        Called with (done, all): how many ids had their objects deleted, and how many will.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    OptionError
        A rule is out of range, or no version has the figure of `keep_best`, or both `dry_run` and `end_run` are given.
    EmptyStoreError
        There is no store.
    SupersededError
        With `end_run`, another writer claimed the store at that moment. Nothing was changed.
    CorruptionError, FormatError
        A record, a tag or the newest claim can't be read, or a tag's version is lost, so it is unknown what is needed.
        Nothing was deleted.
    cnr_backends.StorageFullError
        The storage is full, and nothing could be deleted that would make room for the marks of what is to go.
    cnr_backends.BackendError
        The storage failed. Every visible version is whole. The next call finishes what this one began.
    """
    rules, grace = Rules(keep_last, keep_every, keep_best), number("grace_seconds", grace_seconds)
    if dry_run and end_run:
        raise OptionError("dry_run changes nothing, and end_run ends the newest run: give one of the two")
    backend = open_backend(url, **storage_options)
    catalog = Catalog(backend)
    if not catalog.check_format():
        raise EmptyStoreError(f"{backend.url} holds no store, so there is nothing to delete: check the URL")
    if rules.keep_best is not None:
        check_figure(catalog, rules.keep_best[0])
    if end_run and (newest := newest_claim(backend)) is not None and not newest.is_over:
        try:
            end_newest_run(backend, newest)
        except StorageFullError as full:
            raise _without_room(backend, "no run can be ended", full) from full
    return Collector(backend, rules, grace).run(dry_run=dry_run, progress=progress)


def _without_room(backend: Backend, what: str, full: StorageFullError) -> StorageFullError:
    return StorageFullError(
        f"{backend.url} is full, and {what} without room for a small object ({full}); free 100 kB and a few files by "
        "hand, then try again"
    )


class Collector:
    """Applies rules to one store, once or repeatedly.

    `own`: the claim it works under; it stops if another claim is the newest. None: whichever claim is the newest.
    `removable`: with `own`, the greatest version of other processes that it may remove: what its job has seen.
    """

    def __init__(
        self,
        backend: Backend,
        rules: Rules,
        grace_seconds: float = GRACE_SECONDS,
        own: ClaimId | None = None,
        removable: str = "",
    ) -> None:
        self._backend = backend
        self._removable = removable
        self._rules = rules
        self._grace_seconds = grace_seconds
        self._own = own
        self._reader = SnapshotReader(backend, own)
        self._emptied: set[str] = set()

    def run(self, *, dry_run: bool = False, progress: Progress | None = None) -> GcReport:
        """Take a snapshot, put tombstones, take another, and delete. See `gc` for what it raises."""
        with Transfer(WORKERS, 2 * WORKERS) as transfer:
            deletion = Deletion(self._backend, transfer, str(self._own or "gc"))
            snapshot = self._reader.take(transfer, void=not dry_run)
            if stopped := self._stopped(snapshot):
                return GcReport({}, stopped=stopped, dry_run=dry_run)
            if dry_run:
                return self._dry_run_report(snapshot, deletion)
            removed: list[str] = []
            for found in self._fold_leftovers(snapshot.versions.keys()).removable.values():
                deletion.delete_keys(found)
            while True:
                freed_bytes = deletion.freed_bytes
                # Leftovers go first: tombstones may need the room.
                kept, to_delete = self._chosen(snapshot)
                self._delete_objects(snapshot, deletion, progress or no_progress, len(to_delete))
                if to_delete and snapshot.full is None:
                    snapshot, kept, gone = self._delete_versions(to_delete, snapshot, deletion, transfer)
                    removed += gone
                    self._delete_objects(snapshot, deletion, progress or no_progress)
                stopped, full = self._stopped(snapshot), snapshot.full or deletion.full
                if stopped or full is None:
                    break
                if deletion.freed_bytes == freed_bytes:
                    raise _without_room(self._backend, "nothing more can be deleted", full) from full
                snapshot = self._reader.take(transfer, void=True)
            self._backend.hold_reserve()
            left = self._left(snapshot, deletion, snapshot.versions.keys())
            leftovers = tuple(version for version in deletion.emptied if version not in removed)
            return GcReport(
                {} if stopped else kept,
                tuple(sorted(removed)),
                leftovers,
                deletion.freed_bytes,
                left.reasons,
                left.nbytes,
                stopped,
            )

    def _chosen(self, snapshot: StoreSnapshot) -> tuple[dict[str, str], list[str]]:
        """The versions to keep, with reasons, and the others."""
        kept = choose(snapshot, self._rules, self._not_seen(snapshot))
        return kept, [version for version in snapshot.versions if version not in kept]

    def _delete_versions(
        self, versions: Sequence[str], snapshot: StoreSnapshot, deletion: Deletion, transfer: Transfer
    ) -> tuple[StoreSnapshot, dict[str, str], list[str]]:
        """Put tombstones on versions, look again, and make those invisible that nobody needs.

        Returns: The second snapshot without them, the versions to keep with reasons, and the ids that are gone.
        """
        marked = deletion.tombstone(versions)
        snapshot = self._reader.take(transfer, void=True)
        # An attempt that is not aborted may yet be committed, and nobody knows what it needs.
        stopped = self._stopped(snapshot) or snapshot.full
        kept = choose(snapshot, self._rules, self._not_seen(snapshot), snapshot.versions.keys() - marked)
        deletion.untombstone(version for version in marked if stopped or version in kept)
        if stopped:
            return snapshot, kept, []
        gone = [version for version in marked if version not in kept and version in snapshot.versions]
        return deletion.hide(gone, snapshot), kept, gone

    def _delete_objects(
        self, snapshot: StoreSnapshot, deletion: Deletion, progress: Progress, more: int = 0
    ) -> None:
        """Delete the objects of all aborted ids whose grace time is over; `more` ids are known to follow."""
        now = time.time()
        due = deletable(snapshot, now, self._grace_seconds)
        undone = [version for version in due if version not in self._emptied]
        with closing(deletion.delete_objects(undone)) as emptied:
            for number, version in enumerate(emptied, 1):
                self._emptied.add(version)
                progress(deletion.done, deletion.done + len(undone) - number + more)
        deletion.delete_aborted_records(deletable_records(snapshot, due, now, self._grace_seconds))
        deletion.delete_stale_marks(snapshot)

    def _fold_leftovers(self, versions: Collection[str]) -> FoldLeftovers:
        """What folds of these versions left; nothing where a job's own retention asks, since that lists much."""
        return FoldLeftovers({}, {}) if self._own else find_fold_leftovers(self._backend, versions)

    def _left(self, snapshot: StoreSnapshot, deletion: Deletion, versions: Collection[str]) -> Left:
        """What stays, of attempts at versions, and of folds of the `versions` that are kept."""
        due = deletable(snapshot, time.time(), self._grace_seconds)
        left = deletion.left(snapshot, due, self._grace_seconds)
        folds = self._fold_leftovers(versions).left
        return Left(
            {**left.reasons} | dict.fromkeys(sorted(folds), REASON), left.nbytes + sum(folds.values())
        )

    def _not_seen(self, snapshot: StoreSnapshot) -> list[str]:
        """Versions that a job may not remove: neither its process made them, nor had it seen them when it loaded."""
        if self._own is None:
            return []
        return [
            version
            for version in snapshot.versions
            if version > self._removable and not is_own_version(version)
        ]

    def _stopped(self, snapshot: StoreSnapshot) -> str | None:
        if self._own is None or (snapshot.newest is not None and self._own == snapshot.newest.id):
            return None
        newest = snapshot.newest.id if snapshot.newest else None
        return f"writer {self._own} was superseded by {newest}; only the newest deletes versions"

    def _dry_run_report(self, snapshot: StoreSnapshot, deletion: Deletion) -> GcReport:
        kept, to_delete = self._chosen(snapshot)
        due = deletable(snapshot, time.time(), self._grace_seconds)
        nbytes = deletion.nbytes(due)
        freed_bytes = sum(nbytes.values()) + deletion.nbytes_of_versions(to_delete, snapshot)
        leftovers = tuple(version for version in due if nbytes[version])
        for found in self._fold_leftovers(kept).removable.values():
            freed_bytes += sum(found.values())
        left = self._left(snapshot, deletion, kept)
        return GcReport(
            kept, tuple(to_delete), leftovers, freed_bytes, left.reasons, left.nbytes, dry_run=True
        )


def room_advice(backend: Backend) -> str:
    """The command that makes room in a full store for a version like its largest, and what it removes.

    It keeps the newer half of the versions, or of these the newer half, and so on. "" if the store can't be read.
    """
    with suppress(BackendError, CheckpointError):
        records = Catalog(backend).oldest_first()
        keep, wanted = len(records), max((record.nbytes for record in records), default=0)
        while True:
            keep = max(1, keep // 2)
            found = Collector(backend, Rules(keep_last=keep)).run(dry_run=True)
            if found.freed_bytes >= wanted or keep == 1:
                break
        if found.freed_bytes <= 0:
            return (
                "Nothing of this store can be removed: make room elsewhere, or give the store another place"
            )
        removed = found.removed
        span = f"from {removed[0]} to {removed[-1]}" if len(removed) > 1 else "".join(removed)
        return (
            f"`cnr gc {shlex.quote(backend.url)} --keep-last {keep}` frees {found.freed_bytes:,} bytes: it removes "
            f"{len(removed)} of {len(records)} versions{span and f', {span}'}; with --dry-run it only shows them"
        )
    return ""
