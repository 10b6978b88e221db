"""The one way to write a version: plan, stage, encode and put, commit.

Nothing of a version is visible before its commit record, which is created last and exclusively. A failed attempt
voids its id, so that it can't appear later, and its objects are never used by another version.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import google_crc32c
import numpy as np

from cnr_backends import Backend, BackendError, ObjectExistsError, ObjectNotFoundError, Transfer, build_shard
from cnr_codecs import RowCodec, array_dtype
from cnr_store import claims
from cnr_store.errors import CheckpointError, SaveError
from cnr_store.format import layout
from cnr_store.format.arrays import (
    Doc,
    dense_document,
    dense_grid,
    document_bytes,
    group_document,
    rows_document,
)
from cnr_store.format.grid import Grid, choose_grid
from cnr_store.format.manifest import Manifest, Part, encode_manifest
from cnr_store.format.record import ArrayEntry, Record, decode_record, encode_record, encode_void
from cnr_store.format.state import dumps

log = logging.getLogger("cnr_store")
Array = np.ndarray[Any, Any]


class RowSource(Protocol):
    """Where the values of the rows to write come from."""

    def values(self, begin: int, end: int) -> Array:
        """(end - begin, columns), C-contiguous: the rows at positions begin ... end - 1 of the write's ids."""


@dataclass(frozen=True)
class RowsWrite:
    """Rows of one array to write.

    Attributes
    ----------
    path, shape, element
        Place in the version; (rows, dim) or (rows,); the payload's element type.
    base
        Version that this one's rows lie over; None for a whole array.
    ids
        (n,) int64 ascending: the rows written; None for all.
    source, codec
        Where their values come from and how they are encoded.
    """

    path: str
    shape: tuple[int, ...]
    element: str
    base: str | None
    ids: Array | None
    source: RowSource
    codec: RowCodec
    aliases: tuple[str, ...] = ()

    @property
    def rows_written(self) -> int:
        return self.shape[0] if self.ids is None else len(self.ids)

    def grid(self) -> Grid:
        columns = (*self.shape, 1)[1]
        bytes_per_row = self.codec.bytes_per_row(columns, self.element)
        return choose_grid(
            self.shape[0], columns, array_dtype(self.element).itemsize, bytes_per_row, self.ids
        )


