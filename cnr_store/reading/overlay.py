"""A version as plain Zarr: a read-only store that composes the chunks of its arrays when they are read.

Arrays of rows appear unsharded, as little-endian bytes of their numpy type, whatever their chain and codec are. Dense
arrays and groups appear as they are stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Never, TypeVar

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.chains.bounded_cache import PayloadCache
from cnr_store.chains.dense import dense_layout, dense_object
from cnr_store.errors import OptionError, ReadOnlyError
from cnr_store.format.arrays import (
    DenseGrid,
    Doc,
    add_node,
    dense_document,
    document_bytes,
    group_document,
    plain_rows_document,
)
from cnr_store.format.layout import NODE, decode_name, parent_groups
from cnr_store.format.record import Record

T = TypeVar("T")
BytesLike = bytes | memoryview
_READ_THREADS = 8
_CORES = os.cpu_count() or 1
_SMALL_RUN_BYTES, RUN_BYTES = 4 << 20, 16 << 20
"""Of a run that is not worth sharing out, and the most of one."""


async def in_read_thread(call: Callable[[], T]) -> T:
    """Run a call that waits for storage and decodes, in one of the threads that read.

    asyncio's default executor would deadlock: the synchronous zarr reads in it wait for threads that they occupy.
    """
    return await asyncio.get_running_loop().run_in_executor(_read_threads, call)


def _start_read_threads() -> None:
    global _read_threads
    _read_threads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="cnr-reading")


_read_threads: ThreadPoolExecutor
_start_read_threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_read_threads)  # threads don't survive a fork


Waiting = dict[int, list["asyncio.Future[BytesLike]"]]
"""By a chunk's index, the futures of those who wait for it."""


@dataclass
class _Batch:
    """What was requested in one turn of one event loop."""

    loop: asyncio.AbstractEventLoop
    waiting: dict[_Chunks, Waiting] = field(default_factory=dict)


