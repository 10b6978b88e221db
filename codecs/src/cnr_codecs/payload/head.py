"""Reads the head of a payload: where it belongs, and which rows it holds.

Sizes are computed with Python's integers, so no hostile number can overflow them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import BY_CODE, Element
from cnr_codecs.errors import PayloadError, PayloadLimitError, UnsupportedPayloadError
from cnr_codecs.payload.coded import MANTISSA_BITS, MAX_MANTISSA, has_floating_codes
from cnr_codecs.payload.payload import (
    CHECKSUM,
    CODED,
    ENTRY,
    HEAD_BYTES,
    HEADER,
    MAGIC,
    MAX_SEGMENTS,
    VERSION,
    ParameterType,
    Scheme,
    checked_seal,
)
from cnr_codecs.payload.rowset import (
    RowSet,
    RowSetKind,
    encoded_bytes,
    rows_of,
    validate_disjoint,
    validate_row_set,
)

_NO_BYTES = np.empty(0, np.uint8)


class Reader:
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


def as_bytes(data: Any) -> npt.NDArray[np.uint8]:
    """Return the bytes of a buffer, read-only. `PayloadError` if it is no contiguous buffer."""
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


DEFAULT_MAX_DECODED_BYTES = 64 << 20
_ENTRIES = HEADER.size + HEAD_BYTES.size
# A look-up in a dict is cheaper than a call of an enumeration.
_SCHEMES = {int(each): each for each in Scheme}
_PARAMETER_TYPES = {int(each): each for each in ParameterType}
_ROW_SET_KINDS = {int(each): each for each in RowSetKind}


class Header(NamedTuple):  # much faster to make than a dataclass, as is an entry
    """The header of a payload: its place, and the chunk's size."""

    element: Element
    segments: int
    rows: int
    dim: int
    seal: int


class Entry(NamedTuple):
    """What the head says of a segment, which errors call `where`."""

    where: str
    scheme: Scheme
    bits: int
    parameter_type: ParameterType
    row_set: RowSet
    body_bytes: int


def rows_written(payload: Any, *, seal: int | None = None) -> npt.NDArray[np.int64]:
    """Return the rows that a payload was written with, from its head alone.

    The payload may be damaged or cut off behind its head. Rows that were evicted count.

    Parameters
    ----------
    payload
        A payload, or what is left of one, as bytes, bytearray, memoryview or a contiguous array.
    seal
        The seal that it must have. None: any.

    Raises
    ------
    PayloadLimitError
        The decoded chunk would take more than 64 MiB.
    UnsupportedPayloadError
        A newer release wrote it, or a development version.
    PayloadError
        The head is not proven: it is damaged or cut off. Or the payload has another seal.

    Returns
    -------
    rows
        int64 (n,), increasing.
    """
    buffer = as_bytes(payload)
    header = read_header(buffer)
    check_decoded_bytes(header, DEFAULT_MAX_DECODED_BYTES)
    row_sets = [entry.row_set for entry in read_entries(Reader(buffer, HEADER.size), header)]
    validate_disjoint(row_sets, header.rows)
    if seal is not None and header.seal != seal:
        raise PayloadError("payload: it belongs to another place (seal differs)")
    return rows_of(row_sets)


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
        `data` doesn't start with a sound head.
    RowsError
        The seal is not an unsigned 64-bit integer.
    """
    buffer = as_bytes(data)
    header = read_header(buffer)
    fields = (MAGIC, VERSION, header.element.code, header.segments, header.rows, header.dim)
    resealed = HEADER.pack(*fields, checked_seal(seal))
    head = resealed + _proven_head(buffer)[HEADER.size :]
    bodies = buffer[len(head) + CHECKSUM.size :].tobytes()
    return head + CHECKSUM.pack(google_crc32c.value(head)) + bodies


def read_header(buffer: npt.NDArray[np.uint8]) -> Header:
    """Return the header. It is not proven before `read_entries` is."""
    if len(buffer) < HEADER.size:
        raise PayloadError(f"payload: {len(buffer)} bytes, the header alone takes {HEADER.size}")
    magic, version, code, segments, rows, dim, seal = HEADER.unpack_from(buffer.data)
    if magic != MAGIC:
        raise PayloadError(f"payload: it starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        who = "a newer release wrote it; upgrade" if version > VERSION else "a development version wrote it"
        raise UnsupportedPayloadError(f"payload: version {version} is not {VERSION}: {who}")
    if code not in BY_CODE:
        raise PayloadError(f"payload: element type {code} is unknown")
    if rows == 0 or dim == 0:
        raise PayloadError(f"payload: the chunk of {rows} x {dim} values is empty")
    return Header(BY_CODE[code], segments, rows, dim, seal)


def check_decoded_bytes(header: Header, most: int) -> None:
    """Check that the decoded chunk takes at most so many bytes, and that the payload's segments can be counted."""
    rows, dim, element = header.rows, header.dim, header.element
    decoded_bytes = rows * dim * element.array.itemsize
    if decoded_bytes > most:
        raise PayloadLimitError(
            f"payload: {rows} x {dim} {element.name} values take {decoded_bytes} bytes when decoded, "
            f"the limit is {most}; raise max_decoded_bytes if you trust the payload"
        )
    if header.segments > MAX_SEGMENTS:
        raise PayloadError(f"payload: {header.segments} segments, the limit is {MAX_SEGMENTS}")


