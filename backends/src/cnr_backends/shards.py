"""Shard objects as Zarr's ``sharding_indexed`` codec defines them, built and proved without Zarr.

A shard is its chunks, each followed by its crc32c (u32, little endian), then the index: for each inner chunk
in C order its offset and its size in bytes with the checksum (u64, little endian; both 2**64 - 1 where there
is no chunk), then the crc32c of the index. This is what ``ShardingCodec(codecs=[X, crc32c],
index_codecs=[bytes (little), crc32c], index_location="end")`` reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from cnr_backends.backend import BytesLike
from cnr_backends.errors import ArgumentError, ShardError

_CRC_BYTES = 4
_ENTRY_BYTES = 16
_MISSING = 2**64 - 1


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where the inner chunks of a shard are, proved to lie inside it, apart from each other.

    Attributes
    ----------
    offsets : (chunks,) int64
        First byte of each chunk; 0 where there is none.
    lengths : (chunks,) int64
        Size of each chunk in bytes, its checksum included; 0 where there is none.
    present : (chunks,) bool
        Which chunks there are.
    crc : int
        The checksum stored behind the index: it changes when any chunk's place or size does.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    present: npt.NDArray[np.bool_]
    crc: int


def index_nbytes(chunks: int) -> int:
    """Return the size in bytes of the index of a shard with `chunks` inner chunks, its checksum included."""
    if chunks < 1:
        raise ArgumentError(f"a shard has at least one inner chunk, not {chunks}")
    return _ENTRY_BYTES * chunks + _CRC_BYTES


def build_shard(chunks: Sequence[BytesLike | None]) -> list[BytesLike]:
    """Return the pieces of a shard, in order, to give to `Backend.put`.

    Parameters
    ----------
    chunks : sequence of bytes-like or None
        Encoded inner chunks in C order, without checksums; None where there is no chunk.

    Raises
    ------
    ArgumentError
        If `chunks` is empty.
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
    """Prove the index of a shard and return it.

    Parameters
    ----------
    data : bytes
        The last ``index_nbytes(chunks)`` bytes of the object.
    chunks : int
        How many inner chunks the array's grid gives a shard.
    shard_nbytes : int
        Size of the whole object.

    Raises
    ------
    ShardError
        If the size or checksum is wrong, or a chunk reaches outside the object or into another chunk.
    """
    expected = index_nbytes(chunks)
    if len(data) != expected or shard_nbytes < expected:
        raise ShardError(
            f"the index of a shard with {chunks} chunks takes {expected} bytes; there are {len(data)} "
            f"in an object of {shard_nbytes}"
        )
    table = check_chunk(data, "the index of the shard")
    entries = np.frombuffer(table, dtype="<u8").reshape(chunks, 2).astype(np.uint64)
    present = _prove(entries, np.uint64(shard_nbytes - expected))
    proved = np.where(present[:, None], entries, np.uint64(0)).astype(np.int64)
    crc = int.from_bytes(data[-_CRC_BYTES:], "little")
    return ShardIndex(proved[:, 0].copy(), proved[:, 1].copy(), present, crc)


def check_chunk(data: BytesLike, what: str = "the chunk") -> memoryview:
    """Return a view of `data` without its trailing crc32c, once that is right.

    Raises
    ------
    ShardError
        If it is not.
    """
    view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    if len(view) < _CRC_BYTES:
        raise ShardError(
            f"{what} has {len(view)} bytes, fewer than its checksum alone: the object is damaged"
        )
    body, stored = view[:-_CRC_BYTES], bytes(view[-_CRC_BYTES:])
    if _checksum(body) != stored:
        raise ShardError(
            f"{what} ({len(body)} bytes) does not match its checksum: stored {stored[::-1].hex()}, computed "
            f"{_checksum(body)[::-1].hex()}; the object is damaged"
        )
    return body


def _checksum(data: BytesLike) -> bytes:
    # The extension takes arrays of any memory, but no memoryview.
    return int(google_crc32c.value(np.frombuffer(data, np.uint8))).to_bytes(_CRC_BYTES, "little")


def _prove(entries: npt.NDArray[np.uint64], end: np.uint64) -> npt.NDArray[np.bool_]:
    """Return which of the (chunks, 2) entries are present, all being sound before byte `end`."""
    missing = entries == np.uint64(_MISSING)
    present: npt.NDArray[np.bool_] = ~missing.all(axis=1)
    _refuse(missing.any(axis=1) & present, "is marked as missing by half")
    offsets, lengths = entries[:, 0], entries[:, 1]
    # The differences can't wrap: the first test settles it.
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
            f"the index of the shard is not sound: chunk {numbers[0]} {fault} ({numbers.size} such chunks)"
        )
