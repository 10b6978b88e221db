"""Reads arrays of rows region by region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cnr_backends import Transfer
from cnr_store.chains.allocation import allocate
from cnr_store.chains.array_reader import ArrayReader

Array = np.ndarray[Any, Any]


def new_rows(reader: ArrayReader, rows: int) -> Array:
    """Memory for rows of an array, (rows, columns), its values undefined.

    Raises
    ------
    CorruptionError
        There is not that much memory.
    """
    return allocate((rows, reader.columns), reader.dtype, f"version {reader.version}, {reader.path}")


def read_regions(reader: ArrayReader, transfer: Transfer) -> Iterator[tuple[int, Array]]:
    """(first row, values) of regions that cover an array, ascending.

    Raises
    ------
    CorruptionError, VersionNotFoundError
    """

    def read(region: tuple[int, int]) -> tuple[int, Array]:
        first_row, rows = region
        values = new_rows(reader, rows)
        reader.read(first_row, values)
        return first_row, values

    return transfer.map(read, reader.regions())
