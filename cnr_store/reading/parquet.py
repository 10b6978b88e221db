"""Writes the tables of a version as Parquet files, by pyarrow (extra ``arrow``)."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from zarr.abc.store import Store

from cnr_backends import Backend, KeyNameError, ObjectTooShortError, Transfer
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader
from cnr_store.errors import OptionError
from cnr_store.format.layout import place
from cnr_store.format.record import Record
from cnr_store.reading.atomic_output import Target, new_file, new_folder
from cnr_store.reading.opening import model_arrays

_ENDING = ".parquet"
_MAGIC = b"PAR1"
_TAIL = 8
"""Bytes of the footer's length and of the format's name, with which a file ends."""


def write_tables(
    catalog: Catalog, record: Record, target: Target, overwrite: bool, options: dict[str, Any]
) -> None:
    """Write one file a table into a folder, with the columns ``row`` and ``weight``. Memory holds pieces in flight."""
    if isinstance(target, Store):
        raise OptionError("a Zarr store can't hold Parquet files: give a path or a URL")
    paths = {path: name for name, path in model_arrays(record).items() if record.arrays[path].kind != "dense"}
    # No two of these names meet on disks that fold case, and none is a device's.
    stored = place(sorted(paths), {})
    with (
        new_folder(target, overwrite, options, _is_earlier, _ENDING) as folder,
        Transfer(READ_WORKERS, READ_WORKERS) as transfer,
    ):
        assert isinstance(folder, str)  # the target is no store
        for path, name in paths.items():
            file = f"{stored[path].split('/')[1]}{_ENDING}"
            reader, aliases = ArrayReader(catalog, record, path), record.arrays[path].aliases
            note = {"name": name, "aliases": aliases, "version": record.id, "step": record.step}
            note |= {"file": file, "rows": reader.shape[0], "type": [str(reader.dtype), reader.columns]}
            with new_file(f"{folder.rstrip('/')}/{file}", overwrite, options) as opened:
                _write_rows(reader, note, opened, transfer)


def _is_earlier(backend: Backend, keys: Collection[str]) -> bool:
    """Whether all are files that an export made: what is derived from one may have its note, but not all else."""
    return all(_is_table(backend, key) for key in keys)


def _is_table(backend: Backend, key: str) -> bool:
    try:
        tail = backend.get_suffix(key, _TAIL)
        footer = backend.get_suffix(key, min(int.from_bytes(tail[:4], "little") + _TAIL, backend.size(key)))
        found = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
        note, schema = json.loads((found.metadata or {})[b"cnr"]), found.schema.to_arrow_schema()
        dtype, columns = note["type"]
        types = [pa.int64(), pa.list_(pa.from_numpy_dtype(np.dtype(dtype)), columns)]
        is_alike = schema.names == ["row", "weight"] and schema.types == types
        return is_alike and (note["file"], note["rows"]) == (key, found.num_rows)
    except (ObjectTooShortError, KeyNameError, ValueError, KeyError, TypeError, pa.ArrowException):
        return False


def _write_rows(reader: ArrayReader, note: dict[str, Any], file: IO[bytes], transfer: Transfer) -> None:
    weight = pa.list_(pa.from_numpy_dtype(reader.dtype), reader.columns)
    fields = [pa.field("row", pa.int64(), nullable=False), pa.field("weight", weight, nullable=False)]
    schema = pa.schema(fields, metadata={"cnr": json.dumps(note)})
    # Dictionaries would take memory for each column, and floating-point values repeat too seldom.
    with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False) as writer:
        for first_row, values in reader.read_regions(transfer):
            rows = pa.array(np.arange(first_row, first_row + len(values)))
            lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), reader.columns)
            # A group of rows each, since a writer keeps its group in memory.
            writer.write_table(pa.table([rows, lists], schema=schema))
