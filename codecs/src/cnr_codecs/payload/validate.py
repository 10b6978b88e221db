"""Validates that bytes are a payload before anything is decoded, because kernels check no bounds.

Sizes are computed with Python's integers, so no hostile number can overflow them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import BY_CODE, Element
from cnr_codecs.errors import PayloadError, PayloadLimitError
from cnr_codecs.kernels.validate import valid_floats, valid_halves
from cnr_codecs.payload.payload import (
    BOOK_COUNT,
    HEADER,
    MAGIC,
    MAX_SEGMENTS,
    PARAMETER_DTYPES,
    PARAMETERS_PER_ROW,
    SEGMENT,
    VERSION,
    ParameterType,
    Payload,
    Scheme,
    Segment,
    book_dtype,
    checked_seal,
    row_bytes,
)
from cnr_codecs.payload.rowset import RowSetKind, encoded_bytes, validate_row_set

DEFAULT_MAX_DECODED_BYTES = 64 << 20
# Scales have at most 16 significant bits, so that scale * code is exact: the lower 8 of a float32's 24 are zero.
SCALE_SPARE_BITS = np.uint32(0xFF)


def reseal(data: Any, seal: int) -> bytes:
    """Return the same payload with another seal. Nothing is quantized again.

    Parameters
    ----------
    data
        A payload, as bytes, bytearray, memoryview or a contiguous array.
    seal
        64 bits that tie the payload to its place in a store; 0 for none.

    Raises
    ------
    PayloadError
        `data` doesn't start with the header of a payload.
    RowsError
        The seal is not an unsigned 64-bit integer.
    """
    buffer = _as_bytes(data)
    _, element, segments, rows, dim, _ = _read_header(buffer)
    return (
        HEADER.pack(MAGIC, VERSION, element.code, segments, rows, dim, checked_seal(seal))
        + buffer[HEADER.size :].tobytes()
    )


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
    PayloadError
        The bytes are not a valid payload. The message says why.
    """
    buffer = _as_bytes(data)
    seal, element, segment_count, rows, dim, decoded_bytes = _read_header(buffer)
    if decoded_bytes > max_decoded_bytes:
        raise PayloadLimitError(
            f"payload: {rows} x {dim} {element.name} values take {decoded_bytes} bytes when decoded, "
            f"the limit is {max_decoded_bytes}; raise max_decoded_bytes if you trust the payload"
        )
    if segment_count > MAX_SEGMENTS:
        raise PayloadError(f"payload: {segment_count} segments, the limit is {MAX_SEGMENTS}")
    reader = _Reader(buffer, HEADER.size)
    segments = tuple(_read_segment(reader, i, element, rows, dim) for i in range(segment_count))
    if reader.position != len(buffer):
        raise PayloadError(
            f"payload: {len(buffer) - reader.position} bytes follow the last segment, "
            f"which ends at byte {reader.position}"
        )
    _validate_disjoint(segments, rows)
    return Payload(rows, dim, element.name, seal, segments)


class _Reader:
    """Reads consecutive parts of a buffer, and raises where one would pass its end."""

    def __init__(self, buffer: npt.NDArray[np.uint8], position: int) -> None:
        self.buffer = buffer
        self.position = position

    def read(self, size: int, where: str, what: str) -> npt.NDArray[np.uint8]:
        end = self.position + size
        if end > len(self.buffer):
            raise PayloadError(
                f"{where}: {what} truncated: {size} bytes needed at byte {self.position} of {len(self.buffer)}"
            )
        view = self.buffer[self.position : end]
        self.position = end
        return view


def _as_bytes(data: Any) -> npt.NDArray[np.uint8]:
    try:
        view = memoryview(data)
        buffer = np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else _NO_BYTES
    except (TypeError, ValueError) as error:
        raise PayloadError(
            f"payload: expected contiguous bytes, got {type(data).__name__}: {error}"
        ) from error
    # Kernels are compiled for read-only codes alone.
    buffer.flags.writeable = False
    return buffer


_NO_BYTES = np.empty(0, np.uint8)
# A look-up in a dict is cheaper than a call of an enumeration.
_SCHEMES = {int(each): each for each in Scheme}
_PARAMETER_TYPES = {int(each): each for each in ParameterType}
_ROW_SET_KINDS = {int(each): each for each in RowSetKind}


def _read_header(buffer: npt.NDArray[np.uint8]) -> tuple[int, Element, int, int, int, int]:
    """Return (seal, element, segments, rows, dim, decoded bytes)."""
    if len(buffer) < HEADER.size:
        raise PayloadError(f"payload: {len(buffer)} bytes, the header alone takes {HEADER.size}")
    magic, version, code, segments, rows, dim, seal = HEADER.unpack_from(buffer.data)
    if magic != MAGIC:
        raise PayloadError(f"payload: it starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise PayloadError(
            f"payload: version {version} is unknown, this release reads version {VERSION}; upgrade"
        )
    if code not in BY_CODE:
        raise PayloadError(f"payload: element type {code} is unknown")
    if rows == 0 or dim == 0:
        raise PayloadError(f"payload: the chunk of {rows} x {dim} values is empty")
    element = BY_CODE[code]
    return seal, element, segments, rows, dim, rows * dim * element.array.itemsize


