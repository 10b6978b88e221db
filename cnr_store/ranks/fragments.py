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
    offsets: npt.NDArray[np.uint32]  # uint32 (n,) ascending, at least one: the rows within the chunk
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
            rows = len(fragment.offsets)
            entries += _ENTRY.pack(_RAW, *where, fragment.first_column, rows, fragment.values.nbytes // rows)
        for part in parts:
            bodies += [part, bytes(-len(part) % _ALIGNMENT)]
    bodies = [body for body in bodies if len(body)]
    nbytes = _ENTRIES_AT + len(entries) + sum(map(len, bodies))
    head = _HEAD.pack(_MAGIC, nbytes, len(fragments))
    checksum = _CHECKSUM.pack(_crc([head, entries, *bodies]))
    return [head + checksum + entries, *bodies]


def unpack(data: BytesLike) -> list[Fragment]:
    """The fragments of a message, as views of it. `ValueError` if it did not arrive as it was sent.

    `data`: the whole message. It must stay as it is while the fragments are in use.
    """
    message = _flat(data)
    if message[: len(_MAGIC)] != _MAGIC or len(message) < _ENTRIES_AT:
        begin = bytes(message[: len(_MAGIC)])
        raise ValueError(
            f"a message begins with {begin!r}, not {_MAGIC!r}: do all ranks run the same release?"
        )
    _, nbytes, count = _HEAD.unpack_from(message)
    (stored,) = _CHECKSUM.unpack_from(message, _HEAD.size)
    computed = _crc([message[: _HEAD.size], message[_ENTRIES_AT:]])
    if (nbytes, stored) != (len(message), computed):
        raise ValueError(
            f"a message does not match its checksum: sent {nbytes} bytes, {stored:08x}, computed of {len(message)} "
            f"bytes {computed:08x}"
        )
    # What is proven to be what `pack` wrote is taken by its word.
    end = _ENTRIES_AT + _ENTRY.size * count

    def take(nbytes: int) -> memoryview:
        nonlocal end
        begin, end = end, end + nbytes + -nbytes % _ALIGNMENT
        return message[begin : begin + nbytes]

    fragments = list[Fragment]()
    for kind, write, shard, slot, first_column, rows, size in _ENTRY.iter_unpack(message[_ENTRIES_AT:end]):
        if kind == _ENCODED:
            fragments.append(EncodedChunk(write, shard, slot, take(size)))
            continue
        offsets = np.frombuffer(take(rows * _OFFSET.itemsize), _OFFSET)
        values = np.frombuffer(take(rows * size), np.uint8).reshape(rows, size)
        fragments.append(RawRows(write, shard, slot, first_column, offsets, values))
    return fragments


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
