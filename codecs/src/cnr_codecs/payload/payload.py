"""The parts of a payload, and how they become bytes. `cnr_codecs.payload` specifies the bytes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element
from cnr_codecs.errors import RowsError
from cnr_codecs.payload.rowset import RowSet

MAGIC = b"CNRP"
VERSION = 1
HEADER = struct.Struct("<4sBBHIIQ")
SEGMENT = struct.Struct("<BBBBI")
BOOK_COUNT = struct.Struct("<I")
# Writers make one for each way of storing rows, of which there are less than a hundred.
MAX_SEGMENTS = 1024
MAX_U32 = (1 << 32) - 1
MAX_U64 = (1 << 64) - 1


class Scheme(IntEnum):
    """How a segment's rows are stored; the numbers are the payload's."""

    ABSENT = 0
    RAW = 1
    ASYMMETRIC = 2
    SYMMETRIC = 3
    CODEBOOK = 4
    SHARED = 5


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

    `parameters` has the stored dtype. Its shape is (parameters per row, count): scale and offset, or the half
    step; or (codebooks, 2**bits): centroids, ascending. There is a codebook for each row, or, where they are
    shared, `books`, uint32 (count,), says which one a row uses. `codes` is uint8 of shape (count, bytes a
    row): packed codes, raw values, or nothing (absent).
    """

    scheme: Scheme
    bits: int
    parameter_type: ParameterType
    row_set: RowSet
    parameters: npt.NDArray[Any]
    codes: npt.NDArray[np.uint8]
    books: npt.NDArray[np.uint32] | None = None

    @cached_property
    def widened(self) -> npt.NDArray[np.float32]:
        """The parameters as float32: once, since proof and decoding need them and float16 is slow to widen."""
        with np.errstate(all="ignore"):  # before they are proved they may be anything
            return self.parameters.astype(np.float32)

    def affine(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Scale and offset of each row, float32: a code q decodes to scale * q + offset.

        A half step h stands for h * (2q - (2**bits - 1)), which is scale 2h and offset -h * (2**bits - 1),
        both exact. A row of zeros thus decodes to +0.
        """
        if self.scheme is Scheme.SYMMETRIC:
            return self.widened[0] * np.float32(2), self.widened[0] * np.float32(1 - (1 << self.bits))
        return self.widened[0], self.widened[1]

    def head(self) -> bytes:
        """What lies before the codes in the payload."""
        kind = self.row_set.kind
        head = SEGMENT.pack(self.scheme, self.bits, self.parameter_type, kind, self.row_set.count)
        return head + self.row_set.data.tobytes() + self.stored_parameters()

    def stored_parameters(self) -> bytes:
        """The parameters as they lie in the payload."""
        if self.books is None:
            return self.parameters.tobytes()
        count = len(self.parameters)
        return (
            BOOK_COUNT.pack(count)
            + self.parameters.tobytes()
            + self.books.astype(book_dtype(count)).tobytes()
        )


@dataclass(frozen=True, eq=False)
class Payload:
    """A proved payload: `rows` and `dim` of its chunk, the element type's name, the seal, its segments."""

    rows: int
    dim: int
    element: str
    seal: int
    segments: tuple[Segment, ...]


def book_dtype(count: int) -> np.dtype[Any]:
    """The smallest of the dtypes that tell `count` shared codebooks apart."""
    return np.dtype("<u1" if count <= 1 << 8 else "<u2" if count <= 1 << 16 else "<u4")


def row_bytes(scheme: Scheme, bits: int, dim: int) -> int:
    """Bytes of one row's codes: whole bytes, none for an absent row."""
    return 0 if scheme is Scheme.ABSENT else (dim * bits + 7) // 8


def build(rows: int, dim: int, element: Element, segments: Iterable[Segment], seal: int = 0) -> bytes:
    """The payload of a chunk of (rows, dim) made of these segments, which must hold different rows.

    Raises:
        RowsError: more than 1,024 segments, or the seal is no unsigned 64-bit integer.
    """
    parts: list[bytes | memoryview] = []
    count = 0
    for segment in segments:
        count += 1
        parts.append(segment.head())
        parts.append(segment.codes.reshape(-1).data)
    return b"".join([header(rows, dim, element, count, seal), *parts])


def header(rows: int, dim: int, element: Element, segments: int, seal: int) -> bytes:
    """The header of a payload with so many segments.

    Raises:
        RowsError: more than 1,024 segments, or the seal is no unsigned 64-bit integer.
    """
    if segments > MAX_SEGMENTS:
        raise RowsError(
            f"{segments} segments, a payload has at most {MAX_SEGMENTS}; merge_segments joins them"
        )
    return HEADER.pack(MAGIC, VERSION, element.code, segments, rows, dim, checked_seal(seal))


class Draft:
    """The bytes of a payload of one segment, whose `codes`, uint8 (count, bytes a row), are written in place."""

    def __init__(self, head_bytes: int, count: int, width: int) -> None:
        """For a header, a segment's head, row set and parameters of `head_bytes` in all."""
        nbytes = head_bytes + count * width
        # Bytes may be written until somebody else has them. Whatever else Python makes it fills first, and holds its
        # lock meanwhile: for a chunk in new memory that is milliseconds in which training stands still.
        self._payload: bytes = _new_bytes(None, nbytes)
        # A view by address: one through a ctypes array would make a type for every size.
        self._view = np.frombuffer(_writable(_address(self._payload), nbytes, _PYBUF_WRITE), np.uint8)
        self.codes = self._view[head_bytes:].reshape(count, width)

    def finish(self, head: bytes) -> bytes:
        """The payload, which starts with these bytes. Nobody may write to `codes` any more."""
        self._view[: len(head)] = np.frombuffer(head, np.uint8)
        del self.codes, self._view
        return self._payload


_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
_writable = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_WRITE = 0x200


def checked_seal(seal: int) -> int:
    """The seal, which must be an unsigned 64-bit integer.

    Raises:
        RowsError: it is not.
    """
    if not 0 <= seal <= MAX_U64:
        raise RowsError(f"seal {seal} is no unsigned 64-bit integer")
    return seal
