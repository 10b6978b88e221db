"""`cnr_store.rows`: single rows of an array, by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from cnr_store.catalog.catalog import Catalog, Url, Version, open_record
from cnr_store.chains.allocation import Array
from cnr_store.errors import OptionError
from cnr_store.format.layout import decode_name, table_parameter
from cnr_store.format.record import Record
from cnr_store.reading.overlay import Overlay


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
        + (f"there are {', '.join(near)}, ..." if near else "it has no arrays")
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
