"""Encodes what a plan holds and puts it: every object of a version but its manifest, state and record.

Chunks are encoded on the cores and objects are put by other threads, so encoding does not wait for storage, nor one
object for another. Memory is bounded by the chunks being encoded, the shard being assembled and the bytes being
put.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import google_crc32c
import numpy as np

from cnr_backends import Backend, Transfer
from cnr_codecs import array_dtype, zarr_codecs
from cnr_store.errors import SaveError
from cnr_store.format import layout
from cnr_store.format.arrays import (
    Doc,
    add_node,
    dense_grid,
    document_bytes,
    rows_document,
)
from cnr_store.format.grid import Grid
from cnr_store.format.stored_paths import moved_nodes
from cnr_store.ranks.fragments import BytesLike
from cnr_store.writing.exchange import Exchange, positions_of
from cnr_store.writing.plan import DensePiece, DenseWrite, MovedRows, Plan, RowsWrite
from cnr_store.writing.staged import Object, Put, Puts, Staged
from cnr_store.writing.steps import find_steps
from cnr_store.writing.team import Team

PUTS_IN_FLIGHT = 16
_PUTS_WAITING = 4 * PUTS_IN_FLIGHT
"""Puts that have begun and wait for one before them, or for a thread: else one slow put would leave threads idle."""
PUT_BYTES_IN_FLIGHT = 128 << 20
_ENCODED_TOGETHER_BYTES = 4 << 20
"""Of the rows that one task encodes: enough to make the task worth its thread, little enough to share a shard out."""


@dataclass(frozen=True)
class _Home:
    """Where a version's arrays and groups lie."""

    version: str
    moved: Mapping[str, str]  # paths of arrays and groups by their plain ones, where the two differ

    def key(self, path: str, *parts: str) -> str:
        return layout.version_key(self.version, self.moved.get(path, path), *parts)

    def seal(self, path: str, first_row: int) -> int:
        return layout.seal(self.version, self.moved.get(path, path), first_row, 0)


def stage(
    backend: Backend,
    version: str,
    plan: Plan,
    transfer: Transfer,
    peers: Team | None = None,
    rows_done: Callable[[], None] = lambda: None,
) -> Staged:
    """Put every object of a version but its manifest, state and record; of many ranks, those that this one puts.

    `transfer`: its threads encode; one worker alone is the calling thread. Puts have threads of their own.
    `peers`: the ranks that share the plan's arrays; None where this process has them all.
    `rows_done`: called when no row is read from the model any more, while objects are still being put.
    """
    dense, rows = joined(plan.dense, peers), find_steps(plan.rows, transfer, peers)
    plan = replace(plan, dense=dense, rows=rows)
    staged, home = Staged(rows), _Home(version, moved_nodes(plan.place()))
    held = [(each, each.grid) for each in plan.rows if each.held is not None and each.rows_written]
    shared = None if peers is None else Exchange(peers, held)

    # Training stands still for live rows, so nothing may keep their encoders waiting.
    is_alone = transfer.workers == 1 and not any(each.is_live for each in rows)
    with (
        Transfer(PUTS_IN_FLIGHT, _PUTS_WAITING, PUT_BYTES_IN_FLIGHT) as putting,
        closing(Puts(backend, staged, is_alone)) as puts,
        closing(_objects(home, plan, transfer, staged, shared, rows_done)) as objects,
        closing(putting.map(Put.finish, puts.begin(_telling(objects, peers)), Put.nbytes)) as done,
    ):
        for made, part in done:
            if peers is not None:
                peers.beat()
            if part is None:
                continue
            staged.nbytes += part.nbytes
            if made.path is not None:
                staged.parts.setdefault(made.path, {})[made.index] = part
    for path, entry in staged.arrays.items():
        staged.arrays[path] = replace(entry, stored=home.moved.get(path))
    for write in rows:
        staged.count(
            write.path, write.counted if write.sample is None else [*write.counted, write.sample.counts]
        )
    return staged


