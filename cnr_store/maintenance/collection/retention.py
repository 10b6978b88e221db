"""Retention: which versions are kept; all others, and the leftovers of crashed attempts, are deleted.

`docs/design-notes/retention.md` argues why nothing needed is deleted, whichever process is stopped or killed at
whichever point.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cnr_backends import (
    Backend,
    BackendError,
    ObjectNotFoundError,
    StorageFullError,
    Transfer,
    open_backend,
)
from cnr_store.catalog.catalog import Catalog, Url
from cnr_store.catalog.claims import end_run as end_newest_run
from cnr_store.catalog.claims import is_own_version, newest_claim
from cnr_store.catalog.objects import list_ids
from cnr_store.errors import (
    CheckpointError,
    CorruptionError,
    EmptyStoreError,
    FormatError,
    OptionError,
    option,
)
from cnr_store.format import layout
from cnr_store.format.layout import ClaimId
from cnr_store.format.record_document import decode_record, encode_void
from cnr_store.format.state import dumps
from cnr_store.maintenance.collection.rules import Rules, check_figure, choose
from cnr_store.maintenance.collection.store_snapshot import WORKERS, SnapshotReader, StoreSnapshot
from cnr_store.maintenance.objects import Progress, delete_objects, no_progress
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
            left, left_bytes = self._left(snapshot, deletion, snapshot.versions.keys())
            leftovers = tuple(version for version in deletion.emptied if version not in removed)
            return GcReport(
                {} if stopped else kept,
                tuple(sorted(removed)),
                leftovers,
                deletion.freed_bytes,
                left,
                left_bytes,
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

    def _left(
        self, snapshot: StoreSnapshot, deletion: Deletion, versions: Collection[str]
    ) -> tuple[dict[str, str], int]:
        """By id why objects of attempts stay, and of folds of the `versions` that are kept; and their bytes."""
        due = deletable(snapshot, time.time(), self._grace_seconds)
        reasons, nbytes = deletion.left(snapshot, due, self._grace_seconds)
        folds = self._fold_leftovers(versions).left
        return reasons | dict.fromkeys(sorted(folds), REASON), nbytes + sum(folds.values())

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
        left, left_bytes = self._left(snapshot, deletion, kept)
        return GcReport(kept, tuple(to_delete), leftovers, freed_bytes, left, left_bytes, dry_run=True)


class Deletion:
    """One run of retention. Its tombstones are its own, so that it alone may take them back.

    Call `delete_objects` for what is aborted, then `tombstone`, take another snapshot, `untombstone` what is needed
    after all, `hide` the rest, then `delete_objects` and `delete_stale_marks`.

    `freed_bytes`: bytes of all objects deleted, but for what marks versions as removed (about 200 bytes each).
    `done`, `emptied`: the number of ids whose objects were deleted, and those of them that had any.
    `full`: why not all of the versions got a tombstone in the last call of `tombstone`, or None.
    """

    def __init__(self, backend: Backend, transfer: Transfer, by: str) -> None:
        self._backend = backend
        self._transfer = transfer
        self._by = by
        self._run = secrets.token_hex(8)
        self.freed_bytes = 0
        self.done = 0
        self.emptied: list[str] = []
        self.full: StorageFullError | None = None

    def tombstone(self, versions: Iterable[str]) -> list[str]:
        """Put a tombstone on each version. From then on no writer begins to depend on it.

        If there is no room for all, only the newest get one, half as many as there was room for: then there is room
        to `hide` them, and nothing that keeps its record depends on them.

        Returns: The versions with a tombstone, newest first.
        """
        self.full, marked = None, set[str]()
        newest_first = sorted(versions, reverse=True)
        data = dumps({"by": self._by, "time": time.time()})

        def put(version: str) -> None:
            self._put(self._tombstone(version), data)
            marked.add(version)  # here, because a failure hides the results that nobody has taken yet

        try:
            for _ in self._transfer.map(put, newest_first):
                pass
        except StorageFullError as error:
            self.full = error
            room = next(place for place, version in enumerate(newest_first) if version not in marked)
            self.untombstone(newest_first[(room + 1) // 2 :])
            return newest_first[: (room + 1) // 2]
        return newest_first

    def _put(self, key: str, data: bytes) -> None:
        self._backend.with_reserve(lambda: self._backend.put(key, data))

    def untombstone(self, versions: Iterable[str]) -> None:
        """Remove this run's tombstones from versions that a writer depended on before they were tombstoned."""
        delete_objects(self._backend, self._transfer, map(self._tombstone, versions))

    def hide(self, versions: Collection[str], snapshot: StoreSnapshot) -> StoreSnapshot:
        """Make versions invisible, newest first, so that a version goes before those it depends on.

        A void record replaces the commit record. Its key stays taken, so a commit that is still under way elsewhere
        fails.

        Returns: The snapshot without them.
        """
        aborted = dict(snapshot.aborted)
        for version in sorted(versions, reverse=True):
            aborted[version], void = self._void()
            self._put(layout.record_key(version), void)
            self.freed_bytes += snapshot.versions[version].record_bytes - len(void)
        return replace(
            snapshot,
            versions={name: known for name, known in snapshot.versions.items() if name not in aborted},
            aborted=aborted,
            tombstoned=snapshot.tombstoned.union(versions),
        )

    def _void(self) -> tuple[float, bytes]:
        """The time, and a void record. All have one length, since whole seconds do, so a dry run can count them."""
        now = float(int(time.time()))
        return now, encode_void(self._by, secrets.token_hex(16), now)

    def delete_objects(self, versions: Sequence[str]) -> Generator[str, None, None]:
        """Delete all objects of aborted ids and their folds, except the void records; yields each id that is done.

        While the objects of one are deleted, those of the next are listed.
        """
        with closing(self._transfer.map(self._objects, versions)) as listed:
            for version, found in zip(versions, listed, strict=True):
                fold = layout.record_key(version, layout.FOLDS)
                if fold in found:
                    self._backend.delete(fold)
                delete_objects(self._backend, self._transfer, (key for key in found if key != fold))
                for prefix in (layout.VERSIONS, layout.FOLDS):
                    self._backend.sweep(layout.version_key(version, prefix=prefix))
                self.freed_bytes += sum(found.values())
                self.done += 1
                if found:
                    self.emptied.append(version)
                yield version

    def delete_keys(self, found: Mapping[str, int]) -> None:
        """Delete objects, given with their sizes, and the folders that they were in."""
        delete_objects(self._backend, self._transfer, found)
        for folder in {"/".join(key.split("/")[:3]) for key in found}:
            self._backend.sweep(folder)
        self.freed_bytes += sum(found.values())

    def _objects(self, version: str) -> dict[str, int]:
        """Sizes of all objects of an id and its fold, except its record, by key."""
        folders = [layout.version_key(version, prefix=prefix) for prefix in (layout.FOLDS, layout.VERSIONS)]
        listed = (item for folder in folders for item in sorted(self._backend.list_keys(folder)))
        return {key: nbytes for key, nbytes in listed if key != layout.record_key(version)}

    def nbytes(self, versions: Sequence[str]) -> dict[str, int]:
        """What `delete_objects` would free, by id."""
        listed = self._transfer.map(self._objects, versions)
        return {version: sum(found.values()) for version, found in zip(versions, listed, strict=True)}

    def nbytes_of_versions(self, versions: Sequence[str], snapshot: StoreSnapshot) -> int:
        """What `hide` and `delete_objects` would free."""
        hidden = sum(snapshot.versions[version].record_bytes - len(self._void()[1]) for version in versions)
        return hidden + sum(self.nbytes(versions).values())

    def left(
        self, snapshot: StoreSnapshot, deleted: Collection[str], grace_seconds: float
    ) -> tuple[dict[str, str], int]:
        """Why the objects of attempts that were not `deleted` stay, by id; their bytes."""
        reasons, nbytes = dict[str, str](), 0
        others = sorted(snapshot.names - snapshot.versions.keys() - set(deleted))
        for version, found in self.nbytes(others).items():
            if not found:
                continue
            nbytes += found
            if version in snapshot.aborted:
                reasons[version] = f"it was given up less than {grace_seconds:g} seconds ago (the grace time)"
            else:
                reasons[version] = (
                    f"writer {snapshot.newest}, the newest, may still be at work on it; if that run has died, end "
                    f"it by gc with {option('end_run')}"
                )
        return reasons, nbytes

    def delete_aborted_records(self, versions: Iterable[str]) -> None:
        """Delete the void records of ids under which nothing can be committed any more."""
        delete_objects(self._backend, self._transfer, map(layout.record_key, versions))

    def delete_stale_marks(self, snapshot: StoreSnapshot) -> None:
        """Delete tombstones and pins of ids that have no objects left."""
        marked = snapshot.tombstoned | snapshot.pinned
        if not marked:
            return
        left = list_ids(self._backend, layout.VERSIONS) | list_ids(self._backend, layout.FOLDS)
        gone = marked - left
        for prefix in (layout.TOMBSTONES, layout.PINS) if gone else ():
            marks = sorted(key for key, _ in self._backend.list_keys(prefix) if key.split("/")[1] in gone)
            delete_objects(self._backend, self._transfer, marks)

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
        if ended or version in snapshot.tombstoned or _is_over(when, now, grace_seconds)
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
        and _is_over(snapshot.aborted[version], now, grace_seconds)
    ]


