"""Payloads: their bytes as specified, round trips over row sets, and every way in which they can be wrong."""

import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import (
    KMeansRows,
    LosslessRows,
    ParameterType,
    PayloadError,
    PayloadLimitError,
    RowCodec,
    RowsError,
    RowSet,
    RowSetKind,
    Scheme,
    Segment,
    UniformRows,
    UnsupportedPayloadError,
    build_payload,
    parse,
    present_rows,
    reseal,
    rows_written,
)
from cnr_codecs.elements import element_named
from cnr_codecs.payload.payload import encode_head
from cnr_codecs.protocol import Rows
from tests.nightly import NIGHT, histories
from tests.test_codecs.payload_bytes import (
    VERSIONS,
    Layout,
    Part,
    head_bytes,
    header,
    of_version_1,
    proved,
    segment,
)

ELEMENTS = {"float32": 1, "float16": 2, "bfloat16": 3, "float64": 4, "int8": 5, "int16": 6, "int32": 7}
ELEMENTS |= {"int64": 8, "uint8": 9, "uint16": 10, "uint32": 11, "uint64": 12, "bool": 13}


def f4(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def f2(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def u2(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


def u4(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


# One row, raw: the fifth of ten.
RAW_ROW = segment(1, 32, 0, 2, 1, u2(4), f4(1.5, -2))


def decode(data: Any, fill: float = 7.0) -> tuple[Rows, int, Rows]:
    payload = parse(data)
    out = np.full((payload.rows, payload.dim), fill, cnr_codecs.array_dtype(payload.element))
    need = np.ones(payload.rows, np.uint8)
    return out, cnr_codecs.decode_into(payload, out, need), need


def test_bytes_of_a_lossless_payload() -> None:
    values = np.array([[1.5, -2], [3, 4]], np.float32)
    data = LosslessRows().encode_rows(
        values, np.array([4, 9]), 10, element="float32", seal=0xFEDCBA9876543210
    )
    expected = header(seal=0xFEDCBA9876543210) + segment(
        1, 32, 0, 1, 2, bytes([1 << 4, 1 << 1]), values.tobytes()
    )
    assert data == expected.encode()


def test_bytes_of_a_quantized_payload() -> None:
    # 0 to 15 and the codes are the values; the second row needs float32 parameters, the third none.
    values = np.array([np.arange(16), 70000 + np.arange(16), [np.inf] * 16], np.float32)
    codes = bytes.fromhex("1032547698badcfe")
    data = UniformRows("asymmetric", 4).encode_rows(values, None, 3, element="float32")
    expected = header(3, 3, 16) + segment(2, 4, 1, 0, 1, f2(1, 0), codes)
    expected += segment(2, 4, 2, 1, 1, bytes([2]), f4(1, 70000), codes)
    expected += segment(1, 32, 0, 1, 1, bytes([4]), values[2].tobytes())
    assert data == expected.encode()


def test_bytes_of_a_symmetric_payload() -> None:
    values = np.array([[-7, -5, -3, -1, 1, 3, 5, 7, 7]], np.float32)
    data = UniformRows("symmetric", 3).encode_rows(values, None, 1, element="float32")
    # Codes 0 to 7 and 7 again, three bits each, the lowest bit first.
    packed = sum(code << 3 * j for j, code in enumerate([0, 1, 2, 3, 4, 5, 6, 7, 7])).to_bytes(4, "little")
    assert data == (header(1, 1, 9) + segment(3, 3, 1, 0, 1, f2(1), packed)).encode()
    np.testing.assert_array_equal(decode(data)[0], values)


def test_bytes_of_a_payload_with_a_codebook_each() -> None:
    values = np.array([[1, 2, 2, 1, 1, 2, 1, 2, 2], [70001, 3, 3, 3, 3, 3, 3, 3, 3], [4] * 9], np.float32)
    data = KMeansRows(1).encode_rows(values, None, 3, element="float32")
    expected = header(2, 3, 9) + segment(4, 1, 1, 1, 2, bytes([5]), f2(1, 2, 4, 4), u2(0b110100110, 0))
    assert data == (expected + segment(4, 1, 2, 1, 1, bytes([2]), f4(3, 70001), u2(1))).encode()
    np.testing.assert_array_equal(decode(data)[0], values)


def test_bytes_of_a_payload_with_shared_codebooks() -> None:
    values = np.array([[1, 2, 2, 1], [2, 1, 1, 2], [3, 5, 5, 3], [5, 5, 3, 3]], np.float32)
    codec = KMeansRows(1, "block", block_rows=2)
    data = codec.encode_rows(values, np.array([1, 3, 4, 6]), 8, element="float32")
    body = bytes([0b01011010]), u4(2), f2(1, 2, 3, 5), bytes([0, 0, 1, 1]), bytes([6, 9, 6, 3])
    assert data == (header(1, 8, 4) + segment(5, 1, 1, 1, 4, *body)).encode()
    np.testing.assert_array_equal(decode(data)[0][[1, 3, 4, 6]], values)


def test_more_shared_codebooks_than_a_byte_numbers() -> None:
    values = np.repeat(np.arange(600, dtype=np.float32), 2)[:, None] + np.zeros(40, np.float32)
    data = KMeansRows(1, "block", block_rows=2).encode_rows(values, None, 1200, element="float32")
    assert len(data) == 24 + 4 + 16 + 4 + 4 + 600 * 2 * 2 + 1200 * (2 + 5)
    np.testing.assert_array_equal(decode(data)[0], values)


@pytest.mark.parametrize("element", ELEMENTS)
def test_lossless_rows_of_every_element_type(element: str) -> None:
    dtype = cnr_codecs.array_dtype(element)
    rng = np.random.default_rng(3)
    if element == "bool":
        values = rng.integers(0, 2, (9, 5)).astype(bool)
    elif element == "bfloat16":
        values = (rng.integers(0, 1 << 16, (9, 5), np.uint32) << 16).view(np.float32)
    else:
        values = rng.integers(0, 256, (9, 5 * dtype.itemsize), np.uint8).view(dtype)
    data = LosslessRows().encode_rows(values, np.arange(0, 18, 2), 18, element=element)
    assert data[5] == ELEMENTS[element]
    assert parse(data).element == element
    out, written, need = decode(data, 1)
    assert written == 9
    np.testing.assert_array_equal(need, [0, 1] * 9)
    assert out[::2].tobytes() == values.tobytes()
    assert (out[1::2] == 1).all()
    assert cnr_codecs.element_of(dtype) == ("float32" if element == "bfloat16" else element)


@given(data=st.data(), rows=st.one_of(st.integers(1, 80), st.integers(65530, 65545), st.just(200_000)))
@settings(deadline=None, max_examples=histories(150))
def test_row_sets_round_trip_in_the_fewest_bytes(data: st.DataObject, rows: int) -> None:
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=60, unique=True))
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, max(0, min(rows - 1, 3))))
        chosen = [*range(start, data.draw(st.integers(start + 1, rows)))]
    offsets = np.array(sorted(chosen))
    values = np.arange(len(offsets), dtype=np.float32)[:, None]
    encoded = LosslessRows().encode_rows(values, offsets, rows, element="float32")
    payload = parse(encoded)
    np.testing.assert_array_equal(present_rows(payload), offsets)
    out, written, _ = decode(encoded, -1)
    assert written == len(offsets)
    np.testing.assert_array_equal(out[offsets], values)
    assert (out == -1).sum() == rows - len(offsets)
    sizes = {RowSetKind.BITMAP: -(-rows // 8), RowSetKind.OFFSETS32: 4 * len(offsets)}
    if rows <= 1 << 16:
        sizes[RowSetKind.OFFSETS16] = 2 * len(offsets)
    if offsets[-1] == len(offsets) - 1:
        sizes[RowSetKind.PREFIX] = 0
    assert payload.segments[0].row_set.kind == min(sizes, key=lambda kind: (sizes[kind], kind))
    assert len(encoded) == 24 + 4 + 16 + 4 + min(sizes.values()) + values.nbytes


def test_a_payload_may_hold_no_rows() -> None:
    for codec in UniformRows(), LosslessRows():
        data = codec.encode_rows(np.empty((0, 3), np.float32), None, 5, element="float32")
        assert data == header(0, 5, 3).encode()
        assert len(present_rows(parse(data))) == 0
        assert decode(data)[1] == 0


def test_a_payload_has_at_most_1024_segments() -> None:
    def segments(count: int) -> list[Segment]:
        nothing, codes = np.empty((0, 1), np.float32), np.empty((1, 0), np.uint8)
        rows = [RowSet.of(np.array([row]), 2000) for row in range(count)]
        return [Segment(Scheme.ABSENT, 0, ParameterType.NONE, row, nothing, codes) for row in rows]

    float32 = element_named("float32")
    payload = parse(build_payload(2000, 1, float32, segments(1024)))
    np.testing.assert_array_equal(present_rows(payload), np.arange(1024))
    for count in 1025, 70_000:
        with pytest.raises(RowsError, match=f"1024 segments, got {count}"):
            build_payload(2000, 1, float32, segments(count) if count < 2000 else segments(1) * count)


def test_the_body_of_a_segment_has_a_size_that_fits() -> None:
    (held,) = parse((header() + RAW_ROW).encode()).segments
    kind = element_named("float32")
    assert len(encode_head(10, 2, kind, [held], [(1 << 32) - 1], 0)) == 24 + 4 + 16 + 2 + 4
    with pytest.raises(RowsError, match="got 50 and 4294967296; use fewer rows"):
        encode_head(10, 2, kind, [held], [1 << 32], 0)


def test_reseal_changes_the_seal_alone() -> None:
    values = np.random.default_rng(1).normal(size=(9, 8)).astype(np.float32)
    plain = UniformRows().encode_rows(values, None, 9, element="float32")
    sealed = UniformRows().encode_rows(values, None, 9, element="float32", seal=(1 << 64) - 1)
    assert reseal(plain, (1 << 64) - 1) == sealed
    assert reseal(sealed, 0) == plain
    assert parse(sealed).seal == (1 << 64) - 1
    older = of_version_1(plain)
    assert reseal(older, (1 << 64) - 1) == of_version_1(sealed)
    damaged = bytearray(plain)
    damaged[8] ^= 1
    with pytest.raises(PayloadError, match="head is damaged"):
        reseal(damaged, 1)
    with pytest.raises(PayloadError, match="20 bytes, the header alone takes 24"):
        reseal(plain[:20], 1)
    for seal in -1, 1 << 64:
        with pytest.raises(RowsError, match="64-bit"):
            reseal(plain, seal)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_every_kind_of_buffer_is_parsed(wrap: Callable[[bytes], Any]) -> None:
    for version in VERSIONS:
        out, written, _ = decode(wrap((header() + RAW_ROW).encode(version)))
        assert written == 1
        assert out[4].tolist() == [1.5, -2]


MALFORMED = {
    "other magic": (header(magic=b"CNRQ") + RAW_ROW, "CNRQ"),
    "element type 0": (header(element=0) + RAW_ROW, "element type 0"),
    "element type 14": (header(element=14) + RAW_ROW, "element type 14"),
    "no rows": (header(rows=0) + RAW_ROW, "empty"),
    "no columns": (header(dim=0) + RAW_ROW, "empty"),
    "segment missing": (header(segments=2) + RAW_ROW, "segment 1.*truncated|2 segments don't fit"),
    "bytes after the end": (header() + RAW_ROW + b"\0", "1 bytes follow"),
    "undeclared segment": (header(segments=0) + RAW_ROW, "follow"),
    "1,025 segments": (header(segments=1025) + RAW_ROW, "1025 segments, the limit is 1024"),
    "unknown scheme": (header() + segment(8, 4, 1, 0, 1, f2(1, 0), bytes(1)), "scheme 8"),
    "unknown parameter type": (header() + segment(2, 4, 3, 0, 1, f2(1, 0), bytes(1)), "parameter type 3"),
    "unknown row-set kind": (header() + segment(1, 32, 0, 5, 1, b"", bytes(8)), "row-set kind 5"),
    "raw with parameters": (header() + segment(1, 32, 1, 0, 1, f2(1, 0), bytes(8)), "FLOAT16.*RAW"),
    "absent with parameters": (header() + segment(0, 0, 2, 0, 1, f4(1, 0)), "FLOAT32.*ABSENT"),
    "codes without parameters": (header() + segment(2, 4, 0, 0, 1, bytes(1)), "NONE.*ASYMMETRIC"),
    "no bits": (header() + segment(2, 0, 1, 0, 1, f2(1, 0)), "0 bits"),
    "nine bits": (header() + segment(3, 9, 1, 0, 1, f2(1), bytes(3)), "9 bits"),
    "raw of other bits": (header() + segment(1, 16, 0, 0, 1, bytes(4)), "16 bits"),
    "absent with bits": (header() + segment(0, 1, 0, 0, 1), "1 bits"),
    "quantized integers": (header(element=7) + segment(2, 4, 1, 0, 1, f2(1, 0), bytes(1)), "int32"),
    "quantized float64": (header(element=4) + segment(2, 4, 1, 0, 1, f2(1, 0), bytes(1)), "float64"),
    "a bool of 2": (header(element=13) + segment(1, 8, 0, 0, 1, b"\1\2"), "stored as 2"),
    "segment without rows": (header() + segment(1, 32, 0, 0, 0), "0 rows"),
    "more rows than the chunk": (header() + segment(1, 32, 0, 0, 11, bytes(88)), "11 rows"),
    "row set cut": (
        header() + segment(1, 32, 0, 3, 2, bytes(7)),
        "row set.*truncated|row set has 7 .* takes 8",
    ),
    "parameters cut": (header() + segment(2, 4, 2, 0, 2, f4(1, 1, 0)), "parameters.*truncated"),
    "codes cut": (header() + segment(1, 32, 0, 0, 2, bytes(15)), "codes.*truncated"),
    "count of 2**32 - 1": (
        header(rows=(1 << 22), dim=1) + segment(1, 32, 0, 0, (1 << 32) - 1),
        "4294967295 rows",
    ),
    "offsets equal": (header() + segment(1, 32, 0, 2, 2, u2(3, 3), bytes(16)), "increasing"),
    "offsets falling": (
        header() + segment(1, 32, 0, 3, 2, struct.pack("<2I", 3, 2), bytes(16)),
        "increasing",
    ),
    "offset beyond the rows": (header() + segment(1, 32, 0, 2, 2, u2(3, 10), bytes(16)), "offset 10"),
    "wide offset beyond the rows": (
        header() + segment(1, 32, 0, 3, 1, struct.pack("<I", 1 << 31), bytes(8)),
        "offset 2147483648",
    ),
    "bitmap of fewer rows": (header() + segment(1, 32, 0, 1, 2, b"\1\0", bytes(16)), "has 1 rows"),
    "bitmap of more rows": (header() + segment(1, 32, 0, 1, 2, b"\7\0", bytes(16)), "has 3 rows"),
    "bitmap with unused bits": (header() + segment(1, 32, 0, 1, 2, b"\1\4", bytes(16)), "beyond row 9"),
    "a row twice": (header(segments=2) + RAW_ROW + RAW_ROW, "row 4 is in an earlier"),
    "a row twice, in a prefix": (header(segments=2) + RAW_ROW + segment(0, 0, 0, 0, 5), "row 4"),
    "a scale of NaN": (header() + segment(2, 4, 1, 0, 1, f2(np.nan, 0), bytes(1)), "not finite"),
    "an infinite offset": (header() + segment(2, 4, 2, 0, 1, f4(1, np.inf), bytes(1)), "not finite"),
    "a negative scale": (header() + segment(2, 4, 2, 0, 1, f4(-1, 0), bytes(1)), "negative"),
    "a scale of minus zero": (header() + segment(3, 4, 1, 0, 1, f2(-0.0), bytes(1)), "negative"),
    "a scale of 17 bits": (header() + segment(2, 4, 2, 0, 1, f4(1 + 2**-16, 0), bytes(1)), "16 significant"),
    "a scale that overflows": (header() + segment(2, 4, 2, 0, 1, f4(2.0**127, 0), bytes(1)), "overflows"),
    "a codebook without parameters": (header() + segment(4, 1, 0, 0, 1, bytes(5)), "NONE.*CODEBOOK"),
    "codebooks of integers": (header(element=7) + segment(4, 1, 1, 0, 1, f2(1, 2), bytes(1)), "int32"),
    "a codebook of nine bits": (header() + segment(4, 9, 1, 0, 1, bytes(1027)), "9 bits"),
    "a codebook cut": (header() + segment(4, 1, 2, 0, 2, f4(1, 2, 3)), "parameters.*truncated"),
    "a centroid of NaN": (header() + segment(4, 1, 1, 0, 1, f2(1, np.nan), bytes(1)), "not finite"),
    "a centroid of infinity": (header() + segment(4, 1, 1, 0, 1, f2(1, np.inf), bytes(1)), "not finite"),
    "centroids falling": (header() + segment(4, 1, 1, 0, 1, f2(2, 1), bytes(1)), "not ascending"),
    "shared centroids falling": (
        header() + segment(5, 1, 1, 0, 1, u4(1), f2(2, 1), bytes(2)),
        "not ascending",
    ),
    "no shared codebooks": (header() + segment(5, 1, 1, 0, 1, u4(0), bytes(2)), "0 codebooks for 1"),
    "more codebooks than rows": (header() + segment(5, 1, 1, 0, 1, u4(2), bytes(10)), "2 codebooks for 1"),
    "a codebook beyond the last": (
        header() + segment(5, 1, 1, 0, 2, u4(2), f2(1, 2, 1, 2), b"\1\2", bytes(2)),
        "codebook 2 of 2",
    ),
    "number of codebooks cut": (header() + segment(5, 1, 1, 0, 1, bytes(3)), "codebooks.*truncated"),
    "2**32 - 1 codebooks": (header() + segment(5, 8, 2, 0, 1, u4((1 << 32) - 1)), "4294967295 codebooks"),
    "codebook numbers cut": (header() + segment(5, 1, 1, 0, 2, u4(1), f2(1, 2), b"\0"), "numbers.*truncated"),
    "a half step that overflows": (header() + segment(3, 1, 2, 0, 1, f4(2.0**127), bytes(1)), "overflows"),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("layout", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_payloads_are_refused(layout: Layout, message: str, version: int) -> None:
    with pytest.raises(PayloadError, match=message):
        parse(layout.encode(version))


SOUND = (header() + RAW_ROW).encode()
# Segments 0 and 1 of four rows each, whose bodies have other sizes.
TWO = header(2) + segment(1, 32, 0, 1, 4, b"\xf0\0", bytes(32)) + segment(2, 4, 1, 0, 4, bytes(16), bytes(4))


def with_u32(data: bytes, at: int, value: int) -> bytes:
    return proved(data[:at] + u4(value) + data[at + 4 :])


MALFORMED_BYTES = {
    "empty": (b"", ": 0 bytes, the header alone"),
    "shorter than a header": (SOUND[:23], "23 bytes, the header alone"),
    "shorter than a head": (SOUND[:31], "31 bytes, the head takes at least 32"),
    "version 0": (b"CNRP\0" + SOUND[5:], "version 0 is unknown"),
    "version 1, its entry cut": (header().encode(1) + bytes(7), "head.*truncated"),
    "a head of 31 bytes": (with_u32(SOUND, 24, 31), "said to take 31 of 58 bytes"),
    "a head beyond the end": (with_u32(SOUND, 24, 59), "said to take 59 of 58 bytes"),
    "a head of 4 GiB": (with_u32(SOUND, 24, (1 << 32) - 1), "said to take 4294967295 of 58 bytes"),
    "a head without its row set": (with_u32(SOUND, 24, 48), "row set has 2 of 0 bytes left"),
    "a head that reaches into the body": (with_u32(SOUND, 24, 54), "4 bytes of the head follow"),
    "a head without its entry": (with_u32(SOUND, 24, 36), "1 segments don't fit"),
    "another checksum": (SOUND[:46] + bytes(4) + SOUND[50:], "head is damaged"),
    "a shorter row set": (with_u32(SOUND, 36, 1), "row set has 1 of 2 bytes left, it takes 2"),
    "a longer row set": (with_u32(SOUND, 36, 1 << 31), "row set has 2147483648 of 2 bytes left"),
    "a row set of no bytes": (with_u32(SOUND, 36, 0), "row set has 0 of 2"),
    "a shorter body": (with_u32(SOUND, 40, 7), "said to take 7 bytes, it takes 8"),
    "a longer body": (with_u32(SOUND, 40, 1 << 31), "said to take 2147483648 bytes, it takes 8"),
    "a body that takes of the next": (
        with_u32(with_u32(TWO.encode(), 40, 33), 56, 19),
        "segment 0: the body is said to take 33 bytes, it takes 32",
    ),
    "cut in its last body": (SOUND[:-1], "codes truncated"),
}


@pytest.mark.parametrize(("data", "message"), MALFORMED_BYTES.values(), ids=MALFORMED_BYTES)
def test_malformed_bytes_are_refused(data: bytes, message: str) -> None:
    parse(SOUND)
    parse(TWO.encode())
    with pytest.raises(PayloadError, match=message):
        parse(data)


NEWER = {
    "version 3": (header() + RAW_ROW, 3, "version 3 is unknown.*upgrade"),
    "unknown": (header() + segment(8, 3, 9, 9, 1, bytes(3), bytes(9)), 2, r"scheme 8 is unknown.*newer"),
    "scheme 9": (header() + segment(9, 0, 0, 0, 1), 2, "scheme 9 is unknown.*newer"),
    "row-set kind 5": (
        header() + segment(1, 32, 0, 5, 1, bytes(3), bytes(8)),
        2,
        "row-set kind 5 is unknown.*newer",
    ),
}


@pytest.mark.parametrize(("layout", "version", "message"), NEWER.values(), ids=NEWER)
def test_what_newer_releases_write_is_refused_by_name(layout: Layout, version: int, message: str) -> None:
    data = layout.encode(version)
    for read in parse, rows_written:
        with pytest.raises(UnsupportedPayloadError, match=message):
            read(data)
    if version == 2:  # a damaged one is damage, whatever it seems to hold
        damaged = data[:30] + bytes([data[30] ^ 1]) + data[31:]
        with pytest.raises(PayloadError, match="head is damaged") as caught:
            parse(damaged)
        assert not isinstance(caught.value, UnsupportedPayloadError)
        with pytest.raises(PayloadError, match="unknown"):
            parse(layout.encode(1))


@pytest.mark.parametrize("data", ["text", 3, np.zeros((4, 4))[:, ::2]])
def test_what_is_not_bytes_is_refused(data: Any) -> None:
    with pytest.raises(PayloadError, match="contiguous bytes"):
        parse(data)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_decoded_size_is_limited(version: int) -> None:
    small = header(0, 1 << 16, 257).encode(version)
    with pytest.raises(PayloadLimitError, match=r"67371008 bytes.*67108864"):
        parse(small)
    assert parse(small, max_decoded_bytes=1 << 27).dim == 257
    assert parse(header(0, 1 << 16, 256).encode(version)).rows == 1 << 16
    with pytest.raises(OverflowError):
        parse(header(65535, (1 << 32) - 1, (1 << 32) - 1).encode(version))


@cache
def mixed_payload(scheme: str, bits: int, dim: int) -> bytes:
    rng = np.random.default_rng(bits)
    values = rng.normal(size=(40, dim)).astype(np.float32)
    values[::7] += 1e6
    values[3] = np.nan
    offsets = np.sort(rng.choice(64, 40, replace=False))
    codec = KMeansRows(bits, scheme) if scheme in ("row", "block") else UniformRows(scheme, bits)
    return codec.encode_rows(values, offsets, 64, element="float32")


@given(
    scheme=st.sampled_from(["symmetric", "asymmetric", "row", "block"]),
    bits=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([3, 8, 20]),
    data=st.data(),
)
@settings(deadline=None, max_examples=2000 if NIGHT else 500)
def test_mutated_payloads_decode_or_are_refused(
    scheme: str, bits: int, dim: int, data: st.DataObject
) -> None:
    sound = mixed_payload(scheme, bits, dim)
    version = data.draw(st.sampled_from(VERSIONS))
    mutated = bytearray(of_version_1(sound) if version == 1 else sound)
    # Most mutations hit the structure, which lies at the front, and most get past the checksum of version 2.
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.one_of(st.integers(4, 60), st.integers(0, len(mutated) - 1)))
        mutated[position] = data.draw(st.one_of(st.sampled_from([0, 1, 2, 255]), st.integers(0, 255)))
    end = data.draw(st.one_of(st.none(), st.integers(0, len(mutated))))
    proves = version == 2 and data.draw(st.sampled_from([True, True, True, False]))
    try:
        payload = parse((proved if proves else bytes)(bytes(mutated[:end])), max_decoded_bytes=1 << 20)
    except PayloadError:
        return
    out = np.zeros((payload.rows, payload.dim), cnr_codecs.array_dtype(payload.element))
    need = np.ones(payload.rows, np.uint8)
    rows = present_rows(payload)
    assert cnr_codecs.decode_into(payload, out, need) == len(rows)
    assert not need[rows].any()
    assert need.sum() == payload.rows - len(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": np.zeros(4, np.float32)}, "shape"),
        ({"values": np.zeros((2, 2))}, "float64"),
        ({"values": np.zeros((11, 2), np.float32)}, "11 rows"),
        ({"values": np.zeros((2, 0), np.float32)}, "columns"),
        ({"rows": 0}, "0 x 2"),
        ({"rows": 1 << 32}, "4294967296"),
        ({"offsets": np.array([1])}, "offsets must be"),
        ({"offsets": np.array([1.0, 2.0])}, "float64"),
        ({"offsets": np.array([2, 1])}, "increase"),
        ({"offsets": np.array([1, 1])}, "increase"),
        ({"offsets": np.array([-1, 1])}, "increase"),
        ({"offsets": np.array([1, 10])}, "increase"),
        ({"element": "float31"}, "float31"),
        ({"element": "bfloat16", "values": np.full((2, 2), 0.1, np.float32)}, "can't represent"),
    ],
)
@pytest.mark.parametrize("codec", [UniformRows(), KMeansRows(), LosslessRows()])
def test_rows_that_do_not_fit_are_refused(codec: RowCodec, arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "values": np.ones((2, 2), np.float32),
        "offsets": None,
        "rows": 10,
        "element": "float32",
    }
    codec.encode_rows(**good)
    with pytest.raises(RowsError, match=message):
        codec.encode_rows(**(good | arguments))


def test_only_floats_of_up_to_32_bits_are_quantized() -> None:
    for element in set(ELEMENTS) - {"float32", "float16", "bfloat16"}:
        with pytest.raises(RowsError, match="cnr_rows"):
            UniformRows().bytes_per_row(4, element)
        with pytest.raises(RowsError, match="cnr_rows"):
            UniformRows().encode_rows(np.ones((1, 4), element), None, 1, element=element)


@pytest.mark.parametrize("data", [np.zeros(4, "M8[s]"), np.zeros(40, ">u2")[::2]])
def test_arrays_that_are_not_bytes_are_refused(data: Rows) -> None:
    with pytest.raises(PayloadError, match="contiguous bytes"):
        parse(data)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "body",
    [segment(2, 4, 1, 0, 1, b"\1\x7c\0\0", bytes(1)), segment(4, 1, 1, 0, 1, b"\1\x7c\1\x7c", bytes(1))],
)
def test_signalling_nans_are_refused_where_numpy_is_told_to_raise(body: Part, version: int) -> None:
    with np.errstate(all="raise"), pytest.raises(PayloadError, match="not finite"):
        parse((header() + body).encode(version))


# The head alone


@pytest.mark.parametrize(("scheme", "bits"), [("asymmetric", 4), ("row", 3), ("block", 1), ("symmetric", 8)])
def test_the_head_tells_the_rows_whatever_becomes_of_the_bodies(scheme: str, bits: int) -> None:
    data = reseal(mixed_payload(scheme, bits, 20), 77)
    end, rows = head_bytes(data), present_rows(parse(data))
    assert len(rows) == 40
    for cut in range(end):
        with pytest.raises(PayloadError):
            rows_written(data[:cut])
    rng = np.random.default_rng(4)
    for kept in (*range(end, len(data), 7), len(data)):
        damaged = data[:end] + rng.bytes(kept - end)
        for payload in damaged, bytearray(damaged), memoryview(damaged), np.frombuffer(damaged, np.uint8):
            found = rows_written(payload, seal=77)
            assert found.dtype == np.int64
            np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize(("scheme", "bits"), [("asymmetric", 4), ("row", 3), ("block", 1), ("symmetric", 8)])
def test_no_flipped_bit_of_the_head_goes_unnoticed(scheme: str, bits: int) -> None:
    data = mixed_payload(scheme, bits, 3)
    for bit in range(8 * head_bytes(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        for read in parse, rows_written, lambda flipped: reseal(flipped, 1):
            with pytest.raises(PayloadError):
                read(bytes(flipped))


def test_flipped_bits_of_the_bodies_leave_the_rows_as_they_are() -> None:
    data = mixed_payload("asymmetric", 4, 3)
    rows = present_rows(parse(data))
    for bit in range(8 * head_bytes(data), 8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        np.testing.assert_array_equal(rows_written(flipped), rows)
        with suppress(PayloadError):  # parameters may be impossible ones
            np.testing.assert_array_equal(present_rows(parse(flipped)), rows)


def test_rows_of_another_place_or_of_version_1_are_not_told() -> None:
    np.testing.assert_array_equal(rows_written(header(0).encode()), [])
    data = (header(2, seal=5) + RAW_ROW + segment(0, 0, 0, 0, 3)).encode()
    np.testing.assert_array_equal(rows_written(data), [0, 1, 2, 4])
    np.testing.assert_array_equal(rows_written(data, seal=5), [0, 1, 2, 4])
    for seal in 0, 4:
        with pytest.raises(PayloadError, match="another place"):
            rows_written(data, seal=seal)
    with pytest.raises(PayloadError, match="version 1 has no checksum"):
        rows_written((header() + RAW_ROW).encode(1))
    with pytest.raises(PayloadError, match="row 4 is in an earlier"):
        rows_written((header(2) + RAW_ROW + RAW_ROW).encode())
    with pytest.raises(PayloadLimitError):
        rows_written((header(1, (1 << 32) - 1, 1) + segment(0, 0, 0, 0, (1 << 32) - 1)).encode())
