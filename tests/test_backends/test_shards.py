"""Shards are what Zarr's sharding codec reads and writes, and nothing unsound gets past the proof."""

from __future__ import annotations

from itertools import pairwise

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
from zarr.storage import MemoryStore

from cnr_backends import (
    ArgumentError,
    Backend,
    ShardError,
    build_shard,
    check_chunk,
    index_nbytes,
    open_backend,
    parse_index,
)

CHUNKS = st.lists(st.none() | st.binary(max_size=40), min_size=1, max_size=12)
MISSING = 2**64 - 1


def _whole(chunks: list[bytes | None]) -> bytes:
    return b"".join(build_shard(chunks))


def _index(*entries: tuple[int, int]) -> bytes:
    table = np.array(entries, dtype="<u8").tobytes()
    return table + int(google_crc32c.value(table)).to_bytes(4, "little")


def _array(store: MemoryStore) -> zarr.Array[zarr.core.metadata.ArrayV3Metadata]:
    """An array whose shards hold 2 x 3 chunks of (4, 2) float32."""
    codec = ShardingCodec(
        chunk_shape=(4, 2),
        codecs=[BytesCodec(endian="little"), Crc32cCodec()],
        index_codecs=[BytesCodec(endian="little"), Crc32cCodec()],
    )
    return zarr.create_array(
        store,
        shape=(8, 12),
        chunks=(8, 6),
        dtype="float32",
        serializer=codec,
        compressors=None,
        fill_value=np.nan,
    )


@pytest.mark.slow
@given(CHUNKS)
def test_a_shard_can_be_taken_apart_again(chunks: list[bytes | None]) -> None:
    shard = _whole(chunks)
    tail = index_nbytes(len(chunks))
    index = parse_index(shard[-tail:], len(chunks), len(shard))
    assert index.offsets.dtype == index.lengths.dtype == np.int64
    assert index.present.tolist() == [chunk is not None for chunk in chunks]
    assert index.crc == int.from_bytes(shard[-4:], "little")
    for chunk, offset, length in zip(chunks, index.offsets, index.lengths, strict=True):
        if chunk is None:
            assert (offset, length) == (0, 0)
        else:
            assert check_chunk(shard[offset : offset + length]) == chunk


@pytest.mark.parametrize("present", [[0], [5], [0, 2, 3], [], range(6)])
def test_zarr_reads_what_we_build(present: list[int]) -> None:
    store = MemoryStore()
    array = _array(store)
    values = np.arange(48, dtype="<f4").reshape(8, 6)
    expected = np.full((8, 12), np.nan, dtype="f4")
    chunks: list[bytes | None] = [None] * 6
    for number in present:
        row, column = number // 3 * 4, number % 3 * 2
        chunks[number] = values[row : row + 4, column : column + 2].tobytes()
        expected[row : row + 4, 6 + column : 8 + column] = values[row : row + 4, column : column + 2]
    backend = open_backend(store)
    backend.put("c/0/1", build_shard(chunks))
    np.testing.assert_array_equal(array[:], expected)
    np.testing.assert_array_equal(array[2:5, 7:10], expected[2:5, 7:10])


def test_we_read_what_zarr_builds() -> None:
    store = MemoryStore()
    array = _array(store)
    values = np.arange(96, dtype="<f4").reshape(8, 12)
    values[:4, :2] = np.nan
    array[:] = values
    backend: Backend = open_backend(store)
    size = backend.size("c/0/0")
    index = parse_index(backend.get_suffix("c/0/0", index_nbytes(6)), 6, size)
    assert index.present.tolist() == [False, True, True, True, True, True]
    data = backend.get_range("c/0/0", int(index.offsets[4]), int(index.lengths[4]))
    np.testing.assert_array_equal(np.frombuffer(check_chunk(data), "<f4").reshape(4, 2), values[4:, 2:4])


def test_the_bytes_are_fixed() -> None:
    golden = (
        "616263" "b73f4b36"  # abc, its checksum
        "00000000"  # an empty chunk: its checksum alone
        "0000000000000000" "0700000000000000" "ffffffffffffffff" "ffffffffffffffff"
        "0700000000000000" "0400000000000000"
    )  # fmt: skip
    shard = _whole([b"abc", None, b""])
    assert shard[:-4].hex() == golden
    assert shard[-4:] == int(google_crc32c.value(shard[11:-4])).to_bytes(4, "little")


