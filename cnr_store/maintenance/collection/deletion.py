"""Deletes the versions that retention chose, so that a crash at any point leaves every visible version whole."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from cnr_backends import Backend, ObjectNotFoundError, StorageFullError, Transfer
from cnr_store.catalog.objects import list_ids
from cnr_store.errors import CorruptionError, FormatError, option
from cnr_store.format import layout
from cnr_store.format.record_document import decode_record, encode_void
from cnr_store.format.state import dumps
from cnr_store.maintenance.collection.store_snapshot import StoreSnapshot
from cnr_store.maintenance.objects import delete_objects


@dataclass(frozen=True)
class Left:
    """What attempts left that was not deleted."""

    reasons: Mapping[str, str]  # why, by id
    nbytes: int  # bytes of their objects


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

    def left(self, snapshot: StoreSnapshot, deleted: Collection[str], grace_seconds: float) -> Left:
        """What attempts left, other than those that were `deleted`, and why it stays."""
        reasons, nbytes = {}, 0
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
        return Left(reasons, nbytes)

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
