"""The payload of a chunk: a header, then segments of rows; built here, and proved before anything is decoded.

All numbers are little-endian; nothing is padded. The header has 24 bytes:

    magic "CNRP" | u8 version | u8 element type | u16 segments | u32 rows | u32 dim | u64 seal

Each segment follows the one before it:

    u8 scheme | u8 bits | u8 parameter type | u8 row-set kind | u32 count | row set | parameters | codes

The payload ends with its last segment. Segments hold different rows; a payload without segments holds none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import BY_CODE, Element
from cnr_codecs.errors import PayloadError, PayloadLimitError, RowsError
from cnr_codecs.rowset import RowSet, RowSetKind, encoded_bytes, prove_row_set

MAGIC = b"CNRP"
VERSION = 1
DEFAULT_MAX_DECODED_BYTES = 64 << 20
HEADER = struct.Struct("<4sBBHIIQ")
SEGMENT = struct.Struct("<BBBBI")
MAX_U32 = (1 << 32) - 1
MAX_U64 = (1 << 64) - 1
# Scales have at most 16 significant bits: the lower 8 of a float32's 24 are zero, so that scale * code is
# exact.
SCALE_SPARE_BITS = np.uint32(0xFF)


class Scheme(IntEnum):
    """How a segment's rows are stored; the numbers are the payload's."""

    ABSENT = 0
    RAW = 1
    ASYMMETRIC = 2
    SYMMETRIC = 3


class ParameterType(IntEnum):
    """How a row's parameters are stored; the numbers are the payload's."""

    NONE = 0
    FLOAT16 = 1
    FLOAT32 = 2


PARAMETER_DTYPES: dict[ParameterType, np.dtype[Any]] = {
    ParameterType.FLOAT16: np.dtype("<f2"),
    ParameterType.FLOAT32: np.dtype("<f4"),
}
PARAMETERS_PER_ROW = {Scheme.ABSENT: 0, Scheme.RAW: 0, Scheme.ASYMMETRIC: 2, Scheme.SYMMETRIC: 1}


@dataclass(frozen=True, eq=False)
class Segment:
    """Rows stored in one way.

    `parameters` has shape (parameters per row, count) and the stored dtype: scale and offset, or the half
    step. `codes` is uint8 of shape (count, bytes a row): packed codes, raw values, or nothing (absent).
    """

    scheme: Scheme
    bits: int
    parameter_type: ParameterType
    row_set: RowSet
    parameters: npt.NDArray[Any]
    codes: npt.NDArray[np.uint8]

    def affine(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Scale and offset of each row, float32: a code q decodes to scale * q + offset.

        A half step h stands for h * (2q - (2**bits - 1)), which is scale 2h and offset -h * (2**bits - 1),
        both exact. A row of zeros thus decodes to +0.
        """
        widened = self.parameters.astype(np.float32)
        if self.scheme is Scheme.SYMMETRIC:
            return widened[0] * np.float32(2), widened[0] * np.float32(1 - (1 << self.bits))
        return widened[0], widened[1]


@dataclass(frozen=True, eq=False)
class Payload:
    """A proved payload: `rows` and `dim` of its chunk, the element type's name, the seal, its segments."""

    rows: int
    dim: int
    element: str
    seal: int
    segments: tuple[Segment, ...]


def row_bytes(scheme: Scheme, bits: int, dim: int) -> int:
    """Bytes of one row's codes: whole bytes, none for an absent row."""
    return 0 if scheme is Scheme.ABSENT else (dim * bits + 7) // 8


def build(rows: int, dim: int, element: Element, segments: Iterable[Segment], seal: int = 0) -> bytes:
    """The payload of a chunk of (rows, dim) made of these segments, which must hold different rows."""
    parts: list[bytes | memoryview] = []
    count = 0
    for segment in segments:
        count += 1
        kind = segment.row_set.kind
        parts.append(
            SEGMENT.pack(segment.scheme, segment.bits, segment.parameter_type, kind, segment.row_set.count)
        )
        parts.append(segment.row_set.data.tobytes())
        parts.append(segment.parameters.tobytes())
        parts.append(segment.codes.reshape(-1).data)
    header = HEADER.pack(MAGIC, VERSION, element.code, count, rows, dim, _checked_seal(seal))
    return b"".join([header, *parts])


