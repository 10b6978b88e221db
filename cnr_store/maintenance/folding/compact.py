"""Folding: a version's chain of deltas becomes one link. Its rows are moved as they are stored, bit for bit.

Each attempt at a fold has a folder of its own, named by a random nonce. A fold exists once its record does, which is
created last and exclusively. So one of several attempts succeeds, and none touches another's objects. The version
itself is not changed: readers walk either the fold or the chain, and find the same rows.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cnr_backends import Backend, BackendError, StorageFullError, Transfer
from cnr_store.catalog.catalog import Catalog, Url, Version, open_to_change
from cnr_store.catalog.objects import has_object
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.errors import CheckpointError, CorruptionError, SaveError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.arrays import Doc, add_node
from cnr_store.format.manifest import Manifest, Part, encode_manifest
from cnr_store.format.record import Record, required_features
from cnr_store.format.record_document import decode_record, encode_record
from cnr_store.maintenance.folding.folded_array import FoldedArray
from cnr_store.maintenance.objects import Progress, delete_objects, no_progress
from cnr_store.policies.checks import integer

log = logging.getLogger("cnr_store")
_DELETE_WORKERS = 8


@dataclass(frozen=True)
class CompactReport:
    """The result of `compact`.

    Attributes
    ----------
    version
        The version's id.
    outcome
        ``folded``; or, where nothing was written, ``already folded`` or ``nothing to fold`` (no array depends on
        another version).
    arrays
        Paths of the arrays that were folded.
    links
        How many versions the longest of their chains had.
    rows, bytes
        Rows and bytes written; rows of optimizer state count as those of tables do.
    seconds
        How long it took.
    """

    version: str
    outcome: str
    arrays: tuple[str, ...] = ()
    links: int = 0
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0


def compact(
    url: Url,
    version: Version = "latest",
    *,
    workers: int = 2,
    progress: Progress | None = None,
    **storage_options: Any,
) -> CompactReport:
    """Fold a version: store its rows once more, in one piece, so that reading it touches no other version.

    Its rows read bit for bit as before. There is no new version and no claim, so `compact` may run beside training
    and in several processes at once. The older versions stay until retention deletes them.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, or ``latest``.
    workers
        Threads that compose and write. Memory is a few shards for each, whatever the table's size.
    progress
        Called with (shards written, shards in all), on the caller's thread.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
        There is no such version, or it was deleted meanwhile.
    CorruptionError, FormatError
        A link of a chain is damaged, or its chunks can't be moved. Nothing becomes visible.
    SaveError
        The storage failed. Nothing becomes visible, unless the fold was complete and only the response was lost.
    OptionError
        `workers` is not a positive integer.
    """
    workers = integer("workers", workers, minimum=1)
    return fold(*open_to_change(url, version, **storage_options), workers, progress or no_progress)


def fold(catalog: Catalog, record: Record, workers: int, progress: Progress = no_progress) -> CompactReport:
    """Fold a committed version; see `compact`."""
    began = time.perf_counter()
    paths = tuple(path for path, entry in record.arrays.items() if entry.kind == "delta")
    if not paths:
        return CompactReport(record.id, "nothing to fold")
    catalog.look_for_folds()
    known = catalog.find_fold(record.id)
    if known is not None:
        _delete_other_attempts(catalog.backend, known)
        return CompactReport(record.id, "already folded", seconds=time.perf_counter() - began)
    attempt = _FoldAttempt(catalog.backend, record)
    try:
        readers = (ArrayReader(catalog, record, path) for path in paths)
        arrays = {each.path: FoldedArray.from_reader(each, record.arrays[each.path]) for each in readers}
        folded = attempt.write(arrays, workers, progress)
    except Exception as error:  # after any error the attempt's objects are of no use
        attempt.delete()
        if _is_there(Catalog(catalog.backend).find_record, record) is False:
            raise VersionNotFoundError(
                f"{catalog.backend.url}: version {record.id} was removed while it was being folded"
            ) from error
        # Another attempt may have succeeded, and retention have deleted what this one was still reading.
        if isinstance(error, CorruptionError) and _is_there(Catalog(catalog.backend).find_fold, record):
            return CompactReport(record.id, "already folded", seconds=time.perf_counter() - began)
        if isinstance(error, CheckpointError):
            raise
        raise SaveError(
            f"version {record.id} of {catalog.backend.url} was not folded: {error}. It is unchanged; try again"
        ) from error
    seconds = time.perf_counter() - began
    if folded is None:
        return CompactReport(record.id, "already folded", seconds=seconds)
    rows = sum(array.entry.rows for array in arrays.values())
    links = max(len(array.reader.links) for array in arrays.values())
    return CompactReport(record.id, "folded", paths, links, rows, folded.nbytes, seconds)


class _FoldAttempt:
    """One attempt at the fold of a version."""

    def __init__(self, backend: Backend, version: Record) -> None:
        self._backend, self._version = backend, version
        self._may_be_committed = False
        self._draft = Record(
            id=version.id,
            nonce=secrets.token_hex(16),
            step=version.step,
            time=time.time(),
            previous=None,
            needs=(),
            arrays={},
            nodes={},
            policy={},
            restores=version.restores,
            objects_bytes=0,
            manifest_sha256="",
            state_sha256="",
            prefix=layout.FOLDS,
        )

    def write(self, arrays: Mapping[str, FoldedArray], workers: int, progress: Progress) -> Record | None:
        """Put all objects, then create the record. Returns None if another attempt's record was created first."""
        self._draft = replace(self._draft, arrays={path: array.entry for path, array in arrays.items()})
        total = sum(array.shards for array in arrays.values())
        shards = ((path, shard) for path, array in arrays.items() for shard in range(array.shards))
        parts: dict[str, dict[int, Part]] = {path: {} for path in arrays}
        nodes: dict[str, Doc] = {}
        for path, array in arrays.items():
            add_node(nodes, path, array.document)
        with Transfer(workers, 2 * workers) as transfer:
            put_shards = transfer.map(
                lambda task: (*task, arrays[task[0]].put_shard(self._backend, self._draft, task[1])), shards
            )
            for done, (path, shard, part) in enumerate(put_shards, 1):
                parts[path][shard] = part
                progress(done, total)
        manifest = encode_manifest(Manifest(self._version.id, parts).renamed(self._draft.moved))
        self._backend.put(self._draft.key("manifest"), manifest)
        sizes = {path: sum(part.nbytes for part in array.values()) for path, array in parts.items()}
        entries = {path: replace(array.entry, nbytes=sizes[path]) for path, array in arrays.items()}
        return self._commit(
            replace(
                self._draft,
                time=time.time(),
                arrays=entries,
                requires=required_features(entries),
                nodes=nodes,
                objects_bytes=len(manifest) + sum(sizes.values()),
                manifest_sha256=hashlib.sha256(manifest).hexdigest(),
            )
        )

    def _commit(self, fold: Record) -> Record | None:
        data = encode_record(fold)
        self._may_be_committed = True
        try:
            self._backend.create(fold.key(), data)
        except BackendError as error:
            owner = self._owner()
            if owner is None:
                # A create that found no room did nothing. Any other may still arrive.
                full = isinstance(error, StorageFullError)
                self._may_be_committed = not full or has_object(self._backend, fold.key())
                raise
            # Where another attempt's record has the key, this one's can't be created any more.
            if owner != fold.nonce:
                self._may_be_committed = False
                self.delete()
                return None
            self._backend.confirm(fold.key())  # what failed may have been the sync behind it
        # The version may have been deleted meanwhile, with those of the fold's objects that were listed then.
        if _is_there(Catalog(self._backend).find_record, self._version) is False:
            self._backend.delete(fold.key())
            self._may_be_committed = False
            raise VersionNotFoundError(f"version {fold.id} was removed")
        _delete_other_attempts(self._backend, fold)
        return replace(fold, record_bytes=len(data))

    def _owner(self) -> str | None:
        """Nonce of the attempt that created the record; None if there is no record, or storage does not answer."""
        with suppress(BackendError):
            committed = decode_record(self._backend.get(self._draft.key()), self._version.id, layout.FOLDS)
            return None if committed is None else committed.nonce
        return None

    def delete(self) -> None:
        """Delete what was put, unless a record of it exists or may still appear.

        In that case it stays until the version is deleted or folded again.
        """
        if not self._may_be_committed:
            _delete_listed(self._backend, self._draft, _folder(self._draft))


