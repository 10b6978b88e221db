"""Encodes what a plan holds and puts it: every object of a version but its manifest, state and record.

Chunks are encoded on the cores and objects are put by other threads, so encoding does not wait for storage, nor one
object for another. Memory is bounded by the chunks being encoded, the shard being assembled and the bytes being
put.
"""

from __future__ import annotations

import base64
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import google_crc32c
import numpy as np

from cnr_backends import Backend, Transfer, build_shard
from cnr_codecs import array_dtype, zarr_codecs
from cnr_codecs.lattice.segments import RowCounts
from cnr_store.errors import SaveError
from cnr_store.format import layout
from cnr_store.format.arrays import Doc, add_node, dense_document, dense_grid, document_bytes, rows_document
from cnr_store.format.layout import moved_nodes
from cnr_store.format.manifest import Part
from cnr_store.format.record import ArrayEntry
from cnr_store.ranks.fragments import BytesLike
from cnr_store.ranks.protocol import Team
from cnr_store.writing.exchange import Exchange, joined, positions_of
from cnr_store.writing.plan import DenseWrite, MovedRows, Plan, RowsWrite, placeholder
from cnr_store.writing.steps import find_steps

PUTS_IN_FLIGHT = 16
_PUTS_WAITING = 4 * PUTS_IN_FLIGHT
"""Puts that have begun and wait for one before them, or for a thread: else one slow put would leave threads idle."""
PUT_BYTES_IN_FLIGHT = 128 << 20
_ENCODED_TOGETHER_BYTES = 4 << 20
"""Of the rows that one task encodes: enough to make the task worth its thread, little enough to share a shard out."""
_NUMBER = np.dtype("<u4")
_MOST_BEGINNING = 0.3
"""Of the time that encoding takes: how long the thread that encodes may write, at most."""


@dataclass
class Staged:
    """What has been put so far, and the seconds that all threads have spent on encoding it."""

    # The arrays of rows of the plan, those on a lattice with the step that was found for them
    rows: Sequence[RowsWrite] = ()
    arrays: dict[str, ArrayEntry] = field(default_factory=dict)
    nodes: dict[str, Doc] = field(default_factory=dict)
    parts: dict[str, dict[int, Part]] = field(default_factory=dict)
    nbytes: int = 0
    encoding_seconds: float = 0.0
    # Of many ranks: the dense arrays that only this one knows of
    own: list[list[Any]] = field(default_factory=list)
    state_sha256: dict[int, str] = field(default_factory=dict)  # by rank, the digest of its part of the state
    # By rank, the bytes that it put, and the seconds that it took for them
    ranks: dict[int, tuple[int, float]] = field(default_factory=dict)
    # By path of an array on a grid, how many rows are stored otherwise than on it, where any are
    counts: dict[str, RowCounts] = field(default_factory=dict)

    def to_vote(self) -> dict[str, Any]:
        """What this rank put, for the rank that commits."""
        parts = {
            path: _packed([(index, part.nbytes, part.tail) for index, part in sorted(parts.items())])
            for path, parts in self.parts.items()
        }
        return {
            "parts": parts,
            "nbytes": self.nbytes,
            "own": [[*own, self.arrays[own[0]].stored] for own in self.own],
            "state": [*self.state_sha256.items()],
            "ranks": [[rank, *wrote] for rank, wrote in self.ranks.items()],
            "counts": self.counts,
        }

    def add(self, vote: Mapping[str, Any]) -> None:
        """Add what another rank put. `SaveError` if both put the same object."""
        for path, parts in vote["parts"].items():
            own = self.parts.setdefault(path, {})
            for index, nbytes, tail in _unpacked(parts):
                if index in own:
                    raise SaveError(f"{path}: two ranks have written object {index}")
                own[index] = Part(nbytes, tail)
        self.nbytes += vote["nbytes"]
        self.state_sha256.update(vote["state"])
        self.ranks.update({rank: (nbytes, seconds) for rank, nbytes, seconds in vote["ranks"]})
        for path, counts in vote["counts"].items():
            self.count(path, [counts])
        for path, shape, dtype, torch_dtype, stored in vote["own"]:
            self.note_dense(DenseWrite(path, placeholder(shape, dtype), torch_dtype))
            self.arrays[path] = replace(self.arrays[path], stored=stored)

    def count(self, path: str, counted: Iterable[Sequence[int]]) -> None:
        """Add how rows of an array are stored."""
        total = RowCounts(*map(sum, zip(self.counts.get(path, RowCounts()), *counted, strict=True)))
        if any(total):
            self.counts[path] = total

    def note_dense(self, dense: DenseWrite) -> Doc:
        """Note a dense array; its document."""
        grid = dense_grid(dense.values.shape, dense.values.dtype)
        doc = dense_document(grid, layout.decode_name(dense.path.rsplit("/", 1)[-1]), dense.torch_dtype)
        add_node(self.nodes, dense.path, doc)
        self.arrays[dense.path] = ArrayEntry(
            "dense", dense.values.shape, grid.dtype.name, aliases=dense.aliases
        )
        return doc


