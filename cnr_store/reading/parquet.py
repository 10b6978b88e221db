"""Writes the tables of a version as Parquet files, by pyarrow (extra ``arrow``)."""

from __future__ import annotations

import json
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from zarr.abc.store import Store

from cnr_backends import Transfer
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader
from cnr_store.errors import OptionError
from cnr_store.format.record import Record
from cnr_store.format.stored_paths import place
from cnr_store.reading.atomic_output import PARQUET_ENDING, Target, new_file, new_folder
from cnr_store.reading.opening import model_arrays


def write_tables(
    catalog: Catalog, record: Record, target: Target, overwrite: bool, options: dict[str, Any]
) -> None:
    """Write one file a table into a folder, with the columns ``row`` and ``weight``. Memory holds pieces in flight.

    Raises
    ------
    OptionError, CorruptionError, StorageError
        As from `cnr_store.export`.
    """
    if isinstance(target, Store):
        raise OptionError("a Zarr store can't hold Parquet files: give a path or a URL")
    paths = {path: name for name, path in model_arrays(record).items() if record.arrays[path].kind != "dense"}
    # No two of these names meet on disks that fold case, and none is a device's.
    stored = place(sorted(paths), {})
    with (
        new_folder(target, overwrite, options, PARQUET_ENDING) as folder,
        Transfer(READ_WORKERS, READ_WORKERS) as transfer,
    ):
        assert isinstance(folder, str)  # the target is no store
        for path, name in paths.items():
            file = f"{folder.rstrip('/')}/{stored[path].split('/')[1]}{PARQUET_ENDING}"
            aliases = record.arrays[path].aliases
            note = {"name": name, "aliases": aliases, "version": record.id, "step": record.step}
            with new_file(file, overwrite, options) as opened:
                _write_rows(ArrayReader(catalog, record, path), note, opened, transfer)


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
