"""Opening a store for reading: `versions`, `open`, `view`, `rows`, `state_dict`, `state_of`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from cnr_backends import Transfer, open_backend
from cnr_store.catalog.catalog import (
    Catalog,
    Url,
    Version,
    count_parts,
    open_record,
    read_state_part,
    tell_of_no_store,
)
from cnr_store.catalog.version_info import VersionInfo, VersionList
from cnr_store.chains.allocation import Array
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader
from cnr_store.chains.dense import read_dense
from cnr_store.errors import CorruptionError, FormatError, OptionError
from cnr_store.format.layout import decode_name, table_parameter
from cnr_store.format.record import Record
from cnr_store.format.state import Json, decode_state
from cnr_store.format.state_arrays import Leaf, OfClass
from cnr_store.reading.overlay import Overlay

_BESIDE_STATE = ("dense/optim/", "dense/state/")


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


def rows(
    url: Url,
    name: str,
    ids: Sequence[int] | NDArray[np.integer[Any]],
    version: Version = "latest",
    **storage_options: Any,
) -> NDArray[Any]:
    """Rows of a table, of its optimizer state, or of a dense tensor. Reads only the chunks that they are in.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    name
        A table (``"users"``), its parameter (``"users.weight"``), optimizer state of it (``"users/sum"``), a dense
        tensor, or an array's path in the version.
    ids
        (n,) integers: the row numbers, in any order; one may come twice.
    version
        An id, a `VersionInfo`, a step, a tag, or ``latest``.
    storage_options
        For the filesystem, as in fsspec.

    Returns
    -------
    (n, dim), or (n,) of an array of one dimension: the rows in the order of `ids`. Those of bfloat16 come as float32.

    Raises
    ------
    OptionError
        The version has no array of that name, the array no such row, or its numbers are of a type that numpy lacks.
    EmptyStoreError, VersionNotFoundError, CorruptionError

    Examples
    --------
    >>> cnr_store.rows("s3://bucket/run", "users", [7, 300_000], "best")  # doctest: +SKIP
    """
    catalog, record = open_record(url, version, **storage_options)
    path = find_array(record, name)
    wanted = np.asarray(ids)
    if wanted.ndim != 1 or (wanted.dtype.kind not in "iu" and wanted.size):
        raise OptionError(f"ids of shape {wanted.shape} and type {wanted.dtype}: give a list of integers")
    shape = record.arrays[path].shape
    if not shape:
        raise OptionError(f"{name} is one number at version {record.id} and has no rows: state_dict() has it")
    count = shape[0]
    outside = wanted[(wanted < 0) | (wanted >= count)] if wanted.size else wanted
    if len(outside):
        raise OptionError(f"{name} has no row {outside[0]} at version {record.id}: it has {count:,} rows")
    return read_array(catalog, record, path, wanted.astype(np.int64))


def read_array(catalog: Catalog, record: Record, path: str, ids: NDArray[np.int64] | None = None) -> Array:
    """Rows of an array of a version, or, without `ids`, all of it. Numbers of bfloat16 come as float32."""
    array = zarr.open_array(Overlay(catalog, record), path=path, mode="r")
    torch_dtype = array.attrs.get("torch_dtype") if record.arrays[path].kind == "dense" else None
    if torch_dtype not in (None, "bfloat16"):
        raise OptionError(
            f"{path} holds {torch_dtype}, which numpy lacks: state_dict() has its bits, as unsigned integers"
        )
    values = np.asarray(array[...] if ids is None else array.oindex[ids])
    return values if torch_dtype is None else (values.astype(np.uint32) << 16).view(np.float32)


def find_array(record: Record, name: str) -> str:
    """The path of the array that users call `name`."""
    known = array_names(record)
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.5) or list(known)[:3]
    raise OptionError(
        f"version {record.id} has no array {name!r}: "
        + (f"there are {', '.join(near)}; `cnr info` lists all" if near else "it has no arrays")
    )


def own_names(path: str) -> list[str]:
    """What users call an array of the model, last the model's own name for it. Empty for optimizer state and others."""
    group, middle, last = path.split("/")
    if (group, middle) == ("dense", "model"):
        return [decode_name(last)]
    table = decode_name(middle)
    return [table, table_parameter(table)] if (group, last) == ("tables", "weight") else []


def array_names(record: Record) -> dict[str, str]:
    """The paths of a version's arrays, by every name that users have for them."""
    # A table may be called as the state of another one is, which then goes by its path alone.
    names: dict[str, str] = {}
    slots: dict[str, str] = {}
    for path, entry in record.arrays.items():
        group, middle, last = path.split("/")
        if group == "tables" and last != "weight":
            slots.setdefault(f"{decode_name(middle)}/{decode_name(last)}", path)
            continue
        for each in (*own_names(path), *entry.aliases):
            names.setdefault(each, path)
    return slots | names | {path: path for path in record.arrays}


def state_of(url: Url, version: Version = "latest", **storage_options: Any) -> dict[str, Any]:
    """What a version holds beside tables, tensors and optimizers, without a model and without torch.

    Arrays and tensors come as arrays; of a type that numpy lacks, as unsigned integers that hold their bits. Of a
    tensor of another class come its parts.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, a tag, or ``latest``.
    storage_options
        For the filesystem, as in fsspec.

    Returns
    -------
    ``version``: its `VersionInfo`. ``state``: what the `state` objects of the `Checkpointer` returned, by name.
    ``readers``: what `save` was given as `reader`, by rank; one of one process.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError, CorruptionError
    """
    catalog, record = open_record(url, version, **storage_options)
    doc, seen, where = catalog.state(record), set[str](), f"version {record.id} of {catalog.backend.url}"
    parts = [read_state_part(catalog, record, doc, rank) for rank in range(count_parts(doc))] or [doc]

    def member(part: Any, name: str) -> Any:
        if not isinstance(part, dict) or name not in part:
            raise CorruptionError(f"{where}: the state has no {name!r}")
        return decode_tree(catalog, record, part[name], where, seen, _plain)

    return {
        "version": VersionInfo.from_record(record),
        "state": member(doc, "objects"),
        "readers": [member(part, "reader") for part in parts],
    }


def decode_tree(
    catalog: Catalog,
    record: Record,
    doc: Json,
    where: str,
    seen: set[str],
    from_leaf: Callable[[Leaf], object],
) -> Any:
    """Decode the state of a version, or a part of it, with the arrays that stand beside it.

    `seen`: paths of the arrays that other parts have referred to. Those of this one are added.
    """

    def read(path: str) -> Array:
        # Each reference has an array of its own, so that a small state can't become many large arrays.
        if path in seen or not path.startswith(_BESIDE_STATE):
            raise FormatError(f"{where}: the state refers to {path[:80]!r}, or refers to it twice")
        seen.add(path)
        return read_dense(catalog, record, path)[0]

    return decode_state(doc, read=read, from_leaf=from_leaf)


def _plain(leaf: Leaf) -> Any:
    return leaf.value if isinstance(leaf, OfClass) else leaf.laid_out()