@dataclass(eq=False)
class Object:
    """An object to put. `path` is None for metadata. Its put may be begun by one thread and be finished by another."""

    key: str
    # A shard's chunks, or bytes that are the object. None: only its place is made ready, as it takes time to encode.
    data: bytes | Sequence[BytesLike | None] | None
    path: str | None = None
    index: int = 0
    _begun: Generator[None, None, None] | None = None

    def nbytes(self) -> int:
        """Bytes of memory."""
        return (
            len(self.data) if isinstance(self.data, bytes) else sum(map(len, filter(None, self.data or ())))
        )

    def begin(self, backend: Backend) -> None:
        """Begin the put."""
        self._begun = backend.begin_put(self.key, self._pieces)

    def finish(self, backend: Backend) -> Part | None:
        """Put what is not put yet. Returns what the manifest says of it."""
        if self.data is None:
            backend.prepare(self.key)
            return None
        if self._begun is None:
            backend.put(self.key, self._pieces)
        else:
            deque(self._begun, maxlen=0)
        return Part(sum(map(len, self._pieces)), int.from_bytes(bytes(self._pieces[-1])[-4:], "little"))

    def close(self) -> None:
        """Leave nothing of a put that was begun. No thread may be at it."""
        if self._begun is not None:
            self._begun.close()

    @cached_property
    def _pieces(self) -> Sequence[BytesLike]:
        return [self.data] if isinstance(self.data, bytes) else build_shard(self.data or ())


class Beginnings:
    """Puts that the thread which encodes begins, as it is alone and training goes on beside it.

    One more thread that copies bytes to the page cache would be a third one, and training would wait for it on two
    cores. It does so only while that takes little beside encoding: where writing waits for the storage, a save must not
    take as long as both.
    """

    def __init__(self, backend: Backend, staged: Staged) -> None:
        self._backend, self._staged = backend, staged
        self._begun = WeakSet[Object]()
        self._seconds = 0.0

    def begin(self, objects: Iterable[Object]) -> Generator[Object, None, None]:
        """The objects, to be finished by other threads."""
        for made in objects:
            if made.data is not None and self._seconds <= _MOST_BEGINNING * self._staged.encoding_seconds:
                began = time.perf_counter()
                made.begin(self._backend)
                self._begun.add(made)
                self._seconds += time.perf_counter() - began
            yield made

    def close(self) -> None:
        """Leave nothing of those that were begun and not finished."""
        for made in self._begun:
            made.close()


def _packed(parts: list[tuple[int, int, int]]) -> str:
    """Objects as text of 16 bytes each: rank 0 gets those of all ranks."""
    return base64.b64encode(np.array(parts, _NUMBER).tobytes()).decode()


def _unpacked(text: str) -> list[list[int]]:
    found: list[list[int]] = np.frombuffer(base64.b64decode(text), _NUMBER).reshape(-1, 3).tolist()
    return found