def read_entries(reader: Reader, header: Header) -> list[Entry]:
    """Return the entries of a payload, proven. The reader goes to the first body."""
    head = _proven_head(reader.buffer)
    reader.position = len(head) + CHECKSUM.size
    position = _ENTRIES + header.segments * ENTRY.size
    if position > len(head):
        raise PayloadError(f"payload: {header.segments} segments don't fit into a head of {len(head)} bytes")
    entries, rows = [], 0
    for index, (*kinds, nbytes, body_bytes) in enumerate(ENTRY.iter_unpack(head[_ENTRIES:position])):
        where = f"payload: segment {index}"
        scheme, bits, parameter_type, kind, count = _validate_entry(kinds, header, where)
        rows += count
        if rows > header.rows:  # before anything is unpacked for so many
            raise PayloadError(
                f"{where}: {rows} rows so far, the chunk has {header.rows}: one is in two segments"
            )
        expected = nbytes if kind is RowSetKind.GAPS else encoded_bytes(kind, count, header.rows)
        if nbytes != expected or nbytes > len(head) - position:
            raise PayloadError(
                f"{where}: its row set has {nbytes} of {len(head) - position} bytes left, it takes {expected}"
            )
        data = head[position : position + nbytes]
        row_set = validate_row_set(kind, count, header.rows, data, where)
        entries.append(Entry(where, scheme, bits, parameter_type, row_set, body_bytes))
        position += nbytes
    if position != len(head):
        raise PayloadError(f"payload: {len(head) - position} bytes of the head follow the last row set")
    return entries


def _proven_head(buffer: npt.NDArray[np.uint8]) -> bytes:
    """Return the head up to its checksum, which is right: a copy, so that nobody can change it afterwards."""
    least = _ENTRIES + CHECKSUM.size
    if len(buffer) < least:
        raise PayloadError(f"payload: {len(buffer)} bytes, the head takes at least {least}")
    (end,) = HEAD_BYTES.unpack_from(buffer.data, HEADER.size)
    if not least <= end <= len(buffer):
        raise PayloadError(
            f"payload: the head is said to take {end} of {len(buffer)} bytes; it is damaged or cut off"
        )
    head = buffer[: end - CHECKSUM.size].tobytes()
    if CHECKSUM.unpack_from(buffer.data, len(head))[0] != google_crc32c.value(head):
        raise PayloadError("payload: the head is damaged (crc32c differs)")
    return head


def _validate_entry(
    kinds: list[int], header: Header, where: str
) -> tuple[Scheme, int, ParameterType, RowSetKind, int]:
    """Return (scheme, bits, parameter type, row-set kind, count), if they fit together."""
    scheme, bits, parameter, kind, count = kinds
    known, row_set_kind = _SCHEMES.get(scheme), _ROW_SET_KINDS.get(kind)
    if known is None or row_set_kind is None:
        what = f"scheme {scheme}" if known is None else f"row-set kind {kind}"
        # The checksum is right: this is what was written.
        raise UnsupportedPayloadError(
            f"{where}: {what} is unknown: a newer release wrote it; install a newer cnr-codecs to read it"
        )
    if not 1 <= count <= header.rows:
        raise PayloadError(f"{where}: {count} rows, expected 1 to {header.rows}")
    return known, bits, _parameter_type(known, bits, parameter, header.element, where), row_set_kind, count


def _parameter_type(scheme: Scheme, bits: int, parameter: int, element: Element, where: str) -> ParameterType:
    kind = _PARAMETER_TYPES.get(parameter)
    if kind is None:
        raise PayloadError(f"{where}: parameter type {parameter} is unknown")
    quantized = scheme is not Scheme.ABSENT and scheme is not Scheme.RAW
    is_float32 = kind is ParameterType.FLOAT32
    if quantized != (kind is not ParameterType.NONE) or (scheme in CODED and not is_float32):
        raise PayloadError(f"{where}: parameter type {kind.name} doesn't fit scheme {scheme.name}")
    plain_bits = 8 * element.stored.itemsize if scheme is Scheme.RAW else 0
    least, most = (1, 8) if quantized else (plain_bits, plain_bits)
    if scheme in CODED:
        least, most = 0, bits if bits == MANTISSA_BITS else MAX_MANTISSA
    if not least <= bits <= most:
        raise PayloadError(f"{where}: {bits} bits don't fit scheme {scheme.name} of {element.name} values")
    floating = scheme in CODED and bits > 0
    if quantized and not (has_floating_codes(element, bits) if floating else element.quantizable):
        raise PayloadError(f"{where}: {element.name} values can't be stored with scheme {scheme.name}")
    return kind
