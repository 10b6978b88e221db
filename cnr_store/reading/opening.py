"""Opening a store for reading: `versions`, `open`, `view`, `state_dict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zarr

from cnr_backends import Transfer, open_backend
from cnr_store.catalog.catalog import Catalog, Url, Version, open_record, tell_of_no_store
from cnr_store.catalog.version_info import VersionInfo, VersionList
from cnr_store.chains.allocation import Array
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader
from cnr_store.chains.dense import read_dense
from cnr_store.errors import OptionError
from cnr_store.format.record import Record
from cnr_store.reading.overlay import Overlay
from cnr_store.reading.rows import find_array, own_names


def versions(url: Url, **storage_options: Any) -> VersionList:
    """Committed versions of a store, oldest first. The list is empty where nothing was ever committed.

    Notebooks show it as a table. Where there is no store at all, the log says so.

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
        The place holds something else than a store.
    """
    catalog = Catalog(open_backend(url, **storage_options))
    found = VersionList(VersionInfo.from_record(record) for record in catalog.oldest_first())
    if not (found or catalog.check_format()):
        tell_of_no_store(catalog.backend.url)
    return found


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
    return Overlay(*open_record(url, version, **storage_options))


def open_version(url: Url, version: Version = "latest", **storage_options: Any) -> zarr.Group:
    """A version as a read-only Zarr group: ``group["tables/NAME/weight"][rows]`` reads only the chunks of these rows.

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
    url: Url, version: Version = "latest", *, tables: Sequence[str] | None = None, **storage_options: Any
) -> dict[str, Array]:
    """Tables and dense tensors of a version by the model's names, without a model and without torch.

    Tables of bfloat16 come as float32. Dense tensors of a type that numpy lacks come as unsigned integers that hold
    their bits. Aliases of a tied tensor share one array.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, a tag, or ``latest``.
    tables
        Read these tables only, and nothing dense: ``["users"]``. By default, everything.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    OptionError
        The version has no such table.
    EmptyStoreError, VersionNotFoundError, CorruptionError
    """
    catalog, record = open_record(url, version, **storage_options)
    arrays = model_arrays(record, tables)
    dense = {name: path for name, path in arrays.items() if record.arrays[path].kind == "dense"}
    readers = [ArrayReader(catalog, record, path) for name, path in arrays.items() if name not in dense]
    with Transfer(READ_WORKERS, 2 * READ_WORKERS) as transfer:
        whole = iter(_read_tables(readers, transfer))
        tensors = transfer.map(lambda path: read_dense(catalog, record, path)[0], dense.values())
        values = {name: next(tensors if name in dense else whole) for name in arrays}
    return {
        alias: values[name] for name, path in arrays.items() for alias in (name, *record.arrays[path].aliases)
    }


def model_arrays(record: Record, tables: Sequence[str] | None = None) -> dict[str, str]:
    """Paths of a version's tables and dense tensors by the model's names, each tied tensor once; or of these tables."""
    if isinstance(tables, str):
        raise OptionError(f"tables={tables!r} is one name: give a list of names")
    wanted = record.arrays if tables is None else {_find_table(record, name): None for name in tables}
    paths = {path: own_names(path) for path in wanted}
    return {names[-1]: path for path, names in paths.items() if names}


def _find_table(record: Record, name: str) -> str:
    path = find_array(record, name)
    if not (path.startswith("tables/") and path.endswith("/weight")):
        raise OptionError(
            f"tables={name!r}: it is no table of version {record.id}; cnr_store.rows() reads it"
        )
    return path


def _read_tables(readers: Sequence[ArrayReader], transfer: Transfer) -> list[Array]:
    """All rows of each array, in its shape and dtype. Regions of several arrays are read at once."""
    tables = [reader.new_rows(reader.shape[0]) for reader in readers]
    regions = (
        (reader, first, table[first : first + rows])
        for reader, table in zip(readers, tables, strict=True)
        for first, rows in reader.regions()
    )
    for _ in transfer.map(lambda region: region[0].read(region[1], region[2]), regions):
        pass
    return [table.reshape(reader.shape) for reader, table in zip(readers, tables, strict=True)]