def stage(
    backend: Backend,
    version: str,
    plan: Plan,
    transfer: Transfer,
    team: Team,
    rows_done: Callable[[], None] = lambda: None,
) -> Staged:
    """Put every object of a version but its manifest, state and record; of many ranks, those that this one puts.

    `transfer`: its threads encode; one worker alone is the calling thread. Puts have threads of their own.
    `team`: the ranks that share the plan's arrays.
    `rows_done`: called when no row is read from the model any more, while objects are still being put.
    """
    dense, rows = joined(plan.dense, team), find_steps(plan.rows, transfer, team)
    staged = Staged(rows)
    work = _Stage(replace(plan, dense=dense, rows=rows), version, transfer, team, staged)
    # Training stands still for live rows, so nothing may keep their encoders waiting.
    is_alone = transfer.workers == 1 and not any(each.is_live for each in rows)
    with (
        Transfer(PUTS_IN_FLIGHT, _PUTS_WAITING, PUT_BYTES_IN_FLIGHT) as putting,
        closing(Beginnings(backend, staged)) as beginnings,
        closing(work.objects(rows_done)) as objects,
        closing(
            putting.map(
                lambda made: (made.path, made.index, made.finish(backend)),
                beginnings.begin(objects) if is_alone else objects,
                Object.nbytes,
            )
        ) as done,
    ):
        for path, index, part in done:
            team.beat("put")
            if part is None:
                continue
            staged.nbytes += part.nbytes
            if path is not None:
                staged.parts.setdefault(path, {})[index] = part
    for path, entry in staged.arrays.items():
        staged.arrays[path] = replace(entry, stored=work.moved.get(path))
    for write in rows:
        staged.count(
            write.path, write.counted if write.sample is None else [*write.counted, write.sample.counts]
        )
    return staged


@dataclass(frozen=True)
class _Chunks:
    """Consecutive chunks of a shard, to be encoded by one call of the codec."""

    rows: RowsWrite
    shard: int  # shard, first_slot: where they lie
    first_slot: int
    # Positions in the write's ids where each chunk's rows begin, and where the last one's end
    edges: list[int]

    def encode(self, seal: Callable[[str, int], int]) -> list[bytes | None]:
        rows, grid, (begin, *_, end) = self.rows, self.rows.grid, self.edges
        slots = [slot for slot, (first, last) in enumerate(pairwise(self.edges)) if first < last]
        first_row = self.shard * grid.shard_rows + self.first_slot * grid.chunk_rows
        seals = [seal(rows.path, first_row + slot * grid.chunk_rows) for slot in slots]
        # Chunks begin at multiples of their rows.
        offsets = None if rows.ids is None else rows.ids[begin:end] % grid.chunk_rows
        edges = [*(self.edges[slot] - begin for slot in slots), end - begin]
        encoded = rows.encode(begin, end, offsets, edges, seals)
        found = dict(zip(slots, encoded, strict=True))
        return [found.get(slot) for slot in range(len(self.edges) - 1)]


_Task = _Chunks | Callable[[], Object]
_Encoded = tuple[_Task, Object | list[bytes | None], float]


