"""What one version is to hold: plain data, made on the training thread, written behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cnr_codecs import RowCodec, array_dtype
from cnr_store.format.grid import Grid, choose_grid

Array = np.ndarray[Any, Any]


class RowSource(Protocol):
    """Where the values of the rows to write come from."""

    def values(self, begin: int, end: int) -> Array:
        """(end - begin, columns), C-contiguous: the rows at positions begin ... end - 1 of the write's ids."""


@dataclass(frozen=True)
class RowsWrite:
    """Rows of one array to write.

    Attributes
    ----------
    path, shape, element
        Place in the version; (rows, dim) or (rows,); the payload's element type.
    base
        Version that this one's rows lie over; None for a whole array.
    ids
        (n,) int64 ascending: the rows written; None for all.
    source, codec
        Where their values come from and how they are encoded.
    """

    path: str
    shape: tuple[int, ...]
    element: str
    base: str | None
    ids: Array | None
    source: RowSource
    codec: RowCodec
    aliases: tuple[str, ...] = ()

    @property
    def rows_written(self) -> int:
        return self.shape[0] if self.ids is None else len(self.ids)

    def grid(self) -> Grid:
        columns = (*self.shape, 1)[1]
        bytes_per_row = self.codec.bytes_per_row(columns, self.element)
        return choose_grid(
            self.shape[0], columns, array_dtype(self.element).itemsize, bytes_per_row, self.ids
        )


@dataclass(frozen=True)
class DenseWrite:
    """A dense array to write whole, as numpy values and torch's name of their type where numpy has none."""

    path: str
    values: Array
    torch_dtype: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All that one version is to hold: plain data, made on the training thread."""

    step: int
    previous: str | None
    rows: Sequence[RowsWrite]
    dense: Sequence[DenseWrite]
    state: Any
    policy: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    restores: int = 0
    metadata: Any = None
