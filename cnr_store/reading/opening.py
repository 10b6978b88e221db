"""Opening a store for reading: `versions`, `open`, `view`, `state_dict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import zarr

from cnr_backends import Transfer, open_backend
from cnr_store.catalog.catalog import Catalog, Url, Version, VersionInfo
from cnr_store.chains.allocation import allocate
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader
from cnr_store.chains.dense import read_dense
from cnr_store.format.layout import decode_name, table_parameter
from cnr_store.format.record import Record
from cnr_store.reading.overlay import Overlay


def versions(url: Url, **storage_options: Any) -> list[VersionInfo]:
    """Committed versions of a store, oldest first; an empty list where nothing was ever committed.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    cnr_backends.OpenError
        The URL can't be opened.
    FormatError
        Something else lives there.
    """
    catalog = Catalog(open_backend(url, **storage_options))
    return [VersionInfo.from_record(record) for record in catalog.newest_first()][::-1]


def view(url: Url, version: Version = "latest", **storage_options: Any) -> Overlay:
    """A version as a read-only Zarr store of plain arrays, for xarray, dask and every other Zarr reader.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, or ``latest``.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
    """
    catalog = Catalog(open_backend(url, **storage_options))
    return Overlay(catalog, catalog.find(version))


def open_version(url: Url, version: Version = "latest", **storage_options: Any) -> zarr.Group:
    """A version as a read-only Zarr group: ``group["tables/NAME/weight"][rows]`` reads just those rows' chunks.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, or ``latest``.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
    """
    return zarr.open_group(view(url, version, **storage_options), mode="r")


def state_dict(
    url: Url, version: Version = "latest", **storage_options: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Tables and dense entries of a version by the model's names, without a model and without torch.

    Tables come in the type they are read in (bfloat16 as float32); dense tensors of a type that numpy lacks come
    as the unsigned integers that hold their bits. Aliases of a tied tensor share one array.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, or ``latest``.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError, CorruptionError
    """
    catalog = Catalog(open_backend(url, **storage_options))
    record = catalog.find(version)
    arrays = model_arrays(record)
    dense = {name: path for name, path in arrays.items() if record.arrays[path].kind == "dense"}
    readers = [ArrayReader(catalog, record, path) for name, path in arrays.items() if name not in dense]
    with Transfer(READ_WORKERS, 2 * READ_WORKERS) as transfer:
        tables = iter(read_tables(readers, transfer))
        tensors = transfer.map(lambda path: read_dense(catalog, record, path)[0], dense.values())
        found = {name: next(tensors if name in dense else tables) for name in arrays}
    return {
        alias: found[name] for name, path in arrays.items() for alias in (name, *record.arrays[path].aliases)
    }


def model_arrays(record: Record) -> dict[str, str]:
    """Paths of a version's tables and dense tensors by the model's names, each tied tensor once."""
    found = {}
    for path in record.arrays:
        group, middle, last = path.split("/")
        if group == "tables" and last == "weight":
            found[table_parameter(decode_name(middle))] = path
        elif group == "dense" and middle == "model":
            found[decode_name(last)] = path
    return found


def read_tables(readers: Sequence[ArrayReader], transfer: Transfer) -> list[np.ndarray[Any, Any]]:
    """All rows of each array, in its shape and dtype; large ones in pieces, small ones beside each other."""
    found = [
        allocate((reader.shape[0], reader.columns), reader.dtype, f"version {reader.version}, {reader.path}")
        for reader in readers
    ]
    pieces = (
        (reader, first, out[first : first + rows])
        for reader, out in zip(readers, found, strict=True)
        for first, rows in reader.regions()
    )
    for _ in transfer.map(lambda piece: piece[0].read(piece[1], piece[2]), pieces):
        pass
    return [out.reshape(reader.shape) for reader, out in zip(readers, found, strict=True)]