@dataclass
class _Stage:
    """Makes the objects of one version; notes each array in `staged` when its first object is made."""

    plan: Plan
    version: str
    transfer: Transfer
    team: Team
    staged: Staged

    def __post_init__(self) -> None:
        self.moved = moved_nodes(
            self.plan.place()
        )  # paths of arrays and groups by their plain ones, if they differ
        held = [(each, each.grid) for each in self.plan.rows if each.held is not None and each.rows_written]
        self._exchange = Exchange(self.team, held, self._seal)

    def _key(self, path: str, *parts: str) -> str:
        return layout.version_key(self.version, self.moved.get(path, path), *parts)

    def _seal(self, path: str, first_row: int) -> int:
        return layout.seal(self.version, self.moved.get(path, path), first_row, 0)

    def objects(self, rows_done: Callable[[], None]) -> Generator[Object, None, None]:
        """Every object in turn, first those of rows that training waits for."""
        live = [rows for rows in self.plan.rows if rows.is_live]
        exchanged = self._exchanged()
        if live:
            workers = self.transfer.workers
            threads = max(self.plan.live_threads, workers)
            # Training stands still: its threads encode, too.
            with Transfer(threads, 2 * threads) if threads > workers else nullcontext(self.transfer) as crew:
                yield from self._encoded(crew, self._row_tasks(live))
            if any(rows.held is not None for rows in live):
                yield from exchanged
        rows_done()
        yield from self._encoded(self.transfer, self._tasks())
        yield from exchanged

    def _exchanged(self) -> Iterator[Object]:
        for rows, shard, chunks in self._exchange.run():
            yield self._shard(rows.path, rows.shape, shard, chunks)

    def _encoded(self, transfer: Transfer, tasks: Iterable[_Task]) -> Iterator[Object]:
        """The objects of tasks, in order.

        One worker alone is this thread: another one would wake it for each task, and each time both would wait for the
        interpreter's lock, and training for them.
        """

        def encode(task: _Task) -> _Encoded:
            began = time.perf_counter()
            made = task.encode(self._seal) if isinstance(task, _Chunks) else task()
            return task, made, time.perf_counter() - began

        is_alone, chunks = transfer.workers == 1, list[bytes | None]()
        with closing(
            (encode(task) for task in tasks) if is_alone else transfer.map(encode, tasks)
        ) as encoded:
            for task, made, seconds in encoded:
                self.staged.encoding_seconds += seconds
                self.team.beat("put")
                if isinstance(made, Object):
                    yield made
                elif isinstance(task, _Chunks):
                    rows, slots = task.rows, task.rows.grid.chunks_per_shard
                    if not chunks and len(made) < slots:  # its place alone
                        yield self._shard(rows.path, rows.shape, task.shard, None)
                    chunks += made
                    if len(chunks) == slots:
                        yield self._shard(rows.path, rows.shape, task.shard, chunks)
                        chunks = []

    def _row_tasks(self, writes: Iterable[RowsWrite]) -> Iterator[_Task]:
        for rows in writes:
            if self.team.rank == 0:  # which commits: there may be thousands of arrays
                self.staged.arrays[rows.path] = rows.entry
                if rows.rows_written:
                    doc = rows_document(rows.shape, rows.element, rows.grid, zarr_codecs(rows.codec)[1:])
                    add_node(self.staged.nodes, rows.path, doc)
            if rows.rows_written:
                every = range(rows.grid.shard_grid[0])
                own = every if rows.held is None else self._exchange.local_shards(rows.path)
                yield from _shards(rows, own)

    def _tasks(self) -> Iterator[_Task]:
        """Those of all but live rows."""
        staged = self.staged
        yield from self._row_tasks(rows for rows in self.plan.rows if not rows.is_live)
        for moved in self.plan.moved:
            staged.arrays[moved.path] = moved.entry
            add_node(staged.nodes, moved.path, moved.document)
            yield from (partial(self._moved, moved, shard) for shard in range(moved.grid.shard_grid[0]))
        for dense in self.plan.dense:
            doc = staged.note_dense(dense)
            if dense.is_own:
                staged.own.append(
                    [dense.path, list(dense.values.shape), dense.values.dtype.str, dense.torch_dtype]
                )
            if not dense.is_here:
                continue
            # For readers of that array alone; documents of others stand in the record only. It goes first, so that its
            # small put runs beside large ones rather than after them.
            yield partial(Object, self._key(dense.path, layout.NODE), document_bytes(doc))
            for index in range(dense_grid(dense.values.shape, dense.values.dtype).chunks):
                yield partial(self._dense, dense, index)

    def _shard(
        self, path: str, shape: tuple[int, ...], shard: int, chunks: Sequence[BytesLike | None] | None
    ) -> Object:
        """A shard's object, from the chunks of all its slots; None for its place alone."""
        return Object(
            self._key(path, f"c/{shard}/0" if len(shape) == 2 else f"c/{shard}"), chunks, path, shard
        )

    def _moved(self, rows: MovedRows, shard: int) -> Object:
        chunks = rows.chunks(shard, lambda first_row: self._seal(rows.path, first_row))
        return self._shard(rows.path, rows.entry.shape, shard, chunks)

    def _dense(self, dense: DenseWrite, index: int) -> Object:
        values = dense.values
        grid = dense_grid(values.shape, values.dtype)
        if grid.shape:
            first = index * grid.chunk[0]
            values = values[first : first + grid.chunk[0]]
            if len(values) < grid.chunk[0]:  # Zarr stores edge chunks whole
                padding = np.zeros((grid.chunk[0] - len(values), *grid.chunk[1:]), grid.dtype)
                values = np.concatenate([values, padding])
        data = np.ascontiguousarray(values).tobytes()
        data += google_crc32c.value(data).to_bytes(4, "little")
        return Object(self._key(dense.path, grid.key(index)), data, dense.path, index)


def _shards(rows: RowsWrite, shards: Iterable[int]) -> Iterator[_Chunks]:
    """The chunks of these shards, if they have rows, those of a shard in order and together."""
    grid = rows.grid
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
            yield _Chunks(rows, shard, first, edges[first : end + 1])
            first = end