class Coalescer:
    """Collects the requests of one turn of an event loop. There may be several loops, each in its own thread.

    A chunk of a delta spans many chunks that readers see. A program that reads a whole array requests several of these
    at once. Composing them together finds, fetches and decodes the delta's chunk once for all of them.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    async def read(self, array: _Chunks, index: int) -> BytesLike:
        """A whole chunk, composed together with its neighbours if these are requested, too."""
        loop = asyncio.get_running_loop()
        batch: _Batch | None = getattr(self._local, "batch", None)
        if batch is None or batch.loop is not loop:
            batch = self._local.batch = _Batch(loop)
            loop.call_soon(self._start, batch)
        future: asyncio.Future[BytesLike] = loop.create_future()
        batch.waiting.setdefault(array, defaultdict(list))[index].append(future)
        return await future

    def _start(self, batch: _Batch) -> None:
        if getattr(self._local, "batch", None) is batch:
            del self._local.batch
        for array, waiting in batch.waiting.items():
            for run in _runs(sorted(waiting), _run_length(len(waiting), max(array.nbytes, 1))):
                task = batch.loop.create_task(_read_run(array, run, waiting))
                _tasks.add(task)
                task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()
"""Keeps running tasks alive: the loop itself holds only weak references."""


async def _read_run(array: _Chunks, run: range, waiting: Waiting) -> None:
    try:
        block = await in_read_thread(lambda: array.read(run.start, 0, len(run) * array.nbytes))
    except Exception as error:  # noqa: BLE001 - any error belongs to those who wait
        if len(run) > 1:  # chunk by chunk, so that only those that can't be read fail
            await asyncio.gather(*(_read_run(array, range(i, i + 1), waiting) for i in run))
        else:
            _resolve(waiting[run.start], error)
        return
    for place, index in enumerate(run):
        _resolve(waiting[index], memoryview(block)[place * array.nbytes : (place + 1) * array.nbytes])


def _resolve(futures: list[asyncio.Future[BytesLike]], outcome: BytesLike | Exception) -> None:
    for future in futures:
        if future.done():  # cancelled
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _run_length(chunks: int, nbytes: int) -> int:
    """How many of so many chunks to compose together: as many runs as there are cores, of bounded size."""
    fair = -(-chunks // _CORES)
    return max(1, _SMALL_RUN_BYTES // nbytes, min(fair, RUN_BYTES // nbytes))


def _runs(indexes: list[int], max_length: int) -> Iterator[range]:
    """Ascending numbers as ranges of consecutive ones, each of at most `max_length`."""
    for _, group in itertools.groupby(enumerate(indexes), lambda pair: pair[1] - pair[0]):
        first, *rest = (index for _, index in group)
        stop = first + 1 + len(rest)
        for start in range(first, stop, max_length):
            yield range(start, min(start + max_length, stop))


CHUNK_BYTES = 4 << 20
CACHED_BYTES = 32 << 20
"""Of encoded payloads of deltas. Each spans many chunks that readers see, and so is needed again."""

_PATH_NAMES = 3
"""Names in the path of an array, GROUP/NAME/NAME. Each of them may be "c", as the names of chunks begin."""


class Overlay(Store):
    """Read-only Zarr store over one version, whose objects are computed when they are read. Thread-safe.

    Its memory is bounded by the chunks being read and `CACHED_BYTES`. In one process at most eight objects are being
    read at any time, whatever the number of stores and callers.

    `catalog`, `record`: the store and the version in it.
    `chunk_rows`: by path, rows of a chunk that readers see. By default those of the whole link of the array's chain,
    within `CHUNK_BYTES`. Given where other processes already see the arrays with these chunks.
    `read_only`: must be True; Zarr passes it.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(
        self,
        catalog: Catalog,
        record: Record,
        *,
        chunk_rows: Mapping[str, int] | None = None,
        read_only: bool = True,
    ) -> None:
        if not read_only:
            raise OptionError("a version can't be opened for writing: versions never change")
        super().__init__(read_only=True)
        self._catalog, self._record = catalog, record
        self._chunk_rows = dict(chunk_rows or {})
        self._arrays: dict[str, _Chunks] = {}
        self._coalescer = Coalescer()
        self._payloads = PayloadCache(CACHED_BYTES)
        self._groups: dict[str, dict[str, None]] = {"": {}}
        self._documents = {path: document_bytes(doc) for path, doc in self._make_documents().items()}

    @property
    def version(self) -> str:
        """Id of the version."""
        return self._record.id

    @property
    def time(self) -> float:
        """When it was committed, in seconds since 1970, UTC."""
        return self._record.time

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Overlay)
            and other.version == self.version
            and other._catalog.backend.url == self._catalog.backend.url
        )

    __hash__ = None  # type: ignore[assignment]  # as in zarr's own stores

    def __reduce__(
        self,
    ) -> tuple[Callable[[Backend, str, dict[str, int]], Overlay], tuple[Backend, str, dict[str, int]]]:
        # Another process opens the version again: records and indexes are not sent. Rows of a chunk are, because
        # they are others if the version is folded meanwhile.
        return _reopen, (self._catalog.backend, self.version, self._chunk_rows)

    def __str__(self) -> str:
        return f"cnr://{self.version}@{self._catalog.backend.url}"

    def __repr__(self) -> str:
        return f"Overlay({str(self)!r})"

    def with_read_only(self, read_only: bool = False) -> Overlay:
        if not read_only:
            super().with_read_only(read_only)  # zarr's own refusal
        return Overlay(self._catalog, self._record, chunk_rows=self._chunk_rows)

    def document(self, path: str) -> bytes:
        """The metadata of a node of the hierarchy, as readers see it; "" is the root."""
        return self._documents[path]

    def fingerprint(self, key: str) -> str:
        """A digest of an object's key and content."""
        # A version never changes, but a fold may change the shape of its chunks, which their metadata says.
        names = key.split("/")
        node = "/".join(names[:-1] if names[-1] == NODE else names[:_PATH_NAMES])
        text = f"{self.version}\n{key}\n".encode() + self._documents.get(node, b"")
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def nbytes(self, key: str) -> int | None:
        """Size in bytes of the object at a key, or None if there is none. Reads no data."""
        path, slash, name = key.rpartition("/")
        if name == NODE and bool(path) == bool(slash):
            return len(self._documents[path]) if path in self._documents else None
        place = self._chunk(key)
        return None if place is None else place[0].nbytes

    def read(self, key: str, start: int, stop: int) -> BytesLike:
        """Bytes start ... stop - 1 of an object that exists; 0 <= start <= stop <= its size."""
        place = self._chunk(key)
        if place is None:
            return self._documents[key.rpartition("/")[0]][start:stop]
        return place[0].read(place[1], start, stop)

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        nbytes = self.nbytes(key)
        if nbytes is None:
            return None
        data = self.read(key, *_bounds(byte_range, nbytes))
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        place = self._chunk(key) if byte_range is None else None
        if place is None or not isinstance(place[0], _ComposedChunks):
            return await in_read_thread(
                lambda: self.get_sync(key, prototype=prototype, byte_range=byte_range)
            )
        return prototype.buffer.from_bytes(await self._coalescer.read(*place))

    def names(self, folder: str) -> Iterable[str]:
        """Names of the objects and folders immediately under a folder; "" is the root. Empty if there is none."""
        if folder in self._groups:
            return [NODE, *self._groups[folder]]
        found = self._split(folder)
        if found is None:
            return []
        array, place = found
        if not place:
            return [NODE, *(["c"] if all(array.counts) else [])]
        return map(str, range(array.counts[len(place) - 1])) if len(place) <= len(array.counts) else []

    def require(self, key: str, operation: str) -> int:
        """Size in bytes of the object at a key."""
        nbytes = self.nbytes(key)
        if nbytes is None:
            raise ObjectNotFoundError(
                f"no object {key!r} in {self}", operation=operation, key=key, url=str(self)
            )
        return nbytes

    def keys_below(self, folder: str) -> Iterator[str]:
        """Keys of all objects below a folder, found one by one."""
        for name in self.names(folder):
            key = f"{folder}/{name}" if folder else name
            if self.nbytes(key) is None:
                yield from self.keys_below(key)
            else:
                yield key

    def _chunk(self, key: str) -> tuple[_Chunks, int] | None:
        """(array, index along its first axis) of a chunk's key, None if it is no chunk's."""
        found = self._split(key)
        if found is None or len(found[1]) != len(found[0].counts) + 1:
            return None
        array, place = found
        return array, int(place[1]) if array.counts else 0

    def _split(self, key: str) -> tuple[_Chunks, list[str]] | None:
        """(array, names after its path) of a key, None unless these are none or "c" and indexes of chunks."""
        names = key.split("/")
        array, place = self._arrays.get("/".join(names[:_PATH_NAMES])), names[_PATH_NAMES:]
        if array is None or (place and not (place[0] == "c" and all(array.counts))):
            return None
        return (array, place) if all(map(_is_index, place[1:], array.counts)) else None

    def _make_documents(self) -> dict[str, Doc]:
        nodes: dict[str, Doc] = {}
        for path, entry in sorted(self._record.arrays.items()):
            parents = parent_groups(path)
            for parent, child in zip(["", *parents], [*parents, path], strict=True):
                self._groups.setdefault(parent, {})[child.rpartition("/")[2]] = None
            make_node = self._dense_node if entry.kind == "dense" else self._rows_node
            add_node(nodes, path, make_node(path))
        root = group_document({"cnr_version": {"id": self._record.id, "step": self._record.step}})
        consolidated = {"kind": "inline", "must_understand": False, "metadata": dict(nodes)}
        return {"": {**root, "consolidated_metadata": consolidated}, **nodes}

    def _dense_node(self, path: str) -> Doc:
        grid = dense_layout(self._catalog, self._record, path)
        self._arrays[path] = _StoredChunks(self._catalog, self._record, path, grid)
        return dense_document(grid, decode_name(path.rpartition("/")[2]), grid.torch_dtype)

    def _rows_node(self, path: str) -> Doc:
        reader = ArrayReader(self._catalog, self._record, path, self._payloads)
        chunk_rows = self._chunk_rows.setdefault(path, _chunk_rows(reader))
        self._arrays[path] = _ComposedChunks(reader, chunk_rows)
        return plain_rows_document(reader.shape, reader.dtype, chunk_rows)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        return self.nbytes(key) is not None

    async def getsize(self, key: str) -> int:
        return self.require(key, "size")

    async def list(self) -> AsyncIterator[str]:
        for key in self.keys_below(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in self.keys_below(prefix.rpartition("/")[0]):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in self.names(prefix.strip("/")):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        self._refuse(key)

    async def delete(self, key: str) -> None:
        self._refuse(key)

    def _refuse(self, key: str) -> Never:
        # Zarr's own words first: programs look for them.
        raise ReadOnlyError(
            f"{key}: store was opened in read-only mode and does not support writing; versions never change, save "
            "a new one instead"
        )


class _ComposedChunks:
    """Chunks of rows that are composed from the links of an array's chain.

    `counts`: chunks along each axis. Arrays are cut along the first one only.
    `nbytes`: size of each chunk.
    """

    def __init__(self, reader: ArrayReader, chunk_rows: int) -> None:
        self._reader, self._rows = reader, chunk_rows
        self._row_nbytes = reader.columns * reader.dtype.itemsize
        self.counts = (-(-reader.shape[0] // chunk_rows), 1)[: len(reader.shape)]
        self.nbytes = chunk_rows * self._row_nbytes

    def read(self, index: int, start: int, stop: int) -> BytesLike:
        """Fetches and decodes only the rows that the bytes belong to."""
        reader, first = self._reader, start // self._row_nbytes
        first_row, rows = index * self._rows + first, -(-stop // self._row_nbytes) - first
        out = reader.new_rows(rows)
        inside = max(0, min(rows, reader.shape[0] - first_row))
        out[inside:] = np.nan if reader.dtype.kind == "f" else 0  # Zarr stores edge chunks whole
        if inside:
            reader.read(first_row, out[:inside])
        little = out.astype(out.dtype.newbyteorder("<"), copy=False)
        skipped = first * self._row_nbytes
        return little.reshape(-1).view(np.uint8).data[start - skipped : stop - skipped]


class _StoredChunks:
    """Chunks of dense arrays, which are stored as readers see them. Attributes as of `_ComposedChunks`."""

    def __init__(self, catalog: Catalog, record: Record, path: str, grid: DenseGrid) -> None:
        self._place = catalog, record, path, grid
        self.counts = tuple(-(-n // c) for n, c in zip(grid.shape, grid.chunk, strict=True))
        self.nbytes = grid.chunk_nbytes + 4  # crc32c

    def read(self, index: int, start: int, stop: int) -> BytesLike:
        """Fetches and validates the whole object."""
        return memoryview(dense_object(*self._place, index))[start:stop]


_Chunks = _ComposedChunks | _StoredChunks


def _reopen(backend: Backend, version: str, chunk_rows: dict[str, int]) -> Overlay:
    catalog = Catalog(backend)
    return Overlay(catalog, catalog.record(version), chunk_rows=chunk_rows)


def _chunk_rows(reader: ArrayReader) -> int:
    """Rows of a chunk of the whole link, within `CHUNK_BYTES`."""
    rows = reader.links[-1].chunk_rows
    while rows > 1 and rows * reader.columns * reader.dtype.itemsize > CHUNK_BYTES:
        rows //= 2
    return rows


def _is_index(name: str, count: int) -> bool:
    """Whether a name is the index of a chunk along an axis, in its shortest form."""
    return (
        name.isascii()
        and name.isdecimal()
        and len(name) < 20  # before `int`, whose time grows with the square of the digits
        and str(int(name)) == name
        and int(name) < count
    )


def _bounds(byte_range: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    """First byte and the one after the last. A range beyond the object's end is cut to what there is."""
    match byte_range:
        case None:
            start, stop = 0, nbytes
        case RangeByteRequest(start, stop):
            pass
        case OffsetByteRequest(start):
            stop = nbytes
        case SuffixByteRequest(suffix):
            start, stop = nbytes - suffix, nbytes
        case _:
            raise OptionError(f"Unexpected byte_range, got {byte_range!r}; give one of Zarr's byte requests")
    start = min(max(start, 0), nbytes)
    return start, min(max(stop, start), nbytes)