@dataclass(frozen=True)
class DenseWrite:
    """A dense array to write whole, as numpy values and torch's name of their type where numpy has none."""

    path: str
    values: Array
    torch_dtype: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All that one version is to hold: plain data, made on the training thread."""

    step: int
    previous: str | None
    rows: Sequence[RowsWrite]
    dense: Sequence[DenseWrite]
    state: Any
    policy: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    restores: int = 0
    metadata: Any = None


@dataclass
class _Staged:
    """What has been put so far."""

    arrays: dict[str, ArrayEntry] = field(default_factory=dict)
    nodes: dict[str, Doc] = field(default_factory=dict)
    parts: dict[str, dict[int, Part]] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, path: str, index: int, part: Part) -> None:
        self.parts.setdefault(path, {})[index] = part
        self.nbytes += part.nbytes

    def array_bytes(self, path: str) -> int:
        return sum(part.nbytes for part in self.parts.get(path, {}).values())


class Writer:
    """Writes versions, one after the other, under one claim.

    The claim is made at the first write, so whoever only reads claims nothing. `restart` gives it up: the next
    write claims a new generation, from the version that was loaded.
    """

    def __init__(self, backend: Backend, workers: int) -> None:
        self._backend = backend
        self._workers = workers
        self._claim: claims.Claim | None = None
        self._base: str | None = None

    def restart(self, base: str) -> None:
        """Go on from the version `base`, under a new claim."""
        self._claim, self._base = None, base

    def write(self, plan: Plan, rows_done: Callable[[], None] = lambda: None) -> Record:
        """Write a version and commit it.

        Parameters
        ----------
        rows_done
            Called when every row has been taken from its source, or never will be.

        Raises
        ------
        SaveError
            With the cause; the version does not exist and never will.
        SupersededError
            A newer writer has claimed the store.
        """
        version, nonce = None, secrets.token_hex(16)
        try:
            try:
                if self._claim is None:
                    self._claim = claims.claim(self._backend, self._base)
                version = self._claim.next_version()
                with Transfer(self._workers, 2 * self._workers) as transfer:
                    staged = _stage(self._backend, version, plan, transfer)
            finally:
                rows_done()
            record = _record(self._backend, version, plan, staged, nonce)
            claims.check(self._backend, self._claim)
            return commit(self._backend, record)
        except Exception as error:  # whatever went wrong, the attempt must be voided
            landed = version and _give_up(self._backend, version, str(self._claim and self._claim.id), nonce)
            if landed:
                return landed
            if isinstance(error, CheckpointError):
                raise
            raise SaveError(
                f"step {plan.step} was not saved as version {version or '(none claimed)'} "
                f"of {self._backend.url}: {error}. "
                "The versions before it are untouched and its rows stay marked for the next save"
            ) from error


def _stage(backend: Backend, version: str, plan: Plan, transfer: Transfer) -> _Staged:
    """Put every object of the version but its record."""
    staged = _Staged()
    for path, index, part in transfer.map(lambda task: task(), _tasks(backend, version, plan, staged)):
        staged.add(path, index, part)
    for path, entry in staged.arrays.items():
        staged.arrays[path] = replace(entry, nbytes=staged.array_bytes(path))
    documents = [
        (layout.version_key(version, path, layout.NODE), document_bytes(doc))
        for path, doc in staged.nodes.items()
    ]
    for nbytes in transfer.map(lambda item: _put(backend, *item), documents):
        staged.nbytes += nbytes
    return staged


_Task = Callable[[], tuple[str, int, Part]]


def _tasks(backend: Backend, version: str, plan: Plan, staged: _Staged) -> Iterator[_Task]:
    """One task an object, made as the pool asks for them; notes each array in `staged` on the way."""
    for rows in plan.rows:
        kind = "whole" if rows.base is None else "delta"
        staged.arrays[rows.path] = ArrayEntry(
            kind,
            rows.shape,
            rows.element,
            rows.base,
            rows.rows_written,
            0,
            rows.codec.get_config(),
            rows.aliases,
        )
        if rows.rows_written:
            grid = rows.grid()
            _add_node(
                staged, rows.path, rows_document(rows.shape, rows.element, grid, rows.codec.zarr_codec())
            )
            yield from _shard_tasks(backend, version, rows, grid)
    for dense in plan.dense:
        grid_of = dense_grid(dense.values.shape, dense.values.dtype)
        name = layout.decode_name(dense.path.rsplit("/", 1)[-1])
        _add_node(staged, dense.path, dense_document(grid_of, name, dense.torch_dtype))
        staged.arrays[dense.path] = ArrayEntry(
            "dense", dense.values.shape, grid_of.dtype.name, aliases=dense.aliases
        )
        for index in range(grid_of.chunks):
            yield _bind(_put_dense, backend, version, dense, index)


def _bind(function: Callable[..., tuple[str, int, Part]], *arguments: Any) -> _Task:
    return lambda: function(*arguments)


def _add_node(staged: _Staged, path: str, doc: Doc) -> None:
    for group in layout.parent_groups(path):
        staged.nodes.setdefault(group, group_document())
    staged.nodes[path] = doc


def _shard_tasks(backend: Backend, version: str, rows: RowsWrite, grid: Grid) -> Iterator[_Task]:
    for shard in range(grid.shard_grid[0]):
        first_row = shard * grid.shard_rows
        begin, end = _positions(rows, first_row, first_row + grid.shard_rows)
        if begin < end:
            yield _bind(_put_shard, backend, version, rows, grid, shard)


def _positions(rows: RowsWrite, first_row: int, last_row: int) -> tuple[int, int]:
    """Positions in the write's ids of the rows first_row ... last_row - 1."""
    if rows.ids is None:
        return min(first_row, rows.shape[0]), min(last_row, rows.shape[0])
    begin, end = np.searchsorted(rows.ids, (first_row, last_row))
    return int(begin), int(end)


