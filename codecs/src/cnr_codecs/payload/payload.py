"""The parts of a payload, and how they are joined. `cnr_codecs.payload` specifies the bytes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element
from cnr_codecs.errors import PayloadError, RowsError
from cnr_codecs.payload.coded import CodedRows, Grid
from cnr_codecs.payload.rowset import RowSet

MAGIC = b"CNRP"
VERSION = 3
HEADER = struct.Struct("<4sBBHIIQ")
HEAD_BYTES = struct.Struct("<I")
ENTRY = struct.Struct("<BBBBIII")
CHECKSUM = struct.Struct("<I")
BOOK_COUNT = struct.Struct("<I")
# Of a coded segment: the step, 0 on a floating grid; the scale and the shift of its grid, 1 and 0 unless that has
# moved; flags; 0; the checksum of its codes.
GRID = struct.Struct("<ffhBBI")
# The flag of a floating grid whose codes may be negative.
SIGNED = 2
# Writers make one segment for each way of storing rows. There are fewer than a hundred ways.
MAX_SEGMENTS = 1024
MAX_U32 = (1 << 32) - 1
MAX_U64 = (1 << 64) - 1
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_WRITE = 0x200


class Scheme(IntEnum):
    """How a segment's rows are stored. Payloads store these numbers."""

    ABSENT = 0
    RAW = 1
    ASYMMETRIC = 2
    SYMMETRIC = 3
    CODEBOOK = 4
    SHARED = 5
    LATTICE = 6
    RELATIVE = 7


# Compressed integers on one grid: codes, or what is to be added to those of the same rows in an older payload.
CODED = frozenset({Scheme.LATTICE, Scheme.RELATIVE})


class ParameterType(IntEnum):
    """How a row's parameters are stored. Payloads store these numbers."""

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
    """Rows that are stored in one way.

    Attributes
    ----------
    scheme
        How the rows are stored.
    bits
        Bits of a code, or of a raw value; 0 for absent rows. Lattice and relative: those of the mantissa on a floating
        grid, else 0.
    parameter_type
        How the parameters are stored.
    row_set
        Which rows of the chunk the segment has.
    parameters
        The parameters, of their stored dtype. Uniform schemes: (parameters per row, count), that is, scale and
        offset, or the half step. Codebooks: (codebooks, 2**bits), ascending centroids. Lattice: (1, 3), those of
        the grid that its values are by.
    codes
        uint8 (count, bytes a row): packed codes, raw values, or nothing for absent rows. Lattice: codes as int16, on a
        floating grid of 23 bits int32, or none, (0, bytes a row), where they are in `coded`. Relative: none.
    books
        uint32 (count,): the codebook of each row, where rows share codebooks. Otherwise None.
    coded
        The codes of a lattice segment as they are stored, and the differences of a relative one. Otherwise None.
    """

    scheme: Scheme
    bits: int
    parameter_type: ParameterType
    row_set: RowSet
    parameters: npt.NDArray[Any]
    codes: npt.NDArray[np.uint8]
    books: npt.NDArray[np.uint32] | None = None
    coded: CodedRows | None = None

    def coded_rows(self) -> CodedRows:
        """Return the codes of a lattice segment, coded if they are not."""
        return self.coded or CodedRows.encode(
            np.ascontiguousarray(self.codes).view(self.grid.dtype), self.grid
        )

    @property
    def grid(self) -> Grid:
        """The grid of a lattice or a relative segment, by which codes become values; that of `coded` was stored."""
        step, scale, shift = self.parameters[0].tolist()
        return Grid(step, self.bits, scale, int(shift))

    def stored_parameters(self) -> bytes:
        """Return the parameters as the payload stores them."""
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
    """A validated payload.

    Attributes
    ----------
    rows, dim
        Rows and columns of the chunk.
    element
        The element type's name.
    seal
        64 bits that tie the payload to its place in a store; 0 for none.
    segments
        The rows that the payload stores. No row is in two segments.
    """

    rows: int
    dim: int
    element: str
    seal: int
    segments: tuple[Segment, ...]

    def at(self, scale: float, shift: int) -> Payload:
        """The same rows with the values that their codes have on floating grids that have moved on.

        Parameters
        ----------
        scale, shift
            Where to.

        Raises
        ------
        PayloadError
            One has moved further: its codes would have no values.
        """

        def moved(segment: Segment) -> Segment:
            grid = segment.grid if segment.scheme in CODED else Grid()
            if (grid.shift, grid.scale) > (shift, scale):
                raise PayloadError(f"payload: {grid} has moved further than to {scale!r} * 2**{shift}")
            there = grid.at(scale, shift)
            return segment if there == grid else replace(segment, parameters=there.parameters)

        return replace(self, segments=tuple(map(moved, self.segments)))


def book_dtype(count: int) -> np.dtype[Any]:
    """Return the smallest dtype that numbers `count` shared codebooks."""
    return np.dtype("<u1" if count <= 1 << 8 else "<u2" if count <= 1 << 16 else "<u4")