@given(CHUNKS, st.data())
def test_no_changed_byte_of_an_index_gets_past(chunks: list[bytes | None], data: st.DataObject) -> None:
    shard = _whole(chunks)
    tail = bytearray(shard[-index_nbytes(len(chunks)) :])
    place = data.draw(st.integers(0, len(tail) - 1))
    tail[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ShardError, match="checksum"):
        parse_index(bytes(tail), len(chunks), len(shard))


@given(st.binary(max_size=60), st.data())
def test_no_changed_byte_of_a_chunk_gets_past(payload: bytes, data: st.DataObject) -> None:
    chunk = bytearray(b"".join(build_shard([payload])[:2]))
    assert check_chunk(chunk) == payload
    chunk[data.draw(st.integers(0, len(chunk) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ShardError, match="checksum"):
        check_chunk(chunk)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=8))
def test_what_is_accepted_lies_inside_and_apart(entries: list[tuple[int, int]]) -> None:
    size = 10_000
    body = size - index_nbytes(len(entries))
    folded = [(a % 2000, b % 2000) if (a ^ b) % 4 else (a, b) for a, b in entries]
    try:
        index = parse_index(_index(*folded), len(folded), size)
    except ShardError:
        sound = [entry for entry in folded if entry != (MISSING, MISSING)]
        places = sorted(sound)
        outside = any(o + n > body or n < 4 for o, n in sound)
        assert outside or any(a[0] + a[1] > b[0] for a, b in pairwise(places))
    else:
        taken = np.zeros(body, dtype=int)
        for offset, length in zip(index.offsets[index.present], index.lengths[index.present], strict=True):
            taken[offset : offset + length] += 1
        assert taken.max(initial=0) <= 1
        assert int(taken.sum()) == int(index.lengths.sum())


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([(0, 10), (9, 10)], "chunk 1 overlaps"),
        ([(9, 10), (0, 10)], "chunk 0 overlaps"),
        ([(5, 10), (5, 10)], "overlaps"),
        ([(0, 10), (MISSING, 10)], "chunk 1 has only one of its two numbers marked as missing"),
        ([(0, MISSING), (0, 10)], "chunk 0 has only one of its two numbers marked as missing"),
        ([(0, 65), (MISSING, MISSING)], "chunk 0 reaches outside the 64 bytes"),
        ([(60, 5), (MISSING, MISSING)], "chunk 0 reaches outside"),
        ([(2**64 - 8, 16), (MISSING, MISSING)], "chunk 0 reaches outside"),
        ([(8, 2**64 - 8), (MISSING, MISSING)], "chunk 0 reaches outside"),
        ([(0, 3), (MISSING, MISSING)], "chunk 0 is smaller than its checksum"),
    ],
)
def test_unsound_indexes_say_which_chunk(entries: list[tuple[int, int]], fault: str) -> None:
    with pytest.raises(ShardError, match=fault):
        parse_index(_index(*entries), 2, 64 + index_nbytes(2))


def test_a_full_shard_is_sound_to_the_last_byte() -> None:
    index = parse_index(_index((32, 32), (0, 32)), 2, 64 + index_nbytes(2))
    assert index.offsets.tolist() == [32, 0]


@pytest.mark.parametrize(
    ("data", "chunks", "size"), [(b"", 1, 100), (_index((0, 4)), 2, 100), (_index((0, 4)), 1, 19)]
)
def test_an_index_of_the_wrong_size_is_an_error(data: bytes, chunks: int, size: int) -> None:
    with pytest.raises(ShardError, match="takes"):
        parse_index(data, chunks, size)


@pytest.mark.parametrize("data", [b"", b"abc"])
def test_a_chunk_smaller_than_its_checksum_is_an_error(data: bytes) -> None:
    with pytest.raises(ShardError, match=r"^chunk 7 has .*its checksum alone takes 4"):
        check_chunk(data, what="chunk 7")


def test_a_shard_has_chunks() -> None:
    for call in (lambda: build_shard([]), lambda: index_nbytes(0), lambda: parse_index(b"", 0, 0)):
        with pytest.raises(ArgumentError):
            call()