def _is_over(began: float, now: float, grace_seconds: float) -> bool:
    """Whether a grace time is over. The clock that told when it began may have been ahead, by a year, too."""
    return abs(now - began) >= grace_seconds


REASON = (
    "a fold of this version has not ended: it is under way, was stopped and may go on, or was killed, and nothing "
    "tells which; what it left goes once the version is folded (`cnr compact`) or removed"
)


@dataclass(frozen=True)
class FoldLeftovers:
    """Objects of attempts at folds, other than the folds that exist."""

    # By version that has a fold, the sizes of the objects of other attempts, by key. None of these can succeed.
    removable: Mapping[str, Mapping[str, int]]
    # By version that has no fold, the bytes of all attempts. One that was stopped may still create the record.
    left: Mapping[str, int]


def find_fold_leftovers(backend: Backend, versions: Collection[str]) -> FoldLeftovers:
    """What attempts at folds of these versions left."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for key, nbytes in backend.list_keys(layout.FOLDS):
        version = key.split("/")[1]
        if version in versions:
            found[version][key] = nbytes
    removable, left = {}, {}
    for version, sizes in found.items():
        if layout.record_key(version, layout.FOLDS) not in sizes:
            left[version] = sum(sizes.values())
        # Where a create is not atomic, another attempt may still replace the record.
        elif backend.atomic_create and (nonce := _nonce(backend, version)) is not None:
            others = {
                key: nbytes for key, nbytes in sizes.items() if key.split("/")[2] not in (nonce, layout.NODE)
            }
            if others:
                removable[version] = others
    return FoldLeftovers(removable, left)


def _nonce(backend: Backend, version: str) -> str | None:
    """What names the folder of a version's fold; None if its record is damaged, or went meanwhile."""
    with suppress(ObjectNotFoundError, CorruptionError, FormatError):
        record = decode_record(backend.get(layout.record_key(version, layout.FOLDS)), version, layout.FOLDS)
        return None if record is None else record.nonce
    return None


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