def reseal(data: Any, seal: int) -> bytes:
    """The same payload with another seal; nothing is quantized again.

    Raises:
        PayloadError: `data` doesn't start with a payload's header.
        RowsError: the seal is no unsigned 64-bit integer.
    """
    buffer = _as_bytes(data)
    _, element, segments, rows, dim, _ = _prove_header(buffer)
    return (
        HEADER.pack(MAGIC, VERSION, element.code, segments, rows, dim, _checked_seal(seal))
        + buffer[HEADER.size :].tobytes()
    )


def parse(data: Any, *, max_decoded_bytes: int = DEFAULT_MAX_DECODED_BYTES) -> Payload:
    """Prove that a bytes-like object is a payload, and give its parts without copying the codes.

    Args:
        data: bytes, bytearray, memoryview or a contiguous array; it must not change while the payload is in
        use.
        max_decoded_bytes: the most bytes that the chunk may take when decoded.

    Raises:
        PayloadLimitError: the decoded chunk would be larger than that.
        PayloadError: anything else is wrong; the message says what.
    """
    buffer = _as_bytes(data)
    seal, element, segment_count, rows, dim, decoded_bytes = _prove_header(buffer)
    if decoded_bytes > max_decoded_bytes:
        raise PayloadLimitError(
            f"payload: {rows} x {dim} {element.name} values take {decoded_bytes} bytes when decoded, "
            f"the limit is {max_decoded_bytes}; raise max_decoded_bytes if the payload is trusted"
        )
    reader = _Reader(buffer, HEADER.size)
    segments = tuple(_prove_segment(reader, i, element, rows, dim) for i in range(segment_count))
    if reader.position != len(buffer):
        raise PayloadError(
            f"payload: {len(buffer) - reader.position} bytes follow the last segment, "
            f"which ends at byte {reader.position}"
        )
    _prove_disjoint(segments, rows)
    return Payload(rows, dim, element.name, seal, segments)


class _Reader:
    """Takes consecutive views off a buffer, and refuses to pass its end."""

    def __init__(self, buffer: npt.NDArray[np.uint8], position: int) -> None:
        self.buffer = buffer
        self.position = position

    def take(self, size: int, what: str) -> npt.NDArray[np.uint8]:
        end = self.position + size
        if end > len(self.buffer):
            raise PayloadError(
                f"{what} need {size} bytes at byte {self.position} of {len(self.buffer)}: truncated"
            )
        view = self.buffer[self.position : end]
        self.position = end
        return view


def _as_bytes(data: Any) -> npt.NDArray[np.uint8]:
    try:
        buffer = np.frombuffer(memoryview(data).cast("B"), np.uint8) if memoryview(data).nbytes else _NO_BYTES
    except TypeError as error:
        raise PayloadError(
            f"payload: expected contiguous bytes, got {type(data).__name__}: {error}"
        ) from error
    buffer = buffer.view()
    # Kernels are compiled once, for read-only codes.
    buffer.flags.writeable = False
    return buffer


_NO_BYTES = np.empty(0, np.uint8)


def _checked_seal(seal: int) -> int:
    if not 0 <= seal <= MAX_U64:
        raise RowsError(f"seal {seal} is no unsigned 64-bit integer")
    return seal


