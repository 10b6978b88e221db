"""Encodes and decodes whole chunks, as array libraries do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import array_dtype, element_of, fill_value
from cnr_codecs.payload.decode import decode_into
from cnr_codecs.payload.payload import Payload
from cnr_codecs.protocol import RowCodec

Chunk = npt.NDArray[Any]


def encode_dense(codec: RowCodec, values: Chunk) -> bytes:
    """Return the payload of a chunk (rows, dim) of at least one row.

    Rows whose values are all the fill value's NaN are not stored, because absent rows decode to the same bits. Array
    libraries pad the last chunk with such rows.
    """
    element = element_of(values.dtype)
    values = np.ascontiguousarray(values, array_dtype(element))
    empty = _is_fill(values)
    if not empty.any():
        return codec.encode_rows(values, None, len(values), element=element)
    held = np.flatnonzero(~empty)
    return codec.encode_rows(values[held], held, len(values), element=element)


def _is_fill(values: Chunk) -> npt.NDArray[np.bool_]:
    """Return which rows, bool (rows,), equal what absent rows decode to: the same NaN, bit for bit."""
    if values.dtype.kind != "f":
        return np.zeros(len(values), np.bool_)
    bits = np.dtype(f"u{values.dtype.itemsize}")
    fill = np.full(1, np.nan, values.dtype).view(bits)[0]
    # The first value alone rules out nearly every row.
    empty: npt.NDArray[np.bool_] = values.view(bits)[:, 0] == fill
    suspects = np.flatnonzero(empty)
    empty[suspects] = (values[suspects].view(bits) == fill).all(axis=1)
    return empty


def decode_dense(payload: Payload, out: Chunk | None = None) -> Chunk:
    """Return the chunk (rows, dim), decoded into `out` if given. Absent rows get the fill value."""
    if out is None:
        out = np.empty((payload.rows, payload.dim), array_dtype(payload.element))
    need = np.ones(len(out), np.uint8)
    if decode_into(payload, out, need) < len(out):
        out[need != 0] = fill_value(payload.element)
    return out
