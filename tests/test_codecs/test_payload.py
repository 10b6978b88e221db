"""Payloads: their bytes as specified, round trips over row sets, and what their heads tell."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import zstd

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
    RAW_ROW,
    f2,
    f4,
    head_bytes,
    header,
    proved,
    segment,
    u2,
    u4,
)

ELEMENTS = {"float32": 1, "float16": 2, "bfloat16": 3, "float64": 4, "int8": 5, "int16": 6, "int32": 7}
ELEMENTS |= {"int64": 8, "uint8": 9, "uint16": 10, "uint32": 11, "uint64": 12, "bool": 13}


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
    if RowSetKind.PREFIX not in sizes:
        gaps = np.diff(offsets, prepend=-1) - 1
        packed = b"".join(b"\xff" * (gap // 255) + bytes([gap % 255]) for gap in gaps.tolist())
        sizes[RowSetKind.GAPS] = len(zstd.compress(packed, 1))
    assert payload.segments[0].row_set.kind == min(sizes, key=lambda kind: (sizes[kind], kind))
    assert len(encoded) == 24 + 4 + 16 + 4 + min(sizes.values()) + values.nbytes


def test_a_payload_may_hold_no_rows() -> None:
    for codec in UniformRows(), LosslessRows():
        data = codec.encode_rows(np.empty((0, 3), np.float32), None, 5, element="float32")
        assert data == header(0, 5, 3).encode()
        assert len(present_rows(parse(data))) == 0
        assert decode(data)[1] == 0


@pytest.mark.slow
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
    out, written, _ = decode(wrap((header() + RAW_ROW).encode()))
    assert written == 1
    assert out[4].tolist() == [1.5, -2]


@cache
def mixed_payload(scheme: Any, bits: int, dim: int) -> bytes:
    rng = np.random.default_rng(bits)
    values = rng.normal(size=(40, dim)).astype(np.float32)
    values[::7] += 1e6
    values[3] = np.nan
    offsets = np.sort(rng.choice(64, 40, replace=False))
    codec = KMeansRows(bits, scheme) if scheme in ("row", "block") else UniformRows(scheme, bits)
    return codec.encode_rows(values, offsets, 64, element="float32")


@pytest.mark.slow
@given(
    scheme=st.sampled_from(["symmetric", "asymmetric", "row", "block"]),
    bits=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([3, 8, 20]),
    data=st.data(),
)
@settings(deadline=None, max_examples=2000 if NIGHT else 500)
def test_mutated_payloads_decode_or_are_refused(
    scheme: Any, bits: int, dim: int, data: st.DataObject
) -> None:
    sound = mixed_payload(scheme, bits, dim)
    mutated = bytearray(sound)
    # Most mutations hit the structure, which lies at the front, and most get past the checksum.
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.one_of(st.integers(4, 60), st.integers(0, len(mutated) - 1)))
        mutated[position] = data.draw(st.one_of(st.sampled_from([0, 1, 2, 255]), st.integers(0, 255)))
    end = data.draw(st.one_of(st.none(), st.integers(0, len(mutated))))
    proves = data.draw(st.sampled_from([True, True, True, False]))
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


# The head alone


@pytest.mark.parametrize(("scheme", "bits"), [("asymmetric", 4), ("row", 3), ("block", 1), ("symmetric", 8)])
def test_the_head_tells_the_rows_whatever_becomes_of_the_bodies(scheme: Any, bits: int) -> None:
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
def test_no_flipped_bit_of_the_head_goes_unnoticed(scheme: Any, bits: int) -> None:
    data = mixed_payload(scheme, bits, 3)
    for bit in range(8 * head_bytes(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        for read in parse, rows_written, lambda flipped: reseal(flipped, 1):
            with pytest.raises(PayloadError):
                read(bytes(flipped))


@pytest.mark.slow
def test_flipped_bits_of_the_bodies_leave_the_rows_as_they_are() -> None:
    data = mixed_payload("asymmetric", 4, 3)
    rows = present_rows(parse(data))
    for bit in range(8 * head_bytes(data), 8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        np.testing.assert_array_equal(rows_written(flipped), rows)
        with suppress(PayloadError):  # parameters may be impossible ones
            np.testing.assert_array_equal(present_rows(parse(flipped)), rows)


def test_rows_of_another_place_are_not_told() -> None:
    np.testing.assert_array_equal(rows_written(header(0).encode()), [])
    data = (header(2, seal=5) + RAW_ROW + segment(0, 0, 0, 0, 3)).encode()
    np.testing.assert_array_equal(rows_written(data), [0, 1, 2, 4])
    np.testing.assert_array_equal(rows_written(data, seal=5), [0, 1, 2, 4])
    for seal in 0, 4:
        with pytest.raises(PayloadError, match="another place"):
            rows_written(data, seal=seal)
    with pytest.raises(PayloadError, match="row 4 is in an earlier"):
        rows_written((header(2) + RAW_ROW + RAW_ROW).encode())
    with pytest.raises(PayloadLimitError):
        rows_written((header(1, (1 << 32) - 1, 1) + segment(0, 0, 0, 0, (1 << 32) - 1)).encode())