def _prove_header(buffer: npt.NDArray[np.uint8]) -> tuple[int, Element, int, int, int, int]:
    """(seal, element, segments, rows, dim, decoded bytes)."""
    if len(buffer) < HEADER.size:
        raise PayloadError(f"payload: {len(buffer)} bytes are fewer than a header's {HEADER.size}")
    magic, version, code, segments, rows, dim, seal = HEADER.unpack(buffer[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise PayloadError(f"payload: starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise PayloadError(
            f"payload: version {version} is unknown, this release reads version {VERSION}; upgrade"
        )
    if code not in BY_CODE:
        raise PayloadError(f"payload: element type {code} is unknown")
    if rows == 0 or dim == 0:
        raise PayloadError(f"payload: a chunk of {rows} x {dim} values is empty")
    element = BY_CODE[code]
    return seal, element, segments, rows, dim, rows * dim * element.array.itemsize


def _prove_segment(reader: _Reader, index: int, element: Element, rows: int, dim: int) -> Segment:
    where = f"payload: segment {index}"
    head = reader.take(SEGMENT.size, f"{where}: its head would")
    scheme_code, bits, parameter_code, kind_code, count = SEGMENT.unpack(head.tobytes())
    scheme, parameter_type = _prove_scheme(scheme_code, bits, parameter_code, element, where)
    if kind_code not in RowSetKind.__members__.values():
        raise PayloadError(f"{where}: row-set kind {kind_code} is unknown")
    if not 1 <= count <= rows:
        raise PayloadError(f"{where}: {count} rows, expected 1 to {rows}")
    kind = RowSetKind(kind_code)
    row_data = reader.take(encoded_bytes(kind, count, rows), f"{where}: its row set would")
    row_set = prove_row_set(kind, count, rows, row_data, where)
    per_row = PARAMETERS_PER_ROW[scheme]
    dtype = PARAMETER_DTYPES.get(parameter_type, np.dtype("<f4"))
    stored = reader.take(per_row * count * dtype.itemsize, f"{where}: its parameters would")
    parameters = np.frombuffer(stored.tobytes(), dtype).reshape(per_row, count)
    width = row_bytes(scheme, bits, dim)
    codes = reader.take(width * count, f"{where}: its codes would").reshape(count, width)
    segment = Segment(scheme, bits, parameter_type, row_set, parameters, codes)
    _prove_values(segment, element, where)
    return segment


def _prove_scheme(
    scheme: int, bits: int, parameter: int, element: Element, where: str
) -> tuple[Scheme, ParameterType]:
    if scheme not in Scheme.__members__.values():
        raise PayloadError(f"{where}: scheme {scheme} is unknown")
    if parameter not in ParameterType.__members__.values():
        raise PayloadError(f"{where}: parameter type {parameter} is unknown")
    known, kind = Scheme(scheme), ParameterType(parameter)
    if (PARAMETERS_PER_ROW[known] > 0) != (kind is not ParameterType.NONE):
        raise PayloadError(f"{where}: parameter type {kind.name} doesn't fit scheme {known.name}")
    expected = {Scheme.ABSENT: range(1), Scheme.RAW: [8 * element.stored.itemsize]}.get(known, range(1, 9))
    if bits not in expected:
        raise PayloadError(f"{where}: {bits} bits don't fit scheme {known.name} of {element.name} values")
    if PARAMETERS_PER_ROW[known] and not element.quantizable:
        raise PayloadError(f"{where}: {element.name} values can't be stored with scheme {known.name}")
    return known, kind


def _prove_values(segment: Segment, element: Element, where: str) -> None:
    """Parameters from which every decoder computes the same bits; bools that are 0 or 1."""
    if segment.scheme is Scheme.RAW and element.name == "bool" and int(segment.codes.max()) > 1:
        raise PayloadError(f"{where}: a bool is stored as {int(segment.codes.max())}")
    if segment.parameter_type is ParameterType.NONE:
        return
    if not np.isfinite(segment.parameters).all():
        raise PayloadError(f"{where}: a parameter is not finite")
    scales = segment.parameters[0].astype(np.float32)
    if np.signbit(scales).any():
        raise PayloadError(f"{where}: a scale is negative")
    if (scales.view(np.uint32) & SCALE_SPARE_BITS).any():
        raise PayloadError(f"{where}: a scale has more than 16 significant bits")
    span = float(scales.max()) * ((1 << segment.bits) - 1) * (2 if segment.scheme is Scheme.SYMMETRIC else 1)
    if span > float(np.finfo(np.float32).max):
        raise PayloadError(
            f"{where}: a scale of {float(scales.max())} overflows float32 with {segment.bits} bits"
        )


def _prove_disjoint(segments: tuple[Segment, ...], rows: int) -> None:
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
