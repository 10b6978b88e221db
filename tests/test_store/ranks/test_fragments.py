"""Messages between ranks: what is packed is unpacked, and what is damaged is noticed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.ranks.fragments import EncodedChunk, Fragment, RawRows, pack, unpack

u32 = st.integers(0, 2**32 - 1)
DTYPES = ["float32", "float64", "uint16", "uint8", "complex64"]


@st.composite
def raw_rows(draw: st.DrawFn) -> RawRows:
    offsets = np.array(sorted(draw(st.sets(u32, min_size=1, max_size=6))), np.uint32)
    dtype, columns = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    values = rng.integers(0, 255, (len(offsets), columns * np.dtype(dtype).itemsize)).astype(np.uint8)
    return RawRows(draw(u32), draw(u32), draw(u32), draw(u32), offsets, values.view(dtype))


encoded_chunks = st.builds(EncodedChunk, u32, u32, u32, st.binary(max_size=40))
messages = st.lists(st.one_of(encoded_chunks, raw_rows()), max_size=6)


def joined(fragments: list[Fragment]) -> bytes:
    return b"".join(pack(fragments))


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


REFUSED: dict[str, tuple[bytes, str]] = {
    "no head": (b"cnrfrag1", "do all ranks run the same release"),
    "another magic": (joined([]).replace(b"1", b"2"), "do all ranks run the same release"),
    "more bytes than were sent": (joined([]) + bytes(8), "sent 24 bytes, .* computed of 32 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    message, expected = REFUSED[name]
    with pytest.raises(ValueError, match=expected):
        unpack(message)
