"""Messages between ranks: what is packed is unpacked, and what is damaged is noticed."""

from __future__ import annotations

import random
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.ranks.fragments import EncodedChunk, Fragment, RawRows, pack, unpack

u32 = st.integers(0, 2**32 - 1)
DTYPES = ["float32", "float64", "uint16", "uint8", "complex64"]


@st.composite
def raw_rows(draw: st.DrawFn) -> RawRows:
    offsets = np.array(sorted(draw(st.sets(u32, max_size=6))), np.uint32)
    dtype, columns = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    values = rng.integers(0, 255, (len(offsets), columns * np.dtype(dtype).itemsize)).astype(np.uint8)
    return RawRows(draw(u32), draw(u32), draw(u32), draw(u32), offsets, values.view(dtype))


encoded_chunks = st.builds(EncodedChunk, u32, u32, u32, st.binary(max_size=40))
messages = st.lists(st.one_of(encoded_chunks, raw_rows()), max_size=6)


def joined(fragments: list[Fragment]) -> bytes:
    return b"".join(pack(fragments))


def resealed(message: bytearray) -> bytes:
    """A message whose length and checksum are right again, as a faulty sender would write them."""
    message[8:16] = len(message).to_bytes(8, "little")
    message[20:24] = google_crc32c.value(bytes(message[:20] + message[24:])).to_bytes(4, "little")
    return bytes(message)


def plain(fragment: Fragment) -> tuple[Any, ...]:
    where = fragment.write, fragment.shard, fragment.slot
    if isinstance(fragment, EncodedChunk):
        return *where, bytes(fragment.payload)
    return *where, fragment.first_column, fragment.offsets.tolist(), fragment.values.tobytes()


@pytest.mark.slow
@settings(deadline=None)
@given(messages)
def test_what_is_packed_is_unpacked(fragments: list[Fragment]) -> None:
    found = unpack(joined(fragments))
    assert [plain(each) for each in found] == [plain(each) for each in fragments]
    for one, other in zip(found, fragments, strict=True):
        if isinstance(one, RawRows) and isinstance(other, RawRows) and len(other.offsets):
            assert one.offsets.dtype == np.uint32
            values = one.values.view(other.values.dtype)
            assert values.shape == other.values.shape
            assert values.tobytes() == other.values.tobytes()


def test_payloads_and_values_are_not_copied() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    offsets = np.array([4, 9], np.uint32)
    payload = bytearray(b"payload!")
    pieces = pack([EncodedChunk(0, 1, 2, payload), RawRows(0, 1, 2, 3, offsets, values)])
    for source in (np.frombuffer(payload, np.uint8), offsets, values):
        assert any(np.shares_memory(np.frombuffer(piece, np.uint8), source) for piece in pieces)
    message = np.frombuffer(bytearray(b"".join(pieces)), np.uint8)
    encoded, raw = unpack(message.data)
    assert isinstance(encoded, EncodedChunk)
    assert isinstance(raw, RawRows)
    for view in (np.frombuffer(encoded.payload, np.uint8), raw.offsets, raw.values):
        assert np.shares_memory(message, view)


def test_slices_of_columns_are_sent_as_they_are() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    (raw,) = unpack(joined([RawRows(0, 0, 0, 2, np.arange(8, dtype=np.uint32)[::2], values[:, 2:5])]))
    assert isinstance(raw, RawRows)
    assert raw.offsets.tolist() == [0, 2, 4, 6]
    assert raw.values.view(np.float32).tolist() == values[:, 2:5].tolist()


def test_views_are_aligned() -> None:
    fragments: list[Fragment] = [
        EncodedChunk(0, 0, 0, b"abc"),
        RawRows(0, 0, 0, 0, np.array([1], np.uint32), np.array([[1.5]], np.float64)),
    ]
    message = np.frombuffer(joined(fragments), np.uint8)
    _, raw = unpack(message.data)
    assert isinstance(raw, RawRows)
    start = message.__array_interface__["data"][0]
    assert (raw.values.__array_interface__["data"][0] - start) % 8 == 0
    assert (raw.offsets.__array_interface__["data"][0] - start) % 8 == 0


def test_the_bytes_of_a_message() -> None:
    raw = RawRows(7, 8, 9, 16, np.array([3, 258, 9000], np.uint32), np.array([[1], [2], [3]], np.uint16))
    message = joined([EncodedChunk(1, 2, 3, b"\xaa\xbb"), raw])
    assert message == bytes.fromhex("""
        636e7266 72616731 78000000 00000000 02000000 d521b1b3
        00000000 01000000 02000000 03000000 00000000 00000000 02000000 00000000
        01000000 07000000 08000000 09000000 10000000 03000000 02000000 00000000
        aabb0000 00000000
        03000000 02010000 28230000 00000000 01000200 03000000
    """)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(messages, st.randoms())
