"""Tables by their shape, and rows of them: none at all, of their true size, or real ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cnr_backends import Backend
from cnr_backends.errors import ObjectNotFoundError
from cnr_backends.pieces import Pieces
from cnr_codecs import LosslessRows, RowCodec, UniformRows
from cnr_store.ranks.placement import Piece
from cnr_store.writing.plan import RowsWrite
from cnr_store.writing.row_codes import Rows

Array = np.ndarray[Any, Any]
Which = Array | slice
_MOST_CHUNK_BYTES = 64 << 20
_PAYLOADS = 1000


@dataclass(frozen=True)
class TableShape:
    """A table. By rows, each rank has as many of them; else one rank has all."""

    number: int
    rows: int
    dim: int
    by_rows: bool

    def piece(self, rank: int, world: int) -> Piece:
        """What a rank has of it. TorchRec cuts rows alike."""
        if not self.by_rows:
            return Piece(0, self.rows if self.number % world == rank else 0, 0, self.dim, rank)
        each = -(-self.rows // world)
        first = min(rank * each, self.rows)
        return Piece(first, min(each, self.rows - first), 0, self.dim, rank)

    def paths(self) -> tuple[tuple[str, int], ...]:
        """Its arrays: place in a version, and columns."""
        group = f"tables/ebc.embedding_bags.t_{self.number}"
        return ((f"{group}/weight", self.dim), (f"{group}/momentum1", 1))


@dataclass(frozen=True)
class Model:
    """What a job trains.

    Attributes
    ----------
    tables
        In their order.
    every
        Of each so many rows one has changed; 0 where all are written, whole.
    bits
        Of the rows' codec.
    """

    tables: tuple[TableShape, ...]
    every: int
    bits: int = 4

    @property
    def nbytes(self) -> int:
        """Of rows and momentum in memory."""
        return sum(table.rows * (table.dim + 1) * 4 for table in self.tables)


class RowsMaker(Protocol):
    """Where rows and codecs come from.

    Attributes
    ----------
    elsewhere
        By path, the writes of ranks that have no row of the array: thousands of ranks share one.
    """

    elsewhere: dict[str, RowsWrite]

    def source(self, table: TableShape, columns: int, which: Which) -> Rows: ...

    def codec(self, columns: int, bits: int) -> RowCodec: ...


def _codec(columns: int, bits: int) -> RowCodec:
    return LosslessRows() if columns == 1 else UniformRows(bits=bits)


class RealRows:
    """Random values, and the product's codecs."""

    def __init__(self) -> None:
        self.elsewhere: dict[str, RowsWrite] = {}

    def source(self, table: TableShape, columns: int, which: Which) -> Rows:
        shape = (table.rows, columns) if columns > 1 else (table.rows,)
        values = np.random.default_rng(table.number).standard_normal(shape, np.float32)
        return _Values(values.reshape(table.rows, columns)[which])

    def codec(self, columns: int, bits: int) -> RowCodec:
        return _codec(columns, bits)


@dataclass(frozen=True)
class _Values:
    all: Array

    def block(self, begin: int, end: int) -> Array:
        return self.all[begin:end]


class NoRows:
    """Zeros, all of them the same memory, and payloads of the size that the product's codecs give."""

    def __init__(self) -> None:
        self.elsewhere: dict[str, RowsWrite] = {}
        self._zeros = np.zeros(_MOST_CHUNK_BYTES >> 2, np.float32)
        self._codecs: dict[tuple[int, int], RowCodec] = {}

    def source(self, table: TableShape, columns: int, which: Which) -> Rows:
        return _Zeros(self._zeros, columns)

    def codec(self, columns: int, bits: int) -> RowCodec:
        return self._codecs.setdefault((columns, bits), ZeroRows(_codec(columns, bits)))


@dataclass(frozen=True)
class _Zeros:
    zeros: Array
    columns: int

    def block(self, begin: int, end: int) -> Array:
        return self.zeros[: (end - begin) * self.columns].reshape(end - begin, self.columns)


class ZeroRows:
    """A codec that keeps the payloads it has made. Rows are zeros at even distances, so most chunks are alike."""

    def __init__(self, codec: RowCodec) -> None:
        self.codec = codec
        self._known: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()

    def get_config(self) -> dict[str, Any]:
        return self.codec.get_config()

    def zarr_codec(self) -> dict[str, Any]:
        return self.codec.zarr_codec()

    def bytes_per_row(self, dim: int, element: str) -> float:
        return self.codec.bytes_per_row(dim, element)

    def encode_rows(self, values: Any, offsets: Any, rows: int, *, element: str, seal: int = 0) -> bytes:
        key = (len(values), -1 if offsets is None else int(offsets[0]), rows)
        payload = self._known.get(key)
        if payload is None:
            payload = self.codec.encode_rows(values, offsets, rows, element=element)
            self._known[key] = payload
            if len(self._known) > _PAYLOADS:
                self._known.popitem(last=False)
        return payload


class SizesBackend(Backend):
    """Keeps the sizes of objects with rows, and all others whole, in memory that ranks share."""

    atomic_create = True

    def __init__(self, objects: dict[str, bytes | int]) -> None:
        self.url = "memory://sizes"
        self._objects = objects

    def _put(self, key: str, pieces: Pieces) -> None:
        self._objects[key] = sum(map(len, pieces)) if "/c/" in key else b"".join(pieces)

    def _create(self, key: str, data: bytes) -> bool:
        return self._objects.setdefault(key, data) is data

    def _get(self, key: str) -> bytes:
        found = self._objects.get(key)
        if not isinstance(found, bytes):
            raise ObjectNotFoundError(f"no object {key!r}", operation="get", key=key, url=self.url)
        return found

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._get(key)[start : start + length]

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._get(key)[-length:]

    def _size(self, key: str) -> int:
        found = self._objects.get(key)
        if found is None:
            raise ObjectNotFoundError(f"no object {key!r}", operation="size", key=key, url=self.url)
        return found if isinstance(found, int) else len(found)

    def _list_names(self, prefix: str) -> list[str]:
        start = f"{prefix}/" if prefix else ""
        keys = [key for key in list(self._objects) if key.startswith(start)]
        return list({key[len(start) :].split("/")[0] for key in keys})

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        for key in list(self._objects):
            if key.startswith(f"{prefix}/" if prefix else ""):
                yield key, self._size(key)

    def _delete(self, key: str) -> None:
        self._objects.pop(key, None)
