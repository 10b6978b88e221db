"""Exports a version's tables and dense tensors, one at a time and in pieces, for tools that know no versions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.core.array_spec import ArrayConfigLike
from zarr.errors import ContainsArrayError, ContainsGroupError
from zarr.storage import LocalStore

from cnr_backends import Backend, ObjectNotFoundError, Transfer, open_backend
from cnr_backends.urls import missing_package
from cnr_store.catalog.catalog import Catalog, Url, Version, open_record
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.chains.allocation import Array
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader, region_rows
from cnr_store.chains.dense import dense_layout, dense_object
from cnr_store.errors import CorruptionError, OptionError, option
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.format.safetensors import VERSION_NOTE, Header, encode_header, itemsize_of, place_tensors
from cnr_store.reading.atomic_output import Target, check_apart, new_file, new_folder
from cnr_store.reading.opening import model_arrays

ZARR_CHUNK_BYTES = 4 << 20
_COMPLETE, _UNFINISHED = "cnr_version", "cnr_export"
"""Attributes of a group that was exported, and of one that is being exported: the latter has its arrays' paths."""
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_CHUNK = re.compile(r"(/[0-9]+)*")
_EVERY_CHUNK: ArrayConfigLike = {"write_empty_chunks": True}
"""zarr omits chunks that equal the fill value, and takes any NaN for it, and -0.0 for 0."""


def export(
    url: Url,
    target: Target,
    version: Version = "latest",
    format: Literal["safetensors", "zarr", "parquet"] | None = None,  # noqa: A002 - the public name
    *,
    overwrite: bool = False,
    target_options: Mapping[str, Any] | None = None,
    **storage_options: Any,
) -> VersionInfo:
    """Write a version as one safetensors file, as a plain Zarr 3 group, or its tables as Parquet files.

    A safetensors file has the names of `state_dict` and the types of the model. It holds a tied tensor once for each
    name. A Zarr group has the paths that `cnr_store.open` shows, ``tables/NAME/weight`` and ``dense/model/NAME``; its
    arrays are unsharded and in Zarr's own compression. Its attribute ``names`` gives these paths by the model's names.
    Tables of bfloat16 are float32 there, and dense tensors that Zarr lacks a type for are unsigned integers with the
    attribute ``torch_dtype``.

    Parquet (extra ``arrow``) has tables alone, in a folder with a file for each, ``NAME.parquet``. Its columns are
    ``row``, the row number, and ``weight``, a fixed-size list. Tables of bfloat16 are float32 there, too. The schema's
    metadata ``cnr`` is JSON with the table's name in the model, its further names, and the version.

    Memory is bounded by the pieces in flight. A file, or a local folder, appears when it is complete. A group elsewhere
    is complete when it has the attribute ``cnr_version``. Parquet files elsewhere appear one by one, each complete.

    Parameters
    ----------
    url, storage_options
        The store: any fsspec URL, a path, or a Zarr store; options for the filesystem, as in fsspec.
    version
        An id, a `VersionInfo`, a step, or ``latest``.
    target
        A path or fsspec URL; for Zarr also a Zarr store.
    format
        By default ``zarr`` if `target` is a Zarr store or ends in ``.zarr``, ``parquet`` if it ends in ``.parquet``,
        otherwise ``safetensors``. Without a format, names that end as torch's files do (``.pt``, ``.pth``, ``.bin``,
        ``.ckpt``) are refused.
    overwrite
        Whether to replace an existing file, or the folder of an earlier export in this format, also of one that was
        cut off. A folder with anything else in it is refused.
    target_options
        For the target's filesystem.

    Raises
    ------
    OptionError
        The target exists, or a store is there; the format is unknown or torch's; safetensors can't hold a tensor.
    EmptyStoreError, VersionNotFoundError, CorruptionError
    cnr_backends.StorageError
        The target can't be written.
    """
    chosen = _format_of(target) if format is None else format
    if chosen not in ("safetensors", "zarr", "parquet"):
        raise OptionError(f"format {chosen!r}: choose 'parquet', 'safetensors' or 'zarr'")
    write = (
        _parquet_writer() if chosen == "parquet" else _write_file if chosen == "safetensors" else _write_group
    )
    catalog, record = open_record(url, version, **storage_options)
    check_apart(target, catalog.backend.url, overwrite, dict(target_options or {}))
    write(catalog, record, target, overwrite, dict(target_options or {}))
    return VersionInfo.from_record(record)


