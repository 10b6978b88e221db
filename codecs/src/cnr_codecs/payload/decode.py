"""Decodes rows of validated payloads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import element_named, fill_value, round_to_bfloat16
from cnr_codecs.errors import ParentError, PayloadError, RowsError
from cnr_codecs.kernels import decode as kernels
from cnr_codecs.kernels.decode import decode_float16, decode_float32, scratch_for
from cnr_codecs.kernels.pack import codes_apart
from cnr_codecs.payload.lattice import decode_lattice, takes_relative
from cnr_codecs.payload.payload import CODED, ParameterType, Payload, Scheme, Segment
from cnr_codecs.payload.pending import Need, Pending, Target
from cnr_codecs.payload.rowset import RowSetKind, rows_of

# Stand for parameters that a segment does not have. They are read-only, as parameters are: so one compiled kernel
# serves both.
_NO_HALVES, _NO_FLOATS = np.empty((0, 0), np.uint16), np.empty((0, 0), np.float32)
_NO_HALVES.flags.writeable = _NO_FLOATS.flags.writeable = False
_NO_ROWS = np.empty(0, np.uint32)


def present_rows(payload: Payload) -> npt.NDArray[np.int64]:
    """Return the rows that a payload has, increasing, int64 (n,).

    That is 8 bytes a row, which may be more than the decoded chunk takes.

    Parameters
    ----------
    payload
        As `parse` returns it.
    """
    return rows_of([segment.row_set for segment in payload.segments])


def decode_into(
    payload: Payload,
    out: npt.NDArray[Any],
    need: Need,
    first_row: int = 0,
    pending: Pending | None = None,
) -> int:
    """Decode the wanted rows of a payload into `out`, and clear their marks.

    Return how many rows were written. Evicted rows count: the fill value is written for them. The GIL is released.
    Relative rows are added to what is pending, and wait for an older payload.

    Parameters
    ----------
    payload
        As `parse` returns it.
    out
        (n, dim) of the element type's array dtype. Its rows may lie apart, as in a slice of columns.
    need
        uint8 (n,), non-zero where a row of `out` is wanted. Marks of written rows are set to 0.
    first_row
        The row of the chunk that is row 0 of `out`. It may be negative.
    pending
        What newer payloads have of rows relative to this one. None: a relative row is an error.

    Raises
    ------
    RowsError
        `out` or `need` is not as above.
    PayloadError
        Compressed codes are damaged, a relative row is wanted and nothing may be pending, or pending rows do not fit
        those of the payload. `need` is as it was; `out` and what is pending are undefined where rows are wanted.
    """
    target = _target(payload, out, need, first_row)
    target.pending = pending
    if first_row >= payload.rows or first_row + len(out) <= 0:
        return 0
    if pending is None and all(segment.scheme not in CODED for segment in payload.segments):
        return sum(_decode_segment(payload, segment, target) for segment in payload.segments)
    before = need.copy()
    try:
        return sum(_decode_segment(payload, segment, target) for segment in payload.segments)
    except PayloadError as error:
        need[:] = before
        kind = ParentError if isinstance(error, ParentError) else PayloadError
        raise kind(f"payload: {error}") from error


def _target(payload: Payload, out: npt.NDArray[Any], need: Need, first_row: int) -> Target:
    dtype = element_named(payload.element).array
    if out.ndim != 2 or out.dtype != dtype or out.shape[1] != payload.dim or not out.flags.writeable:
        raise RowsError(
            f"out must be writable (n, {payload.dim}) {dtype} for this payload; "
            f"got shape {out.shape}, dtype {out.dtype}"
        )
    count, dim = out.shape
    if need.dtype != np.uint8 or need.shape != (count,) or not need.flags.carray:
        raise RowsError(f"need must be writable, contiguous uint8 ({count},); got {need.dtype} {need.shape}")
    if out.flags.carray:
        return Target(out, need, first_row, out.reshape(-1), dim)
    stride, rest = divmod(out.strides[0], dtype.itemsize) if count > 1 else (dim, 0)
    if rest or stride < dim or (dim > 1 and out.strides[1] != dtype.itemsize) or not out.flags.aligned:
        raise RowsError(f"rows of out must be contiguous and in order; got strides {out.strides}")
    flat = np.lib.stride_tricks.as_strided(out, ((count - 1) * stride + dim,), (dtype.itemsize,))
    return Target(out, need, first_row, flat, stride)


def _decode_segment(payload: Payload, segment: Segment, target: Target) -> int:
    if takes_relative(payload, segment, target.need, target.first_row, target.pending):
        return 0
    if segment.scheme is Scheme.ABSENT:
        return _fill(payload, segment, target)
    if segment.scheme is Scheme.RAW:
        return _copy(payload, segment, target)
    if segment.scheme in (Scheme.CODEBOOK, Scheme.SHARED):
        return _look_up(payload, segment, target)
    if segment.scheme is Scheme.LATTICE:
        return decode_lattice(payload, segment, target)
    return _dequantize(payload, segment, target)


def _fill(payload: Payload, segment: Segment, target: Target) -> int:
    written = 0
    for _, places in segment.row_set.placed(target.first_row, len(target.need)):
        places = places[target.need[places] != 0]
        target.out[places] = fill_value(payload.element)
        target.need[places] = 0
        written += len(places)
    return written


def _copy(payload: Payload, segment: Segment, target: Target) -> int:
    written = 0
    for start, rows in target.held(segment.row_set):
        codes = segment.codes[start : start + len(rows)]
        block = codes.reshape(-1), codes.shape[1], rows
        if payload.element == "bfloat16":
            written += kernels.widen_bfloat16(*block, target.place(np.uint32), _numbers(rows))
        else:
            written += kernels.copy_raw(*block, target.place(np.uint8), _numbers(rows))
    return written


def _numbers(rows: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Scratch memory in which kernels list which of these rows are wanted."""
    chosen, places = np.empty((2, len(rows) + 1), np.int64)
    return chosen, places