def _telling(objects: Iterable[Object], peers: Team | None) -> Iterator[Object]:
    """The objects; the other ranks hear of each, and this rank of their failures."""
    for each in objects:
        if peers is not None:
            peers.beat()
        yield each


@dataclass(frozen=True)
class _Chunks:
    """Consecutive chunks of a shard, to be encoded by one call of the codec."""

    rows: RowsWrite
    grid: Grid
    shard: int  # shard, first_slot: where they lie
    first_slot: int
    # Positions in the write's ids where each chunk's rows begin, and where the last one's end
    edges: list[int]

    def encode(self, home: _Home) -> list[bytes | None]:
        rows, grid, (begin, *_, end) = self.rows, self.grid, self.edges
        slots = [slot for slot, (first, last) in enumerate(pairwise(self.edges)) if first < last]
        first_row = self.shard * grid.shard_rows + self.first_slot * grid.chunk_rows
        seals = [home.seal(rows.path, first_row + slot * grid.chunk_rows) for slot in slots]
        # Chunks begin at multiples of their rows.
        offsets = None if rows.ids is None else rows.ids[begin:end] % grid.chunk_rows
        edges = [*(self.edges[slot] - begin for slot in slots), end - begin]
        encoded = rows.encode(begin, end, offsets, edges, seals)
        found = dict(zip(slots, encoded, strict=True))
        return [found.get(slot) for slot in range(len(self.edges) - 1)]


def _shard_object(
    home: _Home, path: str, shape: tuple[int, ...], shard: int, chunks: Sequence[BytesLike | None] | None
) -> Object:
    """A shard's object, from the chunks of all its slots; None for its place alone."""
    return Object(home.key(path, f"c/{shard}/0" if len(shape) == 2 else f"c/{shard}"), chunks, path, shard)


@dataclass(frozen=True)
class _MovedShard:
    """A shard of rows that are moved as they are stored."""

    rows: MovedRows
    shard: int

    def encode(self, home: _Home) -> Object:
        path = self.rows.path
        chunks = self.rows.chunks(self.shard, lambda first_row: home.seal(path, first_row))
        return _shard_object(home, path, self.rows.entry.shape, self.shard, chunks)


@dataclass(frozen=True)
class _DenseChunk:
    dense: DenseWrite
    index: int

    def encode(self, home: _Home) -> Object:
        values = self.dense.values
        grid = dense_grid(values.shape, values.dtype)
        if grid.shape:
            first = self.index * grid.chunk[0]
            values = values[first : first + grid.chunk[0]]
            if len(values) < grid.chunk[0]:  # Zarr stores edge chunks whole
                padding = np.zeros((grid.chunk[0] - len(values), *grid.chunk[1:]), grid.dtype)
                values = np.concatenate([values, padding])
        data = np.ascontiguousarray(values).tobytes()
        data += google_crc32c.value(data).to_bytes(4, "little")
        return Object(home.key(self.dense.path, grid.key(self.index)), data, self.dense.path, self.index)


@dataclass(frozen=True)
class _DenseDocument:
    """The Zarr document of a dense array, for readers of that array alone. All others stand in the record only."""

    path: str
    doc: Doc

    def encode(self, home: _Home) -> Object:
        return Object(home.key(self.path, layout.NODE), document_bytes(self.doc))


_Task = _Chunks | _MovedShard | _DenseChunk | _DenseDocument
_Encoded = tuple[_Task, Object | list[bytes | None], float]


def _objects(
    home: _Home,
    plan: Plan,
    transfer: Transfer,
    staged: Staged,
    shared: Exchange | None,
    rows_done: Callable[[], None],
) -> Generator[Object, None, None]:
    """Every object in turn, first those of rows that training waits for."""
    live = [rows for rows in plan.rows if rows.is_live]
    exchanged = _exchanged(home, shared)
    if live:
        threads = max(plan.live_threads, transfer.workers)
        # Training stands still: its threads encode, too.
        more = Transfer(threads, 2 * threads) if threads > transfer.workers else nullcontext(transfer)
        with more as crew:
            yield from _encoded(home, crew, _row_tasks(live, staged, shared), staged)
        if any(rows.held is not None for rows in live):
            yield from exchanged
    rows_done()
    yield from _encoded(home, transfer, _tasks(plan, staged, shared), staged)
    yield from exchanged


