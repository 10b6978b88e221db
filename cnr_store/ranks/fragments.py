"""What one rank sends another in one round: chunks that it encoded, and raw rows of chunks that others encode.

A message, all numbers little-endian::

    head       8s "cnrfrag1" | u64 bytes of the message | u32 fragments | u32 crc32c of all but these four bytes
    entries    for each fragment: u32 kind | u32 write | u32 shard | u32 slot | u32 first column | u32 rows | u64 size
    bodies     in the same order, each padded with zeros to a multiple of 8 bytes

The body of an encoded chunk (kind 0; no first column, no rows) is its payload of `size` bytes. That of raw rows
(kind 1) is u32 offsets of the rows within the chunk, padded, then their values, `size` bytes a row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt

BytesLike: TypeAlias = bytes | bytearray | memoryview

_MAGIC = b"cnrfrag1"
_HEAD = struct.Struct("<8sQI")
_CHECKSUM = struct.Struct("<I")
_ENTRY = struct.Struct("<IIIIIIQ")
_ENTRIES_AT = _HEAD.size + _CHECKSUM.size
_ENCODED, _RAW = 0, 1
_ALIGNMENT = 8  # so that offsets and values can be used where they are
_OFFSET = np.dtype("<u4")


@dataclass(frozen=True, eq=False)
class EncodedChunk:
    """A chunk, or a part of its rows, as a payload."""

    write: int  # index of the array among those that the version writes
    shard: int  # shard, slot: the shard, and the chunk inside it
    slot: int
    payload: BytesLike  # encoded rows


@dataclass(frozen=True, eq=False)
class RawRows:
    """Some columns of some rows of a chunk."""

    write: int  # index of the array among those that the version writes
    shard: int  # shard, slot: the shard, and the chunk inside it
    slot: int
    first_column: int  # of the values
    offsets: npt.NDArray[np.uint32]  # uint32 (n,) ascending: the rows within the chunk
    # (n, columns) in C order. Unpacked ones are uint8 (n, bytes of a row's values); `view` gives them the dtype of the
    # array, which receivers know.
    values: npt.NDArray[Any]


Fragment: TypeAlias = EncodedChunk | RawRows


def pack(fragments: Sequence[Fragment]) -> list[BytesLike]:
    """The pieces of a message, in order. Payloads and values are not copied."""
    entries, bodies = bytearray(), list[BytesLike]()
    for fragment in fragments:
        where = fragment.write, fragment.shard, fragment.slot
        if isinstance(fragment, EncodedChunk):
            payload = _flat(fragment.payload)
            entries += _ENTRY.pack(_ENCODED, *where, 0, 0, len(payload))
            parts = [payload]
        else:
            parts = [_flat(fragment.offsets.astype(_OFFSET, copy=False)), _flat(fragment.values)]
            entries += _ENTRY.pack(_RAW, *where, fragment.first_column, *_rows_and_size(fragment))
        for part in parts:
            bodies += [part, bytes(-len(part) % _ALIGNMENT)]
    bodies = [body for body in bodies if len(body)]
    nbytes = _ENTRIES_AT + len(entries) + sum(map(len, bodies))
    head = _HEAD.pack(_MAGIC, nbytes, len(fragments))
    checksum = _CHECKSUM.pack(_crc([head, entries, *bodies]))
    return [head + checksum + entries, *bodies]


def _rows_and_size(raw: RawRows) -> tuple[int, int]:
    """How many rows there are, and the bytes of the values of one."""
    rows = len(raw.offsets)
    if raw.values.ndim != 2 or len(raw.values) != rows:
        raise ValueError(
            f"values of shape {raw.values.shape} for {rows} rows of chunk {raw.slot} of shard {raw.shard}"
        )
    return rows, raw.values.nbytes // rows if rows else 0


def unpack(data: BytesLike) -> list[Fragment]:
    """The fragments of a message, as views of it.

    `data`: the whole message. It must stay as it is while the fragments are in use.
    """
    message = _flat(data)
    count = _check_head(message)
    reader = _Reader(message, _ENTRIES_AT)
    entries = reader.take(_ENTRY.size * count)
    fragments = [_read(reader, entry) for entry in _ENTRY.iter_unpack(entries)]
    if reader.position != len(message):
        raise ValueError(f"{len(message) - reader.position} bytes follow the last fragment of a message")
    return fragments


def _check_head(message: memoryview) -> int:
    """The number of fragments, if the message arrived as it was sent."""
    if len(message) < _ENTRIES_AT:
        raise ValueError(f"a message of {len(message)} bytes, of which the head alone takes {_ENTRIES_AT}")
    magic, nbytes, count = _HEAD.unpack_from(message)
    if magic != _MAGIC:
        raise ValueError(
            f"a message begins with {magic!r}, not {_MAGIC!r}: do all ranks run the same release?"
        )
    if nbytes != len(message):
        raise ValueError(f"a message has {len(message)} bytes of {nbytes}")
    (stored,) = _CHECKSUM.unpack_from(message, _HEAD.size)
    computed = _crc([message[: _HEAD.size], message[_ENTRIES_AT:]])
    if stored != computed:
        raise ValueError(f"a message does not match its checksum: sent {stored:08x}, computed {computed:08x}")
    return int(count)


class _Reader:
    """Takes consecutive parts of a message, and raises where one would pass its end."""

    def __init__(self, message: memoryview, position: int) -> None:
        self.message = message
        self.position = position

    def take(self, nbytes: int) -> memoryview:
        """The next bytes. The padding behind them is skipped."""
        end = self.position + nbytes
        padded = end + -end % _ALIGNMENT
        if padded > len(self.message):
            raise ValueError(f"a message of {len(self.message)} bytes is cut at byte {self.position}")
        part = self.message[self.position : end]
        if any(self.message[end:padded]):
            raise ValueError(f"a message has other bytes than zeros from byte {end} to {padded}")
        self.position = padded
        return part


def _read(reader: _Reader, entry: tuple[int, ...]) -> Fragment:
    kind, write, shard, slot, first_column, rows, size = entry
    if kind == _ENCODED and first_column == rows == 0:
        return EncodedChunk(write, shard, slot, reader.take(size))
    # Without rows, a size would pass any check of the bytes that follow.
    if kind != _RAW or (rows == 0) != (size == 0):
        raise ValueError(f"a message holds a fragment that is not known: {entry}")
    offsets = np.frombuffer(reader.take(rows * _OFFSET.itemsize), _OFFSET)
    if not (offsets[:-1] < offsets[1:]).all():
        raise ValueError(f"the rows of chunk {slot} of shard {shard} do not ascend in a message")
    values = np.frombuffer(reader.take(rows * size), np.uint8).reshape(rows, size)
    return RawRows(write, shard, slot, first_column, offsets, values)


def _flat(data: BytesLike | npt.NDArray[Any]) -> memoryview:
    """The bytes of a buffer, in C order. Copies an array only where it is not contiguous."""
    if isinstance(data, np.ndarray):  # also of types that no memoryview casts
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _crc(parts: Iterable[BytesLike]) -> int:
    crc = 0
    for part in parts:
        # The extension takes any array, but no memoryview.
        crc = google_crc32c.extend(crc, np.frombuffer(part, np.uint8))
    return crc
