"""Folding: a version's chain of deltas becomes one link, its rows moved as they are stored, bit for bit.

Each attempt at a fold has a folder of its own, named by a random nonce. The fold exists once its record does, which
is created last and exclusively, so of several attempts one wins and none touches another's objects. The version
itself is not changed: whoever reads it walks either the fold or the chain, and finds the same rows.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cnr_backends import Backend, BackendError, Transfer, open_backend
from cnr_store.catalog.catalog import Catalog, Url, Version
from cnr_store.errors import CheckpointError, CorruptionError, OptionError, SaveError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.arrays import Doc, document_bytes, group_document
from cnr_store.format.manifest import Manifest, Part, encode_manifest
from cnr_store.format.record import Record
from cnr_store.format.record_document import decode_record, encode_record
from cnr_store.maintenance.folding.folded_array import FoldedArray, delta_paths

log = logging.getLogger("cnr_store")
_DELETERS = 8
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CompactReport:
    """What `compact` did.

    Attributes
    ----------
    version
        The version's id.
    outcome
        ``folded``; ``already folded`` or ``nothing to fold`` (no array leans on another version), where nothing was
        written.
    arrays
        Paths of the arrays that were folded.
    links
        How many versions the longest of their chains touched.
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

    Rows come back bit for bit as before. There is no new version and no claim, so it may run beside training and
    in several processes at once. The older versions stay until retention removes them.

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
        There is no such version, or it was removed meanwhile.
    CorruptionError, FormatError
        A link of a chain is damaged, or is cut in a way that can't be moved. Nothing becomes visible.
    SaveError
        The storage failed. Nothing becomes visible, unless the fold was complete and only the answer was lost.
    OptionError
        `workers` is not a positive integer.
    """
    workers = _count(workers)
    catalog = Catalog(open_backend(url, **storage_options))
    return fold(catalog, catalog.find(version), workers, progress or _no_progress)


def _count(workers: object) -> int:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise OptionError(f"workers={workers!r}: give an integer of at least 1")
    return workers


def _no_progress(done: int, known: int) -> None:
    pass


def fold(catalog: Catalog, record: Record, workers: int, progress: Progress = _no_progress) -> CompactReport:
    """Fold a committed version; see `compact`."""
    began = time.perf_counter()
    paths = tuple(delta_paths(record))
    if not paths:
        return CompactReport(record.id, "nothing to fold")
    catalog.look_for_folds()
    found = catalog.find_fold(record.id)
    if found is not None:
        _remove_others(catalog.backend, found)
        return CompactReport(record.id, "already folded", seconds=time.perf_counter() - began)
    attempt = _Attempt(catalog.backend, record)
    try:
        arrays = {path: FoldedArray.of(catalog, record, path) for path in paths}
        landed = attempt.write(arrays, workers, progress)
    except Exception as error:  # whatever went wrong, the attempt's objects are of no use
        attempt.remove()
        if _gone(catalog.backend, record):
            raise VersionNotFoundError(
                f"{catalog.backend.url}: version {record.id} was removed while it was being folded"
            ) from error
        # Another attempt may have been first, and retention have removed what this one was still reading.
        if isinstance(error, CorruptionError) and _is_folded(catalog, record):
            return CompactReport(record.id, "already folded", seconds=time.perf_counter() - began)
        if isinstance(error, CheckpointError):
            raise
        raise SaveError(
            f"version {record.id} of {catalog.backend.url} was not folded: {error}. It is untouched; try again"
        ) from error
    seconds = time.perf_counter() - began
    if landed is None:
        return CompactReport(record.id, "already folded", seconds=seconds)
    rows = sum(array.entry.rows for array in arrays.values())
    links = max(len(array.reader.links) for array in arrays.values())
    return CompactReport(record.id, "folded", paths, links, rows, landed.nbytes, seconds)


@dataclass
class _Attempt:
    """One attempt at the fold of a version."""

    backend: Backend
    version: Record
    parts: dict[str, dict[int, Part]] = field(default_factory=dict)
    may_have_landed: bool = False

    def __post_init__(self) -> None:
        self.draft = Record(
            id=self.version.id,
            nonce=secrets.token_hex(16),
            step=self.version.step,
            time=time.time(),
            previous=None,
            needs=(),
            arrays={},
            nodes={},
            policy={},
            restores=self.version.restores,
            objects_bytes=0,
            manifest_sha256="",
            state_sha256="",
            prefix=layout.FOLDS,
        )

    def write(self, arrays: Mapping[str, FoldedArray], workers: int, progress: Progress) -> Record | None:
        """Put everything, then create the record; None if another attempt was first."""
        with Transfer(workers, 2 * workers) as transfer:
            total = sum(array.shards for array in arrays.values())
            shards = transfer.map(lambda task: self._put_shard(arrays, *task), _shards(arrays))
            for done, (path, shard, part) in enumerate(shards, 1):
                self.parts.setdefault(path, {})[shard] = part
                progress(done, total)
            nodes = _nodes(arrays)
            documents = [(self.draft.key(layout.NODE), group_document())]
            documents += [(self.draft.key(path, layout.NODE), doc) for path, doc in nodes.items()]
            document_sizes = list(
                transfer.map(lambda item: self._put(item[0], document_bytes(item[1])), documents)
            )
        manifest = encode_manifest(Manifest(self.version.id, self.parts))
        sizes = {path: sum(part.nbytes for part in parts.values()) for path, parts in self.parts.items()}
        objects_bytes = (
            sum(sizes.values()) + sum(document_sizes) + self._put(self.draft.key("manifest"), manifest)
        )
        return self._commit(
            replace(
                self.draft,
                time=time.time(),
                arrays={path: replace(array.entry, nbytes=sizes[path]) for path, array in arrays.items()},
                nodes=nodes,
                objects_bytes=objects_bytes,
                manifest_sha256=hashlib.sha256(manifest).hexdigest(),
            )
        )

    def _put_shard(self, arrays: Mapping[str, FoldedArray], path: str, shard: int) -> tuple[str, int, Part]:
        return path, shard, arrays[path].put_shard(self.backend, self.draft, shard)

    def _put(self, key: str, data: bytes) -> int:
        self.backend.put(key, data)
        return len(data)

    def _commit(self, fold: Record) -> Record | None:
        data = encode_record(fold)
        self.may_have_landed = True
        try:
            self.backend.create(fold.key(), data)
        except BackendError:
            owner = self._owner()
            if owner is None:
                raise
            if owner != fold.nonce:  # so this one can't appear any more
                self.may_have_landed = False
                self.remove()
                return None
        # The version may have been removed since, and with it whatever of the fold was listed then.
        if _gone(self.backend, self.version):
            self._unfold()
            raise VersionNotFoundError(f"version {fold.id} was removed")
        _remove_others(self.backend, fold)
        return replace(fold, record_bytes=len(data))

    def _owner(self) -> str | None:
        """Nonce of the attempt whose record is there; None if there is none, or the storage does not tell."""
        with suppress(BackendError):
            found = decode_record(self.backend.get(self.draft.key()), self.version.id, layout.FOLDS)
            return None if found is None else found.nonce
        return None

    def _unfold(self) -> None:
        self.backend.delete(self.draft.key())
        self.may_have_landed = False

    def remove(self) -> None:
        """Remove what was put, unless a record of it is there, or may still appear.

        Then it stays until the version goes or somebody folds it again.
        """
        if self.may_have_landed:
            return
        try:
            _remove(self.backend, self.backend.list_keys(_folder(self.draft)))
        except BackendError as error:
            log.warning("leftovers of folding version %s were not removed: %s", self.version.id, error)


def _shards(arrays: Mapping[str, FoldedArray]) -> Iterator[tuple[str, int]]:
    for path, array in arrays.items():
        for shard in range(array.shards):
            yield path, shard


def _nodes(arrays: Mapping[str, FoldedArray]) -> dict[str, Doc]:
    """Zarr metadata by path: groups before what is in them."""
    nodes: dict[str, Doc] = {}
    for path, array in arrays.items():
        for group in layout.parent_groups(path):
            nodes.setdefault(group, group_document())
        nodes[path] = array.document
    return nodes


def _folder(fold: Record) -> str:
    return layout.version_key(fold.id, fold.nonce, prefix=layout.FOLDS)


def _gone(backend: Backend, version: Record) -> bool:
    """Whether a version that was committed has been removed. A damaged or silent storage does not say so."""
    try:
        return Catalog(backend).find_record(version.id) is None
    except (BackendError, CheckpointError):
        return False


def _is_folded(catalog: Catalog, version: Record) -> bool:
    """Whether there is a fold. A damaged or silent storage does not say so."""
    try:
        catalog.look_for_folds()
        return catalog.find_fold(version.id) is not None
    except (BackendError, CheckpointError):
        return False


def _remove_others(backend: Backend, fold: Record) -> None:
    """Remove what other attempts at this fold left: now that it is there, none of them can commit."""
    if not backend.atomic_create:  # one may, after all
        return
    kept = (fold.key(), f"{_folder(fold)}/")
    try:
        there = backend.list_keys(layout.version_key(fold.id, prefix=layout.FOLDS))
        _remove(backend, [item for item in there if not item[0].startswith(kept)])
    except BackendError as error:
        log.warning("leftovers of folding version %s were not removed: %s", fold.id, error)


def _remove(backend: Backend, listed: Iterable[tuple[str, int]]) -> None:
    with Transfer(_DELETERS, 2 * _DELETERS) as transfer:
        for _ in transfer.map(lambda item: backend.delete(item[0]), list(listed)):
            pass