def _exchanged(home: _Home, shared: Exchange | None) -> Iterator[Object]:
    if shared is not None:
        for rows, shard, chunks in shared.run(home.seal):
            yield _shard_object(home, rows.path, rows.shape, shard, chunks)


def _encoded(home: _Home, transfer: Transfer, tasks: Iterable[_Task], staged: Staged) -> Iterator[Object]:
    """The objects of tasks. Notes each array in `staged` when its first object is made."""

    def encode(task: _Task) -> _Encoded:
        began = time.perf_counter()
        return task, task.encode(home), time.perf_counter() - began

    chunks: list[bytes | None] = []
    with closing(_mapped(transfer, encode, tasks)) as encoded:
        for task, made, seconds in encoded:
            staged.encoding_seconds += seconds
            if isinstance(made, Object):
                yield made
            elif isinstance(task, _Chunks):
                of_shard = home, task.rows.path, task.rows.shape, task.shard
                if not chunks and len(made) < task.grid.chunks_per_shard:
                    yield _shard_object(*of_shard, None)
                chunks += made
                if len(chunks) == task.grid.chunks_per_shard:
                    yield _shard_object(*of_shard, chunks)
                    chunks = []


def _mapped(
    transfer: Transfer, encode: Callable[[_Task], _Encoded], tasks: Iterable[_Task]
) -> Generator[_Encoded, None, None]:
    """What each task encodes to, in order.

    One worker alone is this thread: another one would wake it for each task, and each time both would wait for the
    interpreter's lock, and training for them.
    """
    if transfer.workers == 1:
        return (encode(task) for task in tasks)
    return transfer.map(encode, tasks)


def _row_tasks(writes: Iterable[RowsWrite], staged: Staged, shared: Exchange | None) -> Iterator[_Task]:
    for rows in writes:
        if shared is None or shared.leads:
            _note(rows, staged)
        if rows.rows_written:
            grid = rows.grid
            every = range(grid.shard_grid[0])
            own = every if shared is None or rows.held is None else shared.local_shards(rows.path)
            yield from _shards(rows, grid, own)


def _tasks(plan: Plan, staged: Staged, shared: Exchange | None) -> Iterator[_Task]:
    """Those of all but live rows."""
    yield from _row_tasks((rows for rows in plan.rows if not rows.is_live), staged, shared)
    for moved in plan.moved:
        staged.arrays[moved.path] = moved.entry
        add_node(staged.nodes, moved.path, moved.document)
        yield from (_MovedShard(moved, shard) for shard in range(moved.grid.shard_grid[0]))
    for dense in plan.dense:
        doc = staged.note_dense(dense)
        if dense.is_own:
            staged.own.append(
                [dense.path, list(dense.values.shape), dense.values.dtype.str, dense.torch_dtype]
            )
        if not dense.is_here:
            continue
        # It goes first, so that its small put runs beside large ones rather than after them.
        yield _DenseDocument(dense.path, doc)
        for index in range(dense_grid(dense.values.shape, dense.values.dtype).chunks):
            yield _DenseChunk(dense, index)


def _note(rows: RowsWrite, staged: Staged) -> None:
    """Note an array for the record. Only the rank that commits does: there may be thousands."""
    staged.arrays[rows.path] = rows.entry
    if rows.rows_written:
        doc = rows_document(rows.shape, rows.element, rows.grid, zarr_codecs(rows.codec)[1:])
        add_node(staged.nodes, rows.path, doc)