def _folder(fold: Record) -> str:
    return layout.version_key(fold.id, fold.nonce, prefix=layout.FOLDS)


def _is_there(find: Callable[[str], Record | None], version: Record) -> bool | None:
    """Whether a record is there now. None if that is unknown, because storage is damaged or silent."""
    with suppress(BackendError, CheckpointError):
        return find(version.id) is not None
    return None


def _delete_other_attempts(backend: Backend, fold: Record) -> None:
    """Delete what other attempts at this fold left. None of them can commit any more, since the record exists."""
    # Where a create is not atomic, another attempt may still replace the record.
    if backend.atomic_create:
        folder = layout.version_key(fold.id, prefix=layout.FOLDS)
        _delete_listed(backend, fold, folder, (fold.key(), f"{_folder(fold)}/"))


def _delete_listed(backend: Backend, fold: Record, folder: str, kept: tuple[str, ...] = ()) -> None:
    """Delete the objects of a folder, but keys that begin with one of `kept`. A failure is only logged."""
    try:
        keys = [key for key, _ in backend.list_keys(folder) if not key.startswith(kept)]
        with Transfer(_DELETE_WORKERS, 2 * _DELETE_WORKERS) as transfer:
            delete_objects(backend, transfer, keys)
    except BackendError as error:
        log.warning("leftovers of folding version %s were not removed: %s", fold.id, error)
