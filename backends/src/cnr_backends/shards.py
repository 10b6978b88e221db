"""Builds and validates shards, as Zarr's ``sharding_indexed`` codec defines them, without Zarr.

A shard has its chunks, each followed by its crc32c (u32, little endian). Then comes the index: for each inner chunk in
C order, its offset and its size in bytes with the checksum (u64, little endian; both 2**64 - 1 where there is no
chunk). The crc32c of the index comes last. ``ShardingCodec(codecs=[X, crc32c], index_codecs=[bytes (little), crc32c],
index_location="end")`` reads and writes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from cnr_backends.errors import ArgumentError, ShardError
from cnr_backends.pieces import BytesLike

_CRC_BYTES = 4
_ENTRY_BYTES = 16
_MISSING = 2**64 - 1


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where the inner chunks of a shard are. They are inside the shard, and none overlaps another.

    Attributes
    ----------
    offsets
        int64 (chunks,): the first byte of each chunk; 0 where there is none.
    lengths
        int64 (chunks,): the size of each chunk in bytes, with its checksum; 0 where there is none.
    present
        bool (chunks,): which chunks there are.
    crc
        The stored checksum of the index. It changes when any chunk's place or size does.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    present: npt.NDArray[np.bool_]
    crc: int


def index_nbytes(chunks: int) -> int:
    """Return the size in bytes of the index of a shard, with its checksum.

    Parameters
    ----------
    chunks
        The number of inner chunks of the shard.

    Raises
    ------
    ArgumentError
        `chunks` is less than 1.
    """
    if chunks < 1:
        raise ArgumentError(f"a shard has at least one inner chunk, got {chunks}")
    return _ENTRY_BYTES * chunks + _CRC_BYTES


def build_shard(chunks: Sequence[BytesLike | None]) -> list[BytesLike]:
    """Return the pieces of a shard in order, as `Backend.put` takes them.

    Parameters
    ----------
    chunks
        Encoded inner chunks in C order, without checksums; None where there is no chunk.

    Raises
    ------
    ArgumentError
        `chunks` is empty.
    """
    index_nbytes(len(chunks))
    index = np.full((len(chunks), 2), _MISSING, dtype="<u8")
    pieces: list[BytesLike] = []
    offset = 0
    for number, chunk in enumerate(chunks):
        if chunk is None:
            continue
        length = memoryview(chunk).nbytes + _CRC_BYTES
        index[number] = offset, length
        pieces += [chunk, _checksum(chunk)]
        offset += length
    table = index.tobytes()
    return [*pieces, table, _checksum(table)]


def parse_index(data: bytes, chunks: int, shard_nbytes: int) -> ShardIndex:
    """Validate the index of a shard and return it.

    Parameters
    ----------
    data
        The last ``index_nbytes(chunks)`` bytes of the object.
    chunks
        The number of inner chunks of a shard in the array's grid.
    shard_nbytes
        The size of the whole object.

    Raises
    ------
    ShardError
        The size or the checksum is wrong, or a chunk reaches outside the object or overlaps another.
    """
    expected = index_nbytes(chunks)
    if len(data) != expected or shard_nbytes < expected:
        raise ShardError(
            f"the index of a shard with {chunks} chunks takes {expected} bytes; there are {len(data)} "
            f"in an object of {shard_nbytes}"
        )
    table = check_chunk(data, "the index of the shard")
    entries = np.frombuffer(table, dtype="<u8").reshape(chunks, 2).astype(np.uint64)
    present = _validate(entries, np.uint64(shard_nbytes - expected))
    places = np.where(present[:, None], entries, np.uint64(0)).astype(np.int64)
    crc = int.from_bytes(data[-_CRC_BYTES:], "little")
    return ShardIndex(places[:, 0].copy(), places[:, 1].copy(), present, crc)


def check_chunk(data: BytesLike, what: str = "the chunk") -> memoryview:
    """Return a view of `data` without its trailing crc32c, if that is right.

    Parameters
    ----------
    data
        A chunk and its checksum.
    what
        How messages call the chunk.

    Raises
    ------
    ShardError
        The checksum is wrong, or there is none.
    """
    view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    if len(view) < _CRC_BYTES:
        raise ShardError(
            f"{what} has {len(view)} bytes, its checksum alone takes {_CRC_BYTES}: the object is damaged"
        )
    body, stored = view[:-_CRC_BYTES], bytes(view[-_CRC_BYTES:])
    if _checksum(body) != stored:
        raise ShardError(
            f"{what} ({len(body)} bytes) does not match its checksum: stored {stored[::-1].hex()}, computed "
            f"{_checksum(body)[::-1].hex()}; the object is damaged"
        )
    return body


def _checksum(data: BytesLike) -> bytes:
    # The extension takes any array, but no memoryview.
    return int(google_crc32c.value(np.frombuffer(data, np.uint8))).to_bytes(_CRC_BYTES, "little")


def _validate(entries: npt.NDArray[np.uint64], end: np.uint64) -> npt.NDArray[np.bool_]:
    """Return which of the (chunks, 2) entries are present, if all chunks are valid and end before byte `end`."""
    missing = entries == np.uint64(_MISSING)
    present: npt.NDArray[np.bool_] = ~missing.all(axis=1)
    _refuse(missing.any(axis=1) & present, "has only one of its two numbers marked as missing")
    offsets, lengths = entries[:, 0], entries[:, 1]
    # The difference can't wrap around: np.minimum keeps it from being negative.
    outside = (offsets > end) | (lengths > end) | (lengths > end - np.minimum(offsets, end))
    _refuse(outside & present, f"reaches outside the {end} bytes before the index")
    _refuse((lengths < _CRC_BYTES) & present, "is smaller than its checksum")
    order = np.flatnonzero(present)[np.argsort(offsets[present], kind="stable")]
    overlap = np.zeros(len(entries), dtype=np.bool_)
    overlap[order[1:]] = offsets[order[:-1]] + lengths[order[:-1]] > offsets[order[1:]]
    _refuse(overlap, "overlaps another")
    return present


def _refuse(faulty: npt.NDArray[np.bool_], fault: str) -> None:
    numbers = np.flatnonzero(faulty)
    if numbers.size:
        raise ShardError(
            f"the index of the shard is damaged: chunk {numbers[0]} {fault} ({numbers.size} such chunks)"
        )
