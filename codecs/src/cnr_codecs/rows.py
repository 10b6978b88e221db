"""Rows stored bit for bit: the lossless codec, and the raw segments of the other codecs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, element_named
from cnr_codecs.errors import RowsError
from cnr_codecs.payload.payload import MAX_U32, ParameterType, Scheme, Segment, build
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.protocol import NamedCodec, Offsets, Rows


@dataclass(frozen=True)
class LosslessRows(NamedCodec):
    """Stores every row bit for bit, for every element type."""

    _name: ClassVar[str] = "rows"

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Return the encoded bytes of a row of `dim` values, without its share of the row set."""
        return float(dim * element_named(element).stored.itemsize)

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """Return the payload of a chunk of `rows` rows that holds the given ones; see `RowCodec.encode_rows`."""
        kind, values, offsets = check_rows(values, offsets, rows, element)
        order = np.arange(len(values))
        segments = [raw_segment(values, offsets, rows, order, kind)] if len(values) else []
        return build(rows, values.shape[1], kind, segments, seal)


def check_rows(
    values: Rows, offsets: Offsets | None, rows: int, element: str
) -> tuple[Element, Rows, Offsets]:
    """Check the arguments of `RowCodec.encode_rows`.

    Return the element type, the values C-contiguous, and the offsets as an array.

    Parameters
    ----------
    values, offsets, rows, element
        As `RowCodec.encode_rows` takes them.

    Raises
    ------
    RowsError
        Shape, dtype or offsets are not as `RowCodec.encode_rows` says.
    """
    kind, values = check_values(values, rows, element)
    check_offsets(offsets, len(values), rows)
    return kind, values, np.arange(len(values)) if offsets is None else offsets


def check_values(values: Rows, rows: int, element: str) -> tuple[Element, Rows]:
    """Check the values alone. Return the element type, and the values C-contiguous."""
    kind = element_named(element)
    if values.ndim != 2 or values.dtype != kind.array:
        raise RowsError(
            f"{element} rows must be (n, dim) {kind.array}; got shape {values.shape}, dtype {values.dtype}"
        )
    dim = values.shape[1]
    if not (1 <= rows <= MAX_U32 and 1 <= dim <= MAX_U32):
        raise RowsError(f"a chunk must have 1 to {MAX_U32} rows and columns, got {rows} x {dim}")
    values = np.ascontiguousarray(values, kind.array)
    if kind.name == "bfloat16" and values.view(np.uint32).astype(np.uint16).any():
        raise RowsError("bfloat16 rows have values that bfloat16 can't represent; round them first")
    return kind, values


def check_offsets(offsets: Offsets | None, count: int, rows: int) -> None:
    """Check the offsets of `count` rows alone. `RowsError` if the offsets are not as `RowCodec.encode_rows` says."""
    if offsets is None:
        if count > rows:
            raise RowsError(f"{count} rows don't fit into a chunk of {rows}")
        return
    if offsets.shape != (count,) or offsets.dtype.kind not in "iu":
        raise RowsError(
            f"offsets must be ({count},) integers; got shape {offsets.shape}, dtype {offsets.dtype}"
        )
    if count and not (
        int(offsets[0]) >= 0 and int(offsets[-1]) < rows and (offsets[1:] > offsets[:-1]).all()
    ):
        raise RowsError(f"offsets must increase strictly from 0 or more to below the chunk's {rows} rows")


def raw_segment(
    values: Rows, offsets: Offsets, rows: int, order: npt.NDArray[np.intp], element: Element
) -> Segment:
    """Return the segment that stores rows bit for bit.

    Parameters
    ----------
    values, offsets
        As `check_rows` returns them.
    rows
        The number of rows of the chunk.
    order
        (m,): which rows of `values` the segment stores, increasing.
    element
        The element type of the values.
    """
    chosen = values if len(order) == len(values) else values[order]
    if element.name == "bfloat16":
        chosen = chosen.view(np.uint32) >> np.uint32(16)
    codes = np.ascontiguousarray(chosen, element.stored).view(np.uint8)
    row_set = RowSet.of(offsets[order], rows)
    no_parameters = np.empty((0, len(order)), np.float32)
    return Segment(Scheme.RAW, 8 * element.stored.itemsize, ParameterType.NONE, row_set, no_parameters, codes)
