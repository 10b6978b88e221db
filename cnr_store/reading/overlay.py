"""A version as plain Zarr: a read-only store that composes the chunks of its arrays when they are read.

Arrays of rows appear unsharded, as little-endian bytes of their numpy type, whatever their chain and codec are. Dense
arrays and groups appear as they are stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from cnr_backends import Backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.chains.dense import dense_layout, dense_object
from cnr_store.chains.payload_cache import PayloadCache
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
from cnr_store.reading.coalesce import Coalescer
from cnr_store.reading.virtual_store import BytesLike, VirtualStore

CHUNK_BYTES = 4 << 20
CACHED_BYTES = 32 << 20
"""Of encoded payloads of deltas. Each spans many chunks that readers see, and so is needed again."""

_PATH_NAMES = 3
"""Names in the path of an array, GROUP/NAME/NAME. Each of them may be "c", as the names of chunks begin."""


class Overlay(VirtualStore):
    """Read-only Zarr store over one version. Thread-safe.

    Its memory is bounded by the chunks being read and `CACHED_BYTES`.

    Parameters
    ----------
    catalog, record
        The store and the version in it.
    chunk_rows
        By path, rows of a chunk that readers see. By default those of the whole link of the array's chain, within
        `CHUNK_BYTES`. Given where other processes already see the arrays with these chunks.
    """

    def __init__(
        self,
        catalog: Catalog,
        record: Record,
        *,
        chunk_rows: Mapping[str, int] | None = None,
        read_only: bool = True,
    ) -> None:
        super().__init__(read_only=read_only)
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
        # A version never changes, but a fold may change the shape of its chunks, which their metadata says.
        names = key.split("/")
        node = "/".join(names[:-1] if names[-1] == NODE else names[:_PATH_NAMES])
        text = f"{self.version}\n{key}\n".encode() + self._documents.get(node, b"")
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def nbytes(self, key: str) -> int | None:
        path, slash, name = key.rpartition("/")
        if name == NODE and bool(path) == bool(slash):
            return len(self._documents[path]) if path in self._documents else None
        place = self._chunk(key)
        return None if place is None else place[0].nbytes

    def read(self, key: str, start: int, stop: int) -> BytesLike:
        place = self._chunk(key)
        if place is None:
            return self._documents[key.rpartition("/")[0]][start:stop]
        return place[0].read(place[1], start, stop)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        place = self._chunk(key) if byte_range is None else None
        if place is None or not isinstance(place[0], _ComposedChunks):
            return await super().get(key, prototype, byte_range)
        return prototype.buffer.from_bytes(await self._coalescer.read(*place))

    def names(self, folder: str) -> Iterable[str]:
        if folder in self._groups:
            return [NODE, *self._groups[folder]]
        found = self._split(folder)
        if found is None:
            return []
        array, place = found
        if not place:
            return [NODE, *(["c"] if all(array.counts) else [])]
        return map(str, range(array.counts[len(place) - 1])) if len(place) <= len(array.counts) else []

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


class _ComposedChunks:
    """Chunks of rows that are composed from the links of an array's chain.

    Attributes
    ----------
    counts
        Chunks along each axis. Arrays are cut along the first one only.
    nbytes
        Size of each chunk.
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
