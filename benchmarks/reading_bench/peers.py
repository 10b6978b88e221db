"""Whom the benchmark reads rows with: this package, plain sharded Zarr and Icechunk, each in a folder or on S3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import icechunk
import numpy as np
import zarr

import cnr_store
from benchmarks.reading_bench.huge import PATH, Huge
from cnr_backends import open_backend
from tests.s3_server import BUCKET

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Place:
    """A folder, or a prefix on an S3 server."""

    url: str
    options: dict[str, Any]

    def at(self, endpoint: str) -> Place:
        """The same place through another address of its server."""
        return Place(self.url, {**self.options, "endpoint_url": endpoint})

    def below(self, name: str) -> Place:
        return Place(f"{self.url}/{name}", self.options)


@dataclass(frozen=True)
class Peer:
    """How to write a table to a place, and how to open it and read rows."""

    name: str
    write: Callable[[Place, Huge], None]
    read: Callable[[Place, Array], Array]


def _write_ours(deltas: int) -> Callable[[Place, Huge], None]:
    return lambda place, table: table.write(open_backend(place.url, **place.options), deltas)


def _read_ours(place: Place, rows: Array) -> Array:
    return _rows(cnr_store.open(place.url, **place.options)[PATH], rows)


def _write_zarr(place: Place, table: Huge) -> None:
    _fill(zarr.open_group(place.url, mode="w", storage_options=place.options or None), table)


def _read_zarr(place: Place, rows: Array) -> Array:
    return _rows(zarr.open_group(place.url, mode="r", storage_options=place.options or None)["table"], rows)


def _write_icechunk(place: Place, table: Huge) -> None:
    session = icechunk.Repository.create(_storage(place)).writable_session("main")
    _fill(zarr.open_group(session.store, mode="w"), table)
    session.commit("table")


def _read_icechunk(place: Place, rows: Array) -> Array:
    session = icechunk.Repository.open(_storage(place)).readonly_session("main")
    return _rows(zarr.open_group(session.store, mode="r")["table"], rows)


PEERS = [
    Peer("cnr-store, a baseline", _write_ours(0), _read_ours),
    Peer("cnr-store, 10 deltas", _write_ours(10), _read_ours),
    Peer("zarr, sharded", _write_zarr, _read_zarr),
    Peer("icechunk, sharded zarr", _write_icechunk, _read_icechunk),
]


def _storage(place: Place) -> icechunk.Storage:
    parts = urlsplit(place.url)
    if parts.scheme != "s3":
        return icechunk.local_filesystem_storage(str(Path(parts.path)))
    return icechunk.s3_storage(
        bucket=BUCKET,
        prefix=parts.path.strip("/"),
        region="us-east-1",
        endpoint_url=place.options["endpoint_url"],
        allow_http=True,
        access_key_id=place.options["key"],
        secret_access_key=place.options["secret"],
        force_path_style=True,
    )


def _fill(group: zarr.Group, table: Huge) -> None:
    """The same cut, raw; only the chunks that are read are there, which Zarr takes for what it is."""
    grid = table.grid()
    array = group.create_array(
        "table",
        shape=(table.rows, table.dim),
        chunks=(grid.chunk_rows, table.dim),
        shards=(grid.shard_rows, table.dim),
        dtype="float32",
        fill_value=np.nan,
        compressors=None,
    )
    for chunk in np.unique(table.sample // grid.chunk_rows).tolist():
        ids = np.arange(chunk * grid.chunk_rows, min((chunk + 1) * grid.chunk_rows, table.rows))
        array[int(ids[0]) : int(ids[-1]) + 1] = table.values(ids)


def _rows(array: Any, rows: Array) -> Array:
    return np.asarray(array.get_orthogonal_selection((rows, slice(None))))