def row_bytes(scheme: Scheme, bits: int, dim: int) -> int:
    """Return the bytes of one row's codes. Rows take whole bytes; an absent row takes none."""
    if scheme in CODED:
        return Grid(mantissa=bits).dtype.itemsize * dim  # in memory, before they are coded
    return 0 if scheme is Scheme.ABSENT else (dim * bits + 7) // 8


def build(rows: int, dim: int, element: Element, segments: Iterable[Segment], seal: int = 0) -> bytes:
    """Return the payload of a chunk.

    Parameters
    ----------
    rows, dim
        Rows and columns of the chunk.
    element
        The element type of its values.
    segments
        The rows to store. No row may be in two segments.
    seal
        64 bits that tie the payload to its place in a store; 0 for none.

    Raises
    ------
    RowsError
        There are more than 1,024 segments, one is too large, or the seal is not an unsigned 64-bit integer.
    """
    held = list(segments)
    sizes: list[int] = []
    bodies: list[bytes | memoryview] = []
    for segment in held:
        body = _lattice_body(segment) if segment.scheme in CODED else _body(segment)
        sizes.append(sum(len(part) for part in body))
        bodies += body
    return b"".join([encode_head(rows, dim, element, held, sizes, seal), *bodies])


def _body(segment: Segment) -> tuple[bytes | memoryview, ...]:
    return segment.stored_parameters(), segment.codes.reshape(-1).data


def _lattice_body(segment: Segment) -> tuple[bytes | memoryview, ...]:
    coded = segment.coded_rows()
    flags = SIGNED if coded.centers is not None and coded.centers.is_signed else 0
    grid = coded.grid
    return GRID.pack(grid.step, grid.scale, grid.shift, flags, 0, coded.check), coded.data


def encode_head(
    rows: int, dim: int, element: Element, segments: Sequence[Segment], sizes: Sequence[int], seal: int
) -> bytes:
    """Return what stands before the bodies, whose bytes are `sizes`: header, entries, row sets and checksum."""
    if len(segments) > MAX_SEGMENTS:
        raise RowsError(
            f"a payload has at most {MAX_SEGMENTS} segments, got {len(segments)}; join some with merge_segments"
        )
    nbytes = head_bytes(segment.row_set for segment in segments)
    if max(nbytes, *sizes, 0) > MAX_U32:
        raise RowsError(
            f"a payload's head and the body of a segment take at most {MAX_U32} bytes each, "
            f"got {nbytes} and {max(sizes)}; use fewer rows a chunk"
        )
    fields = (MAGIC, VERSION, element.code, len(segments), rows, dim, checked_seal(seal))
    entries = (_entry(segment, size) for segment, size in zip(segments, sizes, strict=True))
    row_sets = (segment.row_set.data.tobytes() for segment in segments)
    head = b"".join([HEADER.pack(*fields), HEAD_BYTES.pack(nbytes), *entries, *row_sets])
    return head + CHECKSUM.pack(google_crc32c.value(head))


def _entry(segment: Segment, body_bytes: int) -> bytes:
    row_set = segment.row_set
    kinds = segment.scheme, segment.bits, segment.parameter_type, row_set.kind
    return ENTRY.pack(*kinds, row_set.count, row_set.data.nbytes, body_bytes)


def head_bytes(row_sets: Iterable[RowSet]) -> int:
    """Return the bytes of the head of a payload whose segments have these row sets."""
    held = sum(ENTRY.size + row_set.data.nbytes for row_set in row_sets)
    return HEADER.size + HEAD_BYTES.size + held + CHECKSUM.size


def checked_seal(seal: int) -> int:
    """Return the seal, if it is an unsigned 64-bit integer. `RowsError` if it is not."""
    if not 0 <= seal <= MAX_U64:
        raise RowsError(f"the seal must be an unsigned 64-bit integer, got {seal}")
    return seal


class Draft:
    """The bytes of a payload of one segment, whose codes are written in place before they are complete.

    CPython has no public way to make a `bytes` object without filling it first. Filling new memory takes milliseconds
    for a large chunk, and Python's lock is held meanwhile: training would stand still. The C interface allows to write
    to a new `bytes` object until other code has seen it. A view of a numpy array would need none of this, but it is no
    `bytes`: it can't be pickled, hashed or joined to other bytes.

    `head_bytes`: bytes before the codes: the head, and the segment's parameters.

    `codes`: uint8 (count, width): those of the rows, to be written in place.
    """

    def __init__(self, head_bytes: int, count: int, width: int) -> None:
        nbytes = head_bytes + count * width
        self._payload: bytes = _new_bytes(None, nbytes)
        # The view is made by address: a ctypes array would need a new type for every size.
        self._view = np.frombuffer(_memory_view(_address(self._payload), nbytes, _PYBUF_WRITE), np.uint8)
        self.codes = self._view[head_bytes:].reshape(count, width)

    def finish(self, head: bytes) -> bytes:
        """Return the payload, whose first bytes are `head`. Nobody may write to `codes` afterwards."""
        self._view[: len(head)] = np.frombuffer(head, np.uint8)
        del self.codes, self._view
        return self._payload