def _shards(rows: RowsWrite, grid: Grid, shards: Iterable[int]) -> Iterator[_Chunks]:
    """The chunks of these shards, if they have rows, those of a shard in order and together."""
    row_bytes = grid.columns * array_dtype(rows.element).itemsize
    most_rows = max(1, _ENCODED_TOGETHER_BYTES // row_bytes)
    for shard in shards:
        first_rows = shard * grid.shard_rows + np.arange(grid.chunks_per_shard + 1) * grid.chunk_rows
        # Positions in the write's ids where the rows of each chunk begin.
        edges = positions_of(rows, first_rows).tolist()
        if edges[0] == edges[-1]:
            continue
        first, slots = 0, grid.chunks_per_shard
        while first < slots:
            # As many slots as hold `most_rows`, and at least one.
            end = max(first + 1, bisect_right(edges, edges[first] + most_rows) - 1)
            yield _Chunks(rows, grid, shard, first, edges[first : end + 1])
            first = end


_HEADER_BYTES = 8


def joined(dense: Sequence[DenseWrite], peers: Team | None) -> list[DenseWrite]:
    """The dense arrays of a plan, those that this rank puts with their values, from the pieces that ranks hold.

    `dense`: the same arrays in pieces on all ranks, in the same order. The others may differ.
    `peers`: the ranks that share them; None where this process has them all.
    """
    shared = [write for write in dense if write.pieces is not None]  # which ranks know by their numbers
    if not shared:
        return list(dense)
    me = 0 if peers is None else peers.rank
    pieces = {number: list(write.pieces or ()) for number, write in enumerate(shared) if write.owner == me}
    if peers is not None and peers.world > 1:
        owners = {write.owner for write in shared}
        messages = {owner: _packed(shared, owner) for owner in sorted(owners - {me})}
        others = [rank for rank in range(peers.world) if rank != me] if me in owners else []
        for data in peers.exchange(messages, others).values():
            for number, piece in _unpacked(data, shared):
                pieces[number].append(piece)
    whole = {shared[number].path: _whole(shared[number], pieces[number]) for number in pieces}
    return [whole.get(write.path, write) for write in dense]


def _packed(shared: Sequence[DenseWrite], owner: int) -> list[Any]:
    """What this rank has of the arrays of an owner, as a message."""
    sent = [
        (number, piece)
        for number, write in enumerate(shared)
        if write.owner == owner
        for piece in write.pieces or ()
    ]
    listed = [
        [number, piece.first_row, piece.first_column, list(piece.values.shape)] for number, piece in sent
    ]
    header = json.dumps(listed).encode()
    values = [np.ascontiguousarray(piece.values).reshape(-1).view(np.uint8) for _, piece in sent]
    return [len(header).to_bytes(_HEADER_BYTES, "little"), header, *values]


def _unpacked(data: Any, shared: Sequence[DenseWrite]) -> Iterator[tuple[int, DensePiece]]:
    """The pieces of a message, each with the number of its array."""
    end = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
    for number, row, column, shape in json.loads(bytes(data[_HEADER_BYTES:end])):
        dtype = shared[number].values.dtype
        start, end = end, end + math.prod(shape) * dtype.itemsize
        yield number, DensePiece(row, column, np.frombuffer(data[start:end], dtype).reshape(shape))


def _whole(write: DenseWrite, pieces: Sequence[DensePiece]) -> DenseWrite:
    values = np.empty(write.values.shape, write.values.dtype)
    boxes: dict[tuple[Any, ...], int] = {}
    for piece in pieces:  # replicas of a box are alike
        boxes[piece.first_row, piece.first_column, piece.values.shape] = piece.values.size
        target = values[piece.first_row :][: len(piece.values)] if values.ndim else values
        if values.ndim > 1:
            target = target[:, piece.first_column :][:, : piece.values.shape[1]]
        target[...] = piece.values
    if sum(boxes.values()) != values.size:
        raise SaveError(
            f"{write.path}: the ranks that save have {sum(boxes.values()):,} of its {values.size:,} elements; give "
            "Checkpointer the group of all ranks that train the model"
        )
    return replace(write, values=values, pieces=None)