def _format_of(target: Target) -> str:
    ending = "" if isinstance(target, Store) else str(target).rstrip("/").rpartition(".")[2]
    if isinstance(target, Store) or ending == "zarr":
        return "zarr"
    if str(target).lower().endswith(_OF_TORCH):
        raise OptionError(
            f"can't write {target}: files called {', '.join(_OF_TORCH)} are torch's. Give a target that ends in "
            ".safetensors, or one in .zarr or .parquet, which is a folder"
        )
    return "parquet" if ending == "parquet" else "safetensors"


def _parquet_writer() -> Callable[[Catalog, Record, Target, bool, dict[str, Any]], None]:
    if find_spec("pyarrow") is None:
        raise OptionError("format 'parquet' needs pyarrow: pip install 'cnr-store[arrow]'")
    from cnr_store.reading.parquet import write_tables

    return write_tables


def _write_file(
    catalog: Catalog, record: Record, target: Target, overwrite: bool, options: dict[str, Any]
) -> None:
    paths, aliases = model_arrays(record), {}
    for name, path in list(paths.items()):
        for alias in record.arrays[path].aliases:
            paths[alias], aliases[alias] = path, name
    places = place_tensors({name: _type(catalog, record, path) for name, path in paths.items()})
    # Readers of the transformers library ask for the format.
    metadata = {"format": "pt", VERSION_NOTE: record.id, "cnr_step": str(record.step)}
    header = encode_header(Header(places, aliases), metadata)
    with new_file(target, overwrite, options) as file, Transfer(READ_WORKERS, READ_WORKERS) as transfer:
        file.write(header)
        for name in places:
            for piece in _pieces(catalog, record, paths[name], transfer):
                file.write(piece)


def _type(catalog: Catalog, record: Record, path: str) -> tuple[str, tuple[int, ...]]:
    """Element type, as torch calls it, and shape of an array."""
    entry = record.arrays[path]
    if entry.kind != "dense":
        return entry.element, entry.shape
    grid = dense_layout(catalog, record, path)
    element = grid.torch_dtype or grid.dtype.name
    if itemsize_of(element) not in (None, grid.dtype.itemsize):
        raise CorruptionError(f"{record.home}, {path}: {grid.dtype} does not hold the bits of {element[:40]}")
    return element, grid.shape


