"""A version as plain Zarr: a read-only store that composes chunks of its arrays when they are asked for.

Arrays of rows appear unsharded, as little-endian bytes of their numpy type, whatever chain and codec lie beneath;
dense arrays and groups appear as they are stored. Nothing is computed before it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from cnr_backends import Backend
from cnr_store.catalog import Catalog
from cnr_store.chain import ArrayReader
from cnr_store.dense import dense_layout, dense_object
from cnr_store.errors import CheckpointError
from cnr_store.format.arrays import (
    DenseGrid,
    Doc,
    dense_document,
    document_bytes,
    group_document,
    plain_rows_document,
)
from cnr_store.format.layout import NODE, decode_name, parent_groups
from cnr_store.format.record import Record
from cnr_store.memory import empty

CHUNK_BYTES = 4 << 20
T = TypeVar("T")

# Composing blocks on storage and decodes. It must not run in asyncio's default executor: synchronous zarr reads
# beneath would wait for threads that they themselves occupy.
_executor = ThreadPoolExecutor(8, thread_name_prefix="cnr-overlay")


class Overlay(Store):
    """Read-only Zarr store over one version. Thread-safe; memory is bounded by the chunks being read."""

    def __init__(self, catalog: Catalog, record: Record) -> None:
        super().__init__(read_only=True)
        self._catalog = catalog
        self._record = record
        self._readers: dict[str, ArrayReader] = {}
        self._dense: dict[str, DenseGrid] = {}
        self._documents = self._make_documents()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Overlay)
            and other._record.id == self._record.id
            and other._catalog.backend.url == self._catalog.backend.url
        )

    __hash__ = None  # type: ignore[assignment]  # as in zarr's own stores

    def __reduce__(self) -> tuple[Callable[[Backend, str], Overlay], tuple[Backend, str]]:
        # Other processes open the version again: records and indexes are read, not sent.
        return _reopen, (self._catalog.backend, self._record.id)

    def __str__(self) -> str:
        return f"cnr://{self._record.id}@{self._catalog.backend.url}"

    def __repr__(self) -> str:
        return f"Overlay({str(self)!r})"

    def _make_documents(self) -> dict[str, Doc]:
        record, nodes = self._record, {}
        for path, entry in sorted(record.arrays.items()):
            for group in parent_groups(path):
                nodes[group] = group_document()
            if entry.kind == "dense":
                grid = self._dense[path] = dense_layout(self._catalog, record, path)
                nodes[path] = dense_document(grid, decode_name(path.rsplit("/", 1)[-1]), grid.torch_dtype)
            else:
                reader = self._readers[path] = ArrayReader(self._catalog, record, path)
                nodes[path] = plain_rows_document(reader.shape, reader.dtype, _chunk_rows(reader))
        root = group_document({"cnr_version": {"id": record.id, "step": record.step}})
        consolidated = {"kind": "inline", "must_understand": False, "metadata": dict(nodes)}
        return {"": {**root, "consolidated_metadata": consolidated}, **nodes}

    def _read(self, key: str) -> bytes | None:
        """The object at a key, or None where a Zarr store would hold none."""
        path, _, name = key.rpartition("/")
        if name == NODE:
            doc = self._documents.get(path)
            return None if doc is None else document_bytes(doc)
        place = self._chunk(key)
        if place is None:
            return None
        path, index = place
        if path in self._dense:
            return dense_object(self._catalog, self._record, path, self._dense[path], index)
        chunk_rows = self._documents[path]["chunk_grid"]["configuration"]["chunk_shape"][0]
        return _compose(self._readers[path], index, chunk_rows)

    def _chunk(self, key: str) -> tuple[str, int] | None:
        """(path of the array, index along its first axis) of a chunk's key, None if it is no chunk's."""
        # Every path has three names; any of them may be c itself.
        names = key.split("/", 4)
        path, place = "/".join(names[:3]), names[4] if len(names) == 5 else ""
        doc = self._documents.get(path)
        if names[3:4] != ["c"] or doc is None or doc["node_type"] != "array":
            return None
        index = _chunk_index(place, _chunk_counts(doc))
        return None if index is None else (path, index)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(_executor, function)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        data = await self._call(lambda: self._read(key))
        return None if data is None else prototype.buffer.from_bytes(_slice(data, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        path, _, name = key.rpartition("/")
        return path in self._documents if name == NODE else self._chunk(key) is not None

    def _keys(self) -> Iterable[str]:
        for path, doc in self._documents.items():
            yield f"{path}/{NODE}" if path else NODE
            if doc["node_type"] == "array":
                for index in np.ndindex(*_chunk_counts(doc)):
                    yield "/".join([path, "c", *map(str, index)])

    async def list(self) -> AsyncIterator[str]:
        for key in self._keys():
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in self._keys():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        base = f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
        for name in sorted(
            {key[len(base) :].split("/", 1)[0] for key in self._keys() if key.startswith(base)}
        ):
            yield name

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    @property
    def supports_listing(self) -> bool:
        return True

    async def set(self, key: str, value: Buffer) -> None:
        raise _ReadOnlyError(key)

    async def delete(self, key: str) -> None:
        raise _ReadOnlyError(key)


class _ReadOnlyError(CheckpointError, PermissionError):
    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: versions never change; save a new one instead")


def _reopen(backend: Backend, version: str) -> Overlay:
    catalog = Catalog(backend)
    return Overlay(catalog, catalog.record(version))


def _chunk_rows(reader: ArrayReader) -> int:
    """Rows of a chunk that readers see: as the whole link is cut, within `CHUNK_BYTES`."""
    grid = reader.links[-1].grid
    rows = grid.chunk_rows if grid else 1
    while rows > 1 and rows * reader.columns * reader.dtype.itemsize > CHUNK_BYTES:
        rows //= 2
    return rows


def _compose(reader: ArrayReader, index: int, chunk_rows: int) -> bytes:
    first_row = index * chunk_rows
    shape = (chunk_rows, reader.columns)
    out = empty(shape, reader.dtype, f"version {reader.version}, {reader.path}")
    out.fill(np.nan if reader.dtype.kind == "f" else 0)
    reader.read(first_row, out[: reader.shape[0] - first_row])
    return out.astype(out.dtype.newbyteorder("<"), copy=False).tobytes()


def _chunk_counts(doc: Doc) -> list[int]:
    chunk = doc["chunk_grid"]["configuration"]["chunk_shape"]
    return [-(-n // c) for n, c in zip(doc["shape"], chunk, strict=True)]


def _chunk_index(place: str, counts: list[int]) -> int | None:
    """Index along the first axis of a chunk key; every array is cut along that axis only."""
    parts = place.split("/") if place else []
    if len(parts) != len(counts) or any(not part.isascii() or not part.isdecimal() for part in parts):
        return None
    index = [int(part) for part in parts]
    inside = all(i < n and str(i) == part for i, n, part in zip(index, counts, parts, strict=True))
    return (index[0] if index else 0) if inside else None


def _slice(data: bytes, byte_range: ByteRequest | None) -> bytes:
    if isinstance(byte_range, RangeByteRequest):
        return data[byte_range.start : byte_range.end]
    if isinstance(byte_range, OffsetByteRequest):
        return data[byte_range.offset :]
    if isinstance(byte_range, SuffixByteRequest):
        return data[max(0, len(data) - byte_range.suffix) :]
    return data