def test_a_garbled_message_is_refused(fragments: list[Fragment], rnd: random.Random) -> None:
    message = bytearray(joined(fragments))
    for _ in range(rnd.choice([1, 1, 3])):
        message[rnd.randrange(len(message))] ^= rnd.randrange(1, 256)
    if bytes(message) != joined(fragments):
        with pytest.raises(ValueError, match="message"):
            unpack(message)


@pytest.mark.slow
@settings(deadline=None)
@given(messages, st.data())
def test_a_message_of_another_length_is_refused(fragments: list[Fragment], data: st.DataObject) -> None:
    message = joined(fragments)
    with pytest.raises(ValueError, match="message"):
        unpack(message[: data.draw(st.integers(0, len(message) - 1))])
    with pytest.raises(ValueError, match="message"):
        unpack(message + data.draw(st.binary(min_size=1, max_size=9)))


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(messages, st.randoms())
def test_a_faulty_sender_is_refused_or_taken_by_its_word(
    fragments: list[Fragment], rnd: random.Random
) -> None:
    """With a right checksum: whatever is accepted says exactly what the bytes say, none of them beyond the message."""
    message = bytearray(joined(fragments))
    for _ in range(rnd.choice([1, 2, 4])):
        damage = rnd.randrange(4)
        at = rnd.randrange(16, len(message))
        if damage == 0:
            message[at] ^= 1 << rnd.randrange(8)
        elif damage == 1:
            at -= at % 4
            message[at : at + 4] = rnd.choice([0, 1, 2, 2**31, 2**32 - 1]).to_bytes(4, "little")
        elif damage == 2 and at > 24:
            del message[at:]
        else:
            message += bytes(rnd.choice([1, 8, 32]))
    sealed = resealed(message)
    buffer = b"\xff" * 64 + sealed + b"\xff" * 64
    try:
        found = unpack(memoryview(buffer)[64 : 64 + len(sealed)])
    except ValueError:
        return
    assert joined(found) == sealed


def spoiled(**changes: Any) -> bytes:
    """A message with one fragment of raw rows, of which the entry says something else."""
    names = ["kind", "write", "shard", "slot", "first_column", "rows"]
    raw = RawRows(1, 2, 3, 4, np.array([3, 5], np.uint32), np.array([[1, 2], [3, 4]], np.float32))
    message = bytearray(joined([raw]))
    for name, value in changes.items():
        if name == "size":
            message[48:56] = value.to_bytes(8, "little")
        else:
            at = 24 + 4 * names.index(name)
            message[at : at + 4] = value.to_bytes(4, "little")
    return resealed(message)


REFUSED: dict[str, tuple[bytes, str]] = {
    "no head": (b"cnrfrag1", "of 8 bytes, of which the head alone takes 24"),
    "another magic": (
        resealed(bytearray(joined([]).replace(b"1", b"2"))),
        "do all ranks run the same release",
    ),
    "unknown kind": (spoiled(kind=2), "not known"),
    "encoded with rows": (spoiled(kind=0), "not known"),
    "too many rows": (spoiled(rows=2**32 - 1), "is cut at byte 56"),
    "rows too wide": (spoiled(size=2**64 - 1), "is cut at byte 64"),
    "no rows": (spoiled(rows=0), "not known"),
    "no values": (spoiled(size=0), "not known"),
    "fewer rows": (spoiled(rows=1), "other bytes than zeros"),
    "narrower rows": (spoiled(size=4), "8 bytes follow the last fragment"),
    "too many fragments": (
        resealed(bytearray(joined([])[:16] + b"\xff\xff\xff\xff" + joined([])[20:])),
        "is cut at byte 24",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    message, expected = REFUSED[name]
    with pytest.raises(ValueError, match=expected):
        unpack(message)


@pytest.mark.parametrize("offsets", [[5, 3], [3, 3], [0, 2, 1]])
def test_rows_ascend(offsets: list[int]) -> None:
    raw = RawRows(1, 2, 3, 4, np.array(offsets, np.uint32), np.zeros((len(offsets), 2), np.float32))
    with pytest.raises(ValueError, match="the rows of chunk 3 of shard 2 do not ascend"):
        unpack(joined([raw]))


@pytest.mark.parametrize("shape", [(3, 2), (2,), (1, 4)])
def test_values_that_are_not_of_the_rows_are_not_sent(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="for 2 rows of chunk 3 of shard 2"):
        pack([RawRows(1, 2, 3, 4, np.array([3, 5], np.uint32), np.zeros(shape, np.float32))])