def _pieces(catalog: Catalog, record: Record, path: str, transfer: Transfer) -> Iterator[memoryview]:
    """The bytes of an array in its true type, little-endian, in C order."""
    entry = record.arrays[path]
    if entry.kind == "dense":
        for _, values in _dense_chunks(catalog, record, path):
            yield values.reshape(-1).view(np.uint8).data
        return
    for _, values in ArrayReader(catalog, record, path).read_regions(transfer):
        if entry.element == "bfloat16":  # float32 holds it exactly, in its upper half
            values = (values.view(np.uint32) >> 16).astype("<u2")
        yield values.astype(values.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data


def _dense_chunks(catalog: Catalog, record: Record, path: str) -> Iterator[tuple[int, Array]]:
    """(first index along the first axis, values) of each chunk of a dense array."""
    grid = dense_layout(catalog, record, path)
    for index in range(grid.chunks):
        data = memoryview(dense_object(catalog, record, path, grid, index))[:-4]
        values = np.frombuffer(data, grid.dtype.newbyteorder("<")).reshape(grid.chunk)
        first = index * grid.chunk[0] if grid.shape else 0
        yield first, values[: grid.shape[0] - first] if grid.shape else values


def _write_group(
    catalog: Catalog, record: Record, target: Target, overwrite: bool, options: dict[str, Any]
) -> None:
    paths = model_arrays(record)
    names = {alias: path for name, path in paths.items() for alias in (name, *record.arrays[path].aliases)}
    with (
        new_folder(target, overwrite, options, _is_earlier) as place,
        Transfer(READ_WORKERS, READ_WORKERS) as transfer,
    ):
        if overwrite:
            _remove_objects(place, options, transfer)
        # No name is too long for a file, and no two meet on disks that fold case.
        stored = layout.place(sorted(paths.values()), {})
        group = _new_group(place, options, list(stored.values()))
        for path, target_path in stored.items():
            if record.arrays[path].kind == "dense":
                _copy_dense(catalog, record, path, group, target_path)
            else:
                _copy_rows(ArrayReader(catalog, record, path), target_path, group, transfer)
        names = {name: stored[path] for name, path in names.items()}
        group.attrs.put({"names": names, _COMPLETE: {"id": record.id, "step": record.step}})


def _exported_paths(backend: Backend) -> set[str]:
    """The paths of the arrays in the group at a place, which an export made or begins to make; none if none did."""
    try:
        attributes = json.loads(backend.get(layout.ROOT_KEY))["attributes"]
        found = attributes["names"].values() if _COMPLETE in attributes else attributes[_UNFINISHED]
        return {path for path in found if isinstance(path, str)}
    except (ObjectNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def _is_earlier(backend: Backend, keys: Collection[str]) -> bool:
    """Whether all keys are of groups and arrays that an export made."""
    paths = _exported_paths(backend)
    groups = {path[:place] for path in paths for place, letter in enumerate(path) if letter == "/"}
    documents = {layout.ROOT_KEY, *(f"{each}/{layout.NODE}" for each in (*paths, *groups))}

    def is_chunk(key: str) -> bool:
        path, _, numbers = key.rpartition("/c")
        return path in paths and _CHUNK.fullmatch(numbers) is not None

    return all(key in documents or is_chunk(key) for key in keys)


def _remove_objects(place: str | Store, options: dict[str, Any], transfer: Transfer) -> None:
    """Delete one by one what lies at a place: filesystems would take its name for a pattern."""
    backend = open_backend(place, **options)
    keys = [key for key, _ in backend.list_keys("")]
    if not keys:
        return
    if not _is_earlier(backend, keys):
        raise OptionError(
            f"{place} has got other things than an earlier export meanwhile: choose another target"
        )
    # The export is no longer complete, and what is left of it is known for one.
    paths = sorted(_exported_paths(backend))
    group = {"zarr_format": 3, "node_type": "group", "attributes": {_UNFINISHED: paths}}
    backend.put(layout.ROOT_KEY, json.dumps(group).encode())
    for _ in transfer.map(backend.delete, [key for key in keys if key != layout.ROOT_KEY]):
        pass
    backend.delete(layout.ROOT_KEY)


def _new_group(place: str | Store, options: dict[str, Any], paths: list[str]) -> zarr.Group:
    try:
        # zarr may take a path for a chain of URLs.
        store = LocalStore(place) if isinstance(place, str) and "://" not in place else place
        attributes, found = {_UNFINISHED: paths}, options or None
        return zarr.create_group(store, attributes=attributes, zarr_format=3, storage_options=found)
    except (ContainsGroupError, ContainsArrayError, FileExistsError) as error:
        raise OptionError(
            f"{place} holds something: choose another target, or {option('overwrite')}"
        ) from error
    except (ValueError, TypeError, ImportError) as error:  # raised by zarr for places that it can't open
        raise OptionError(f"can't write to {place}: {missing_package(str(place), error)}") from error


def _copy_rows(reader: ArrayReader, path: str, group: zarr.Group, transfer: Transfer) -> None:
    row_bytes = reader.columns * reader.dtype.itemsize
    chunk_rows = region_rows(reader.links, row_bytes)
    while chunk_rows % 2 == 0 and chunk_rows * row_bytes > ZARR_CHUNK_BYTES:
        chunk_rows //= 2
    chunk_rows = min(chunk_rows, reader.shape[0])
    array = group.create_array(
        path,
        shape=reader.shape,
        dtype=reader.dtype,
        chunks=(chunk_rows, *reader.shape[1:]),
        fill_value=np.nan if reader.dtype.kind == "f" else 0,
        dimension_names=("row", "dim")[: len(reader.shape)],
        config=_EVERY_CHUNK,
    )
    for first_row, values in reader.read_regions(transfer):
        array[first_row : first_row + len(values)] = values.reshape(-1, *reader.shape[1:])


def _copy_dense(catalog: Catalog, record: Record, path: str, group: zarr.Group, target_path: str) -> None:
    grid = dense_layout(catalog, record, path)
    name = path.rpartition("/")[2]
    array = group.create_array(
        target_path,
        shape=grid.shape,
        dtype=grid.dtype,
        chunks=grid.chunk,
        fill_value=0,
        dimension_names=[f"{name}.{axis}" for axis in range(len(grid.shape))],
        attributes={"torch_dtype": grid.torch_dtype} if grid.torch_dtype else None,
        config=_EVERY_CHUNK,
    )
    for first, values in _dense_chunks(catalog, record, path):
        array[(slice(first, first + len(values)),) if grid.shape else ()] = values