def _read_segment(reader: _Reader, index: int, element: Element, rows: int, dim: int) -> Segment:
    where = f"payload: segment {index}"
    scheme_code, bits, parameter_code, kind_code, count = SEGMENT.unpack_from(
        reader.read(SEGMENT.size, where, "head").data
    )
    scheme, parameter_type = _validate_scheme(scheme_code, bits, parameter_code, element, where)
    kind = _ROW_SET_KINDS.get(kind_code)
    if kind is None:
        raise PayloadError(f"{where}: row-set kind {kind_code} is unknown")
    if not 1 <= count <= rows:
        raise PayloadError(f"{where}: {count} rows, expected 1 to {rows}")
    row_data = reader.read(encoded_bytes(kind, count, rows), where, "row set")
    row_set = validate_row_set(kind, count, rows, row_data, where)
    parameters, books = _read_parameters(reader, scheme, bits, parameter_type, count, where)
    width = row_bytes(scheme, bits, dim)
    codes = reader.read(width * count, where, "codes").reshape(count, width)
    segment = Segment(scheme, bits, parameter_type, row_set, parameters, codes, books)
    _validate_values(segment, element, where)
    return segment


def _read_parameters(
    reader: _Reader, scheme: Scheme, bits: int, parameter_type: ParameterType, count: int, where: str
) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint32] | None]:
    """Return (parameters, the codebook of each row or None where rows share none).

    Both are copies: what is validated must not change afterwards.
    """
    if scheme in PARAMETERS_PER_ROW:
        shape = PARAMETERS_PER_ROW[scheme], count
    elif scheme is Scheme.CODEBOOK:
        shape = count, 1 << bits
    else:
        (held,) = BOOK_COUNT.unpack_from(reader.read(BOOK_COUNT.size, where, "codebooks").data)
        if not 1 <= held <= count:
            raise PayloadError(f"{where}: {held} codebooks for {count} rows, expected 1 to {count}")
        shape = held, 1 << bits
    dtype = PARAMETER_DTYPES.get(parameter_type, np.dtype("<f4"))
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


def _validate_scheme(
    scheme: int, bits: int, parameter: int, element: Element, where: str
) -> tuple[Scheme, ParameterType]:
    known, kind = _SCHEMES.get(scheme), _PARAMETER_TYPES.get(parameter)
    if known is None:
        raise PayloadError(f"{where}: scheme {scheme} is unknown")
    if kind is None:
        raise PayloadError(f"{where}: parameter type {parameter} is unknown")
    quantized = known is not Scheme.ABSENT and known is not Scheme.RAW
    if quantized != (kind is not ParameterType.NONE):
        raise PayloadError(f"{where}: parameter type {kind.name} doesn't fit scheme {known.name}")
    plain_bits = 8 * element.stored.itemsize if known is Scheme.RAW else 0
    if not (1 <= bits <= 8 if quantized else bits == plain_bits):
        raise PayloadError(f"{where}: {bits} bits don't fit scheme {known.name} of {element.name} values")
    if quantized and not element.quantizable:
        raise PayloadError(f"{where}: {element.name} values can't be stored with scheme {known.name}")
    return known, kind


def _validate_values(segment: Segment, element: Element, where: str) -> None:
    """Check that every decoder computes the same bits from the parameters, and that bools are 0 or 1."""
    if segment.scheme is Scheme.RAW and element.name == "bool" and int(segment.codes.max()) > 1:
        raise PayloadError(f"{where}: a bool is stored as {int(segment.codes.max())}")
    if segment.parameter_type is ParameterType.NONE or _valid_parameters(segment):
        return
    if not np.isfinite(segment.widened).all():
        raise PayloadError(f"{where}: a parameter is not finite")
    if segment.scheme not in PARAMETERS_PER_ROW:
        if (segment.widened[:, 1:] < segment.widened[:, :-1]).any():
            raise PayloadError(f"{where}: the centroids of a codebook are not ascending")
        return
    scales = segment.widened[0]
    if np.signbit(scales).any():
        raise PayloadError(f"{where}: a scale is negative")
    if (scales.view(np.uint32) & SCALE_SPARE_BITS).any():
        raise PayloadError(f"{where}: a scale has more than 16 significant bits")
    if float(scales.max()) > _largest_scale(segment):
        raise PayloadError(
            f"{where}: a scale of {float(scales.max())} overflows float32 with {segment.bits} bits"
        )


def _valid_parameters(segment: Segment) -> bool:
    """Whether one fast pass finds the segment's parameters valid. Codebooks have no such pass."""
    if segment.scheme not in PARAMETERS_PER_ROW:
        return False
    if segment.parameter_type is ParameterType.FLOAT16:
        return valid_halves(segment.parameters.view(np.uint16))
    return valid_floats(segment.parameters.view(np.uint32), _largest_scale(segment))


def _largest_scale(segment: Segment) -> float:
    """Return the largest scale with which the span of the codes is a finite float32."""
    steps = ((1 << segment.bits) - 1) * (2 if segment.scheme is Scheme.SYMMETRIC else 1)
    return float(np.finfo(np.float32).max) / steps


def _validate_disjoint(segments: tuple[Segment, ...], rows: int) -> None:
    if len(segments) < 2:
        return
    seen = np.zeros(rows, np.bool_)
    for index, segment in enumerate(segments):
        for _, offsets in segment.row_set.blocks():
            again = seen[offsets]
            if again.any():
                row = int(offsets[np.argmax(again)])
                raise PayloadError(f"payload: segment {index}: row {row} is in an earlier segment too")
            seen[offsets] = True
