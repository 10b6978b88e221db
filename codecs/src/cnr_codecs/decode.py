"""Rows out of proved payloads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import element_named, fill_value
from cnr_codecs.errors import RowsError
from cnr_codecs.kernels import decode as kernels
from cnr_codecs.payload import Payload, Scheme, Segment

Need = npt.NDArray[np.uint8]


def present_rows(payload: Payload) -> npt.NDArray[np.int64]:
    """The rows of all segments, increasing, int64 (n,)."""
    blocks = [block for segment in payload.segments for _, block in segment.row_set.blocks()]
    if not blocks:
        return np.empty(0, np.int64)
    return np.sort(np.concatenate(blocks).astype(np.int64))


def decode_into(payload: Payload, out: npt.NDArray[Any], need: Need, first_row: int = 0) -> int:
    """Write the rows of a payload that are asked for, and clear their marks. Releases the GIL.

    Args:
        payload: what `parse` returned.
        out: (n, dim) of the element type's array dtype; its rows may lie apart, as in a slice of columns.
        need: uint8 (n,), non-zero where a row of `out` is asked for. Marks of rows written are set to 0.
        first_row: the row of the chunk that the first row of `out` stands for; may be negative.

    Returns:
        How many rows were written. Evicted rows are, with the fill value.

    Raises:
        RowsError: `out` or `need` is not as said above.
    """
    flat, stride = _flat(payload, out)
    if (
        need.dtype != np.uint8
        or need.shape != (len(out),)
        or not need.flags.c_contiguous
        or not need.flags.writeable
    ):
        raise RowsError(
            f"need must be writable, contiguous uint8 ({len(out)},); got {need.dtype} {need.shape}"
        )
    if first_row >= payload.rows or first_row + len(out) <= 0:
        return 0
    written = 0
    for segment in payload.segments:
        for done, rows in segment.row_set.blocks():
            if segment.scheme is Scheme.ABSENT:
                written += _fill(payload, rows, out, need, first_row)
            else:
                written += _decode_block(payload, segment, done, rows, first_row, need, flat, stride)
    return written


def _flat(payload: Payload, out: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int]:
    """(a flat view from the first to the last value of `out`, how many values apart its rows are)."""
    dtype = element_named(payload.element).array
    if out.ndim != 2 or out.dtype != dtype or out.shape[1] != payload.dim or not out.flags.writeable:
        raise RowsError(
            f"out must be writable (n, {payload.dim}) {dtype} for this payload; "
            f"got shape {out.shape}, dtype {out.dtype}"
        )
    count, dim = out.shape
    if count == 0:
        return out.reshape(-1), dim
    stride, rest = divmod(out.strides[0], dtype.itemsize) if count > 1 else (dim, 0)
    if rest or stride < dim or (dim > 1 and out.strides[1] != dtype.itemsize) or not out.flags.aligned:
        raise RowsError(
            f"out must have its rows apart and each in one piece; its strides are {out.strides} bytes"
        )
    flat = np.lib.stride_tricks.as_strided(out, ((count - 1) * stride + dim,), (dtype.itemsize,))
    return flat, stride


def _fill(
    payload: Payload, rows: npt.NDArray[np.uint32], out: npt.NDArray[Any], need: Need, first_row: int
) -> int:
    places = rows.astype(np.int64) - first_row
    places = places[(places >= 0) & (places < len(need))]
    places = places[need[places] != 0]
    out[places] = fill_value(payload.element)
    need[places] = 0
    return len(places)


def _decode_block(
    payload: Payload,
    segment: Segment,
    done: int,
    rows: npt.NDArray[np.uint32],
    first_row: int,
    need: Need,
    flat: npt.NDArray[Any],
    stride: int,
) -> int:
    codes = segment.codes[done : done + len(rows)]
    if segment.scheme is Scheme.RAW:
        if payload.element == "bfloat16":
            return int(kernels.widen_bfloat16(codes, rows, first_row, need, flat.view(np.uint32), stride))
        return int(
            kernels.copy_raw(codes, rows, first_row, need, flat.view(np.uint8), stride * flat.itemsize)
        )
    scale, offset = (each[done : done + len(rows)] for each in segment.affine())
    bits, dim = segment.bits, payload.dim
    if payload.element == "float16":
        half = flat.view(np.uint16)
        return int(
            kernels.decode_float16(codes, rows, scale, offset, bits, dim, first_row, need, half, stride)
        )
    narrow = payload.element == "bfloat16"
    return int(
        kernels.decode_float32(codes, rows, scale, offset, bits, dim, narrow, first_row, need, flat, stride)
    )
