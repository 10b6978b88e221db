"""Validates that bytes are a payload before anything is decoded, because kernels check no bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element
from cnr_codecs.errors import PayloadError, UnsupportedPayloadError
from cnr_codecs.payload.coded import CodedRows, Grid, valid_move
from cnr_codecs.payload.head import (
    DEFAULT_MAX_DECODED_BYTES,
    Entry,
    Header,
    Reader,
    as_bytes,
    check_decoded_bytes,
    read_entries,
    read_header,
)
from cnr_codecs.payload.payload import (
    BOOK_COUNT,
    CODED,
    GRID,
    HEADER,
    PARAMETER_DTYPES,
    PARAMETERS_PER_ROW,
    SIGNED,
    ParameterType,
    Payload,
    Scheme,
    Segment,
    book_dtype,
    row_bytes,
)
from cnr_codecs.payload.rowset import validate_disjoint

# Scales have at most 16 significant bits, so that scale * code is exact: the lower 8 of a float32's 24 are zero.
SCALE_SPARE_BITS = np.uint32(0xFF)
# Of a float16's bits, those that are looked at in scales and in offsets; infinity is the least that is not finite.
_SIGNS, _INFINITE = np.array([[0xFFFF], [0x7FFF]], np.uint16), 0x7C00
# A code has 16 bits, so that step * code is exact as well.
STEP_BITS = 8
MIN_STEP, MAX_STEP = 2.0**-100, 2.0**100


def parse(data: Any, *, max_decoded_bytes: int = DEFAULT_MAX_DECODED_BYTES) -> Payload:
    """Validate a payload and return its parts. Codes are not copied.

    Parameters
    ----------
    data
        bytes, bytearray, memoryview or a contiguous array. It must not change while the payload is in use.
    max_decoded_bytes
        The most bytes that the decoded chunk may take.

    Raises
    ------
    PayloadLimitError
        The decoded chunk would take more bytes than that.
    UnsupportedPayloadError
        A newer release wrote it.
    PayloadError
        The bytes are not a valid payload. The message says why.
    """
    buffer = as_bytes(data)
    header = read_header(buffer)
    check_decoded_bytes(header, max_decoded_bytes)
    reader = Reader(buffer, HEADER.size)
    segments = tuple(_read_segment(reader, entry, header) for entry in read_entries(reader, header))
    if reader.position != len(buffer):
        raise PayloadError(
            f"payload: {len(buffer) - reader.position} bytes follow the last segment, "
            f"which ends at byte {reader.position}"
        )
    validate_disjoint([segment.row_set for segment in segments], header.rows)
    return Payload(header.rows, header.dim, header.element.name, header.seal, segments)


def _read_segment(reader: Reader, entry: Entry, header: Header) -> Segment:
    """Return the segment of an entry, whose body the reader stands at."""
    if entry.scheme in CODED:
        return _read_lattice(reader, entry, header)
    begin, count, where = reader.position, entry.row_set.count, entry.where
    parameters, books = _read_parameters(reader, entry)
    width = row_bytes(entry.scheme, entry.bits, header.dim)
    codes = reader.read(width * count, where, "codes").reshape(count, width)
    if entry.body_bytes != reader.position - begin:
        raise PayloadError(
            f"{where}: the body is said to take {entry.body_bytes} bytes, it takes {reader.position - begin}"
        )
    kinds = entry.scheme, entry.bits, entry.parameter_type
    segment = Segment(*kinds, entry.row_set, parameters, codes, books)
    _validate_values(segment, header.element, where)
    return segment


def _read_lattice(reader: Reader, entry: Entry, header: Header) -> Segment:
    """Return a lattice or a relative segment. Its codes are proven when they are decoded."""
    where, shape = entry.where, (entry.row_set.count, header.dim)
    step, scale, shift, flags, reserved, check = GRID.unpack(reader.read(GRID.size, where, "grid").tobytes())
    grid = Grid(step, entry.bits, scale, shift)
    may_move = grid.is_centered and header.element.name == "float32"
    is_known = may_move and valid_move(scale, shift)
    is_centered = grid.is_centered and entry.scheme is Scheme.LATTICE  # differences are near 0 as they are
    is_signed = flags == SIGNED and is_centered
    if not (is_known or not grid.is_moved) or reserved or (flags and not is_signed):
        raise UnsupportedPayloadError(
            f"{where}: scale {scale}, shift {shift}, flags {flags}, {reserved} of a grid are unknown: a newer release "
            "wrote it; install a newer cnr-codecs to read it"
        )
    if step != 0 if entry.bits else not valid_step(step):
        expected = (
            "0 on a floating grid" if entry.bits else "one of 8 significant bits from 2**-100 to 2**100"
        )
        raise PayloadError(f"{where}: the step {step!r} is not {expected}")
    if entry.body_bytes < GRID.size:
        raise PayloadError(f"{where}: a body of {entry.body_bytes} bytes has no room for the grid")
    data = reader.read(entry.body_bytes - GRID.size, where, "coded rows").data
    coded = CodedRows.parse(data, shape, check, grid, where, is_centered=is_centered, is_signed=is_signed)
    no_codes = np.empty((0, row_bytes(entry.scheme, entry.bits, header.dim)), np.uint8)
    kinds = entry.scheme, entry.bits, entry.parameter_type
    return Segment(*kinds, entry.row_set, grid.parameters, no_codes, coded=coded)


def valid_step(step: float) -> bool:
    """Whether it is a step of a lattice: of 8 significant bits, from 2**-100 to 2**100."""
    return MIN_STEP <= step <= MAX_STEP and math.frexp(step)[0] * (1 << STEP_BITS) % 1 == 0


def _read_parameters(reader: Reader, entry: Entry) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint32] | None]:
    """Return (parameters, the codebook of each row or None where rows share none).

    Both are copies: what is validated must not change afterwards.
    """
    where, scheme, bits, count = entry.where, entry.scheme, entry.bits, entry.row_set.count
    if scheme in PARAMETERS_PER_ROW:
        shape = PARAMETERS_PER_ROW[scheme], count
    elif scheme is Scheme.CODEBOOK:
        shape = count, 1 << bits
    else:
        (held,) = BOOK_COUNT.unpack_from(reader.read(BOOK_COUNT.size, where, "codebooks").data)
        if not 1 <= held <= count:
            raise PayloadError(f"{where}: {held} codebooks for {count} rows, expected 1 to {count}")
        shape = held, 1 << bits
    dtype = PARAMETER_DTYPES.get(entry.parameter_type, np.dtype("<f4"))
    stored = reader.read(shape[0] * shape[1] * dtype.itemsize, where, "parameters")
    parameters = np.frombuffer(stored.tobytes(), dtype).reshape(shape)
    if scheme is not Scheme.SHARED:
        return parameters, None
    kind = book_dtype(shape[0])
    numbers = reader.read(count * kind.itemsize, where, "codebook numbers")
    books = np.frombuffer(numbers.tobytes(), kind).astype(np.uint32)
    if int(books.max()) >= shape[0]:
        raise PayloadError(f"{where}: a row uses codebook {int(books.max())} of {shape[0]}")
    return parameters, books


def _validate_values(segment: Segment, element: Element, where: str) -> None:
    """Check that every decoder computes the same bits from the parameters, and that bools are 0 or 1."""
    if segment.scheme is Scheme.RAW and element.name == "bool" and int(segment.codes.max()) > 1:
        raise PayloadError(f"{where}: a bool is stored as {int(segment.codes.max())}")
    if segment.parameter_type is ParameterType.NONE or _valid_parameters(segment):
        return
    with np.errstate(all="ignore"):  # they may be anything
        widened = segment.parameters.astype(np.float32)
    if not np.isfinite(widened).all():
        raise PayloadError(f"{where}: a parameter is not finite")
    if segment.scheme not in PARAMETERS_PER_ROW:
        if (widened[:, 1:] < widened[:, :-1]).any():
            raise PayloadError(f"{where}: the centroids of a codebook are not ascending")
        return
    scales = widened[0]
    if np.signbit(scales).any():
        raise PayloadError(f"{where}: a scale is negative")
    if (scales.view(np.uint32) & SCALE_SPARE_BITS).any():
        raise PayloadError(f"{where}: a scale has more than 16 significant bits")
    # The span of the codes must be a finite float32.
    steps = ((1 << segment.bits) - 1) * (2 if segment.scheme is Scheme.SYMMETRIC else 1)
    if float(scales.max()) > float(np.finfo(np.float32).max) / steps:
        raise PayloadError(
            f"{where}: a scale of {float(scales.max())} overflows float32 with {segment.bits} bits"
        )


def _valid_parameters(segment: Segment) -> bool:
    """Whether one fast pass finds the segment's parameters valid: there is one for float16 scales and offsets."""
    if segment.scheme not in PARAMETERS_PER_ROW or segment.parameter_type is not ParameterType.FLOAT16:
        return False
    # As integers, negative and non-finite scales are the greatest.
    signs = _SIGNS[: len(segment.parameters)]
    return bool((segment.parameters.view(np.uint16) & signs).max(initial=0) < _INFINITE)