def _dequantize(payload: Payload, segment: Segment, target: Target) -> int:
    halves, floats = _NO_HALVES, _NO_FLOATS
    if segment.parameter_type is ParameterType.FLOAT16:
        halves = segment.parameters.view(np.uint16)
    else:
        floats = segment.parameters.view(np.float32)
    dim, bits = payload.dim, segment.bits
    stored = (segment.codes.reshape(-1), halves, floats, bits, dim, codes_apart(dim, bits))
    scratch = scratch_for(dim, bits)
    written = 0
    for part in _parts(segment, target):
        if payload.element == "float16":
            numbers = np.arange(len(scratch[-1]))
            wide = np.empty(len(numbers) * dim, np.float32)
            written += decode_float16(stored, part, target.place(np.uint16), scratch, wide, numbers)
        else:
            narrow = payload.element == "bfloat16"
            written += decode_float32(stored, part, target.place(np.float32), narrow, scratch)
    return written


def _parts(segment: Segment, target: Target) -> Iterator[tuple[int, int, npt.NDArray[np.uint32]]]:
    """Yield (start, stop, rows) of parts of the segment: `rows` are the chunk's rows.

    For a prefix `rows` is empty, because the segment's row i is the chunk's row i.
    """
    row_set = segment.row_set
    if row_set.kind is RowSetKind.PREFIX:
        yield max(0, target.first_row), min(row_set.count, target.first_row + len(target.need)), _NO_ROWS
        return
    for start, rows in target.held(row_set):
        yield start, start + len(rows), rows


def _look_up(payload: Payload, segment: Segment, target: Target) -> int:
    place = target.place(np.uint16 if payload.element == "float16" else np.float32)
    shared = _rounded(segment.parameters, payload.element) if segment.books is not None else None
    written = 0
    for start, rows in target.held(segment.row_set):
        stop = start + len(rows)
        if shared is None or segment.books is None:
            table = _rounded(segment.parameters[start:stop], payload.element)
            books = np.arange(len(rows), dtype=np.uint32)
        else:
            table, books = shared, segment.books[start:stop]
        kinds = rows, table, books, segment.bits, payload.dim, place, _numbers(rows)
        codes, unpacked = segment.codes[start:stop].reshape(-1), np.empty(payload.dim + 8, np.uint8)
        written += kernels.look_up(codes, *kinds, unpacked)
    return written


def _rounded(centroids: npt.NDArray[Any], element: str) -> npt.NDArray[Any]:
    """Return the values that codes of these centroids decode to: float32, or the bits of float16."""
    wide = centroids.astype(np.float32)
    if element == "bfloat16":
        return round_to_bfloat16(wide)
    if element == "float16":
        with np.errstate(over="ignore", under="ignore"):
            return wide.astype(np.float16).view(np.uint16)
    return wide