def _put_shard(
    backend: Backend, version: str, rows: RowsWrite, grid: Grid, shard: int
) -> tuple[str, int, Part]:
    chunks: list[bytes | None] = []
    for slot in range(grid.chunks_per_shard):
        first_row = shard * grid.shard_rows + slot * grid.chunk_rows
        begin, end = _positions(rows, first_row, first_row + grid.chunk_rows)
        if begin == end:
            chunks.append(None)
            continue
        offsets = None if rows.ids is None else rows.ids[begin:end] - first_row
        chunks.append(
            rows.codec.encode_rows(
                rows.source.values(begin, end),
                offsets,
                grid.chunk_rows,
                element=rows.element,
                seal=layout.seal(version, rows.path, first_row, 0),
            )
        )
    pieces = build_shard(chunks)
    place = f"c/{shard}/0" if len(rows.shape) == 2 else f"c/{shard}"
    backend.put(layout.version_key(version, rows.path, place), pieces)
    nbytes = sum(len(piece) for piece in pieces)
    return rows.path, shard, Part(nbytes, int.from_bytes(bytes(pieces[-1])[-4:], "little"))


def _put_dense(backend: Backend, version: str, dense: DenseWrite, index: int) -> tuple[str, int, Part]:
    grid = dense_grid(dense.values.shape, dense.values.dtype)
    values = dense.values
    if grid.shape:
        first = index * grid.chunk[0]
        values = values[first : first + grid.chunk[0]]
        if len(values) < grid.chunk[0]:  # Zarr stores edge chunks whole
            values = np.concatenate(
                [values, np.zeros((grid.chunk[0] - len(values), *grid.chunk[1:]), grid.dtype)]
            )
    data = np.ascontiguousarray(values).tobytes()
    crc = google_crc32c.value(data)
    nbytes = _put(
        backend, layout.version_key(version, dense.path, grid.key(index)), data + crc.to_bytes(4, "little")
    )
    return dense.path, index, Part(nbytes, crc)


def _put(backend: Backend, key: str, data: bytes) -> int:
    backend.put(key, data)
    return len(data)


def _record(backend: Backend, version: str, plan: Plan, staged: _Staged, nonce: str) -> Record:
    """Put manifest and state, and make the record that names them."""
    manifest = encode_manifest(Manifest(version, staged.parts))
    state = dumps(plan.state)
    for name, data in (("manifest", manifest), ("state/main.json", state)):
        staged.nbytes += _put(backend, layout.version_key(version, name), data)
    return Record(
        id=version,
        nonce=nonce,
        step=plan.step,
        time=time.time(),
        previous=plan.previous,
        needs=plan.needs,
        arrays=staged.arrays,
        nodes=staged.nodes,
        policy=plan.policy,
        restores=plan.restores,
        objects_bytes=staged.nbytes,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        state_sha256=hashlib.sha256(state).hexdigest(),
        metadata=plan.metadata,
    )


def commit(backend: Backend, record: Record) -> Record:
    """Create the record's object, exclusively: from here on the version exists."""
    data = encode_record(record)
    backend.create(layout.record_key(record.id), data)
    return replace(record, record_bytes=len(data))


def _give_up(backend: Backend, version: str, by: str, nonce: str) -> Record | None:
    """Burn an attempt's id so that nothing of it can appear later.

    Returns the record if the commit landed after all, as it may when only the response was lost.
    """
    key = layout.record_key(version)
    try:
        try:
            backend.create(key, encode_void(by, secrets.token_hex(16)))
        except ObjectExistsError:
            found = decode_record(backend.get(key), version)
            return found if found is not None and found.nonce == nonce else None
    except (BackendError, CheckpointError, ObjectNotFoundError) as error:
        # The storage does not answer. The id is not used again, and if a commit was sent it was complete.
        log.warning("version %s could not be voided: %s", version, error)
    return None
