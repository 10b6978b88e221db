"""Floating grids of 23 bits: every value bit for bit, absolute and relative, and what no such code may be."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import (
    FloatingRows,
    LosslessRows,
    PayloadError,
    Pending,
    RowsError,
    Scheme,
    UnsupportedPayloadError,
    build_payload,
    decode_into,
    merge_segments,
    parse,
    split_segments,
    take_rows,
)
from cnr_codecs.comparing import OTHER, SAME, UNKNOWN, code_dtype, compare_rows, read_codes, unknown_code
from cnr_codecs.elements import element_named
from cnr_codecs.payload.coded import Grid
from cnr_codecs.protocol import Rows
from tests.nightly import histories
from tests.test_codecs.hard_rows import adversarial_rows, decode, encode, rows_of
from tests.test_codecs.lattice.test_lattice import as_element, body_of, lattice_of
from tests.test_codecs.lattice.test_relative import compose
from tests.test_codecs.payload_bytes import header, segment
from tests.test_codecs.references import coded as reference
from tests.test_codecs.references import packed
from tests.test_codecs.references.floating import codes_of, floating_values

EXACT = FloatingRows(23)
ELEMENTS = st.sampled_from(["float32", "float16", "bfloat16"])
EDGES = (
    0,
    1,
    -1,
    1 << 31,
    0x7F800000,
    0xFF800000,
    0x7F800001,
    0xFFFFFFFF,
    0x7FC00000,
    0x007FFFFF,
    0x80000001,
)
"""Bits of float32: zeros, subnormals, infinities and NaN of both kinds, of both signs."""


def bits_of(rng: np.random.Generator, count: int, dim: int, element: str = "float32") -> Rows:
    """Values of any bits, some of them edges."""
    bits = rng.integers(0, 1 << 32, (count, dim), np.uint32)
    edges = np.array([each & 0xFFFFFFFF for each in EDGES], np.uint32)
    bits = np.where(rng.random(bits.shape) < 0.3, rng.choice(edges, bits.shape), bits)
    if element == "float16":
        return (bits >> 16).astype(np.uint16).view(np.float16)
    return (bits & (0xFFFF0000 if element == "bfloat16" else 0xFFFFFFFF)).astype(np.uint32).view(np.float32)


@given(values=adversarial_rows(min_rows=1), element=ELEMENTS)
@settings(deadline=None, max_examples=histories(60))
def test_rows_have_the_bytes_of_the_reference(values: Rows, element: str) -> None:
    values = as_element(values, element)
    payload = encode(EXACT, values, element)
    assert decode(payload)[: len(values)].tobytes() == values.tobytes()
    kept = lattice_of(payload)
    if kept is None:  # NaN of halves, whose bits conversions may change, is raw
        assert element != "float32"
        assert np.isnan(values).any(axis=1).all()
        return
    codes = codes_of(values[rows_of(kept)], 23, element)[0]
    dim = values.shape[1]
    assert body_of(kept) == reference.on_step(codes.reshape(-1).tolist(), dim, 0, mantissa=23)
    assert floating_values(codes, 23, element).tobytes() == values[rows_of(kept)].tobytes()


@given(seed=st.integers(0, 1 << 32), element=ELEMENTS, dim=st.sampled_from([1, 2, 3, 4, 5, 17, 64]))
@settings(deadline=None, max_examples=histories(60))
def test_bits_of_every_kind_come_back(seed: int, element: str, dim: int) -> None:
    """Absolute, in windows, relative in both kinds of sums, and folded."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 200))
    older = np.sort(rng.choice(2 * rows, rows, replace=False))
    values, newer = (bits_of(rng, rows, dim, element) for _ in range(2))
    base, codes, coded, _ = EXACT.encode_over(
        values, older, 2 * rows, np.zeros((rows, dim), np.int32), np.zeros(rows, bool), element=element
    )
    assert (coded == ((element == "float32") | ~np.isnan(values).any(axis=1))).all()
    delta, again, *_ = EXACT.encode_over(newer, older, 2 * rows, codes, coded, element=element)
    assert again.dtype == np.int32
    window, need = np.zeros((rows, dim), values.dtype), np.ones(rows, np.uint8)
    first = int(rng.integers(-5, rows))
    decode_into(parse(base), window, need, first)
    found = (older >= first) & (older < first + rows)
    assert window[older[found] - first].tobytes() == values[found].tobytes()
    taken, wanted, pending = [], np.ones(2 * rows, np.uint8), Pending(2 * rows, dim)
    for payload in (delta, base):
        taken += take_rows(parse(payload), wanted, 0, pending)
    pending.prove()
    folded = build_payload(2 * rows, dim, element_named(element), merge_segments(taken))
    assert decode(parse(folded))[older].tobytes() == newer.tobytes()
    for in_values in {False, element != "float16"}:
        marks = np.isin(np.arange(2 * rows), older).view(np.uint8)
        composed = compose([base, delta], np.arange(2 * rows), dim, element, marks, in_values=in_values)
        assert composed[older].tobytes() == newer.tobytes()


@settings(deadline=None, max_examples=histories(40))
@given(seed=st.integers(0, 2**32), dim=st.integers(1, 40))
def test_codes_are_read_and_compared_bit_for_bit(seed: int, dim: int) -> None:
    """All but rows that begin with the least code, which stands for those that are not known."""
    rng, grid = np.random.default_rng(seed), Grid(mantissa=23)
    values, known = bits_of(rng, 60, dim), np.empty((60, dim), code_dtype(grid))
    expected, _ = codes_of(values, 23, "float32")
    lacking = read_codes(values, grid, "float32", known)
    np.testing.assert_array_equal(lacking, expected[:, 0] == unknown_code(np.int32))
    np.testing.assert_array_equal(known, expected)
    changed = values.copy()
    places = np.arange(60), rng.integers(dim, size=60)
    changed.view(np.uint32)[places] ^= np.uint32(1) << rng.integers(32, size=60, dtype=np.uint32)
    for rows, answer in ((values, SAME), (changed, OTHER)):
        found = compare_rows(rows, known, grid, "float32")
        np.testing.assert_array_equal(found, np.where(lacking, UNKNOWN, answer))


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_every_value_of_16_bits(element: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).reshape(-1, 16)
    values = (
        bits.astype(np.uint16).view(np.float16) if element == "float16" else (bits << 16).view(np.float32)
    )
    payload = encode(EXACT, values, element)
    assert decode(payload).tobytes() == values.tobytes()
    counts = {each.scheme: each.row_set.count for each in payload.segments}
    assert counts[Scheme.RAW] == np.isnan(values).any(axis=1).sum()


def test_moved_rows_keep_their_bits() -> None:
    rng = np.random.default_rng(1)
    values = bits_of(rng, 90, 5)
    halves = [
        EXACT.encode_rows(values[part::2], np.arange(part, 90, 2), 90, element="float32") for part in (0, 1)
    ]
    taken = [each for data in halves for each in take_rows(parse(data), np.ones(90, np.uint8))]
    (merged,) = merge_segments(taken)
    cut = zip((40, 40, 10), split_segments([merged], 40), strict=True)
    parts = [build_payload(count, 5, element_named("float32"), segments) for count, segments in cut]
    assert b"".join(decode(parse(part)).tobytes() for part in parts) == values.tobytes()


def test_fewer_bytes_than_rows_and_fewer_for_what_moved_little() -> None:
    rng = np.random.default_rng(2)
    sums = np.square(rng.normal(0, 0.1, (20_000, 32))).astype(np.float32)
    newer = (sums * rng.uniform(1, 1.01, sums.shape)).astype(np.float32)
    base, codes, *_ = EXACT.encode_over(
        sums, None, len(sums), np.zeros(sums.shape, np.int32), np.zeros(len(sums), bool), element="float32"
    )
    delta, *_ = EXACT.encode_over(newer, None, len(sums), codes, np.ones(len(sums), bool), element="float32")
    assert sums.nbytes > 1.15 * len(base)
    assert EXACT.bytes_per_row(32, "float32") == pytest.approx(len(base) / len(sums), rel=0.05)
    assert sums.nbytes > 1.6 * len(delta)


def test_bytes_of_a_relative_payload() -> None:
    """Differences are those of the bits, modulo 2**32."""
    values = np.array([[1.5, -0.0, -np.inf]], np.float32)
    parent = np.array([[-(1 << 31), 3, 0x7F800000]], np.int32)
    data, codes, *_ = EXACT.encode_over(values, np.array([2]), 8, parent, np.ones(1, bool), element="float32")
    assert codes.tolist() == [[0x3FC00000, -1, -1 - 0x7F800000]]
    differences = [0x3FC00000 - (1 << 31), -4, (1 << 32) - 1 - 2 * 0x7F800000]
    body = reference.on_step(codes.reshape(-1).tolist(), 3, 0, differences, 23)
    assert data == (header(1, 8, 3) + segment(7, 23, 2, 1, 1, bytes([4]), body)).encode()


@pytest.mark.parametrize(("number", "more"), [(0, 1), (0, 1 << 20), (1, -1), (3, 1), (3, -1)])
def test_frames_that_do_not_fill_their_block_are_damage(number: int, more: int) -> None:
    codes = [1 << 30, -5, 77, 1 << 22, 0]
    lines = bytearray(packed.encode(codes, 5))
    (classes,) = struct.unpack_from("<I", lines)
    place = 8 + classes
    for _ in range(number):
        place += 4 + struct.unpack_from("<I", lines, place)[0]
    struct.pack_into("<I", lines, place, struct.unpack_from("<I", lines, place)[0] + more)
    body = reference.grid(codes, 5, 0, 23) + bytes(lines)
    data = (header(1, 1, 5) + segment(6, 23, 2, 0, 1, body)).encode()
    with pytest.raises(PayloadError, match=r"block 0 of 1: (a zstd frame|its frames are said)"):
        decode(parse(data))


def of_code(code: int, element: int, bits: int = 23, flags: int = 0) -> bytes:
    body = reference.grid([code] * 5, 5, 0, bits, flags=flags) + packed.encode([code] * 5, 5)
    return (header(1, 1, 5, element=element) + segment(6, bits, 2, 0, 1, body)).encode()


@pytest.mark.parametrize(
    ("element", "name", "value"),
    [
        (2, "float16", np.nan),
        (3, "bfloat16", np.nan),
        (2, "float16", 1 + 2.0**-11),
        (2, "float16", 65520.0),
        (2, "float16", 2.0**-25),
        (3, "bfloat16", 1 + 2.0**-8),
    ],
)
def test_codes_of_no_value_of_the_type_are_refused(element: int, name: str, value: float) -> None:
    (code,) = struct.unpack("<i", struct.pack("<f", value))
    out, need = np.empty((1, 5), cnr_codecs.array_dtype(name)), np.ones(1, np.uint8)
    with pytest.raises(PayloadError, match=f"a code is that of no {name} value"):
        decode_into(parse(of_code(code, element)), out, need)
    assert need.all()
    decode_into(parse(of_code(struct.unpack("<i", struct.pack("<f", 1.5))[0], element)), out, need)
    assert (out == 1.5).all()


def test_float64_is_refused_by_name_of_what_keeps_it() -> None:
    for call in (
        lambda: encode(EXACT, np.ones((2, 2)), "float64"),
        lambda: EXACT.bytes_per_row(2, "float64"),
    ):
        with pytest.raises(RowsError, match="23 bits of mantissa are not all of float64; cnr_rows stores"):
            call()
    with pytest.raises(PayloadError, match="float64 values can't be stored with scheme LATTICE"):
        parse(of_code(1, 4))
    with pytest.raises(RowsError, match="int32 rows can't be quantized"):
        encode(EXACT, np.ones((2, 2), np.int32), "int32")


@pytest.mark.parametrize("bits", [*range(8, 23), 24, 255])
def test_other_grids_are_malformed(bits: int) -> None:
    with pytest.raises(PayloadError, match=f"{bits} bits don't fit scheme LATTICE"):
        parse(of_code(1, 1, bits))


def test_signs_have_no_flag() -> None:
    with pytest.raises(UnsupportedPayloadError, match="flags 2, 0 of a grid are unknown"):
        parse(of_code(-1, 1, flags=2))


@pytest.mark.parametrize("older", [LosslessRows(), FloatingRows(7)])
def test_relative_rows_over_others_are_refused(older: Any) -> None:
    values, known = np.ones((3, 2), np.float32), np.ones(3, bool)
    delta, *_ = EXACT.encode_over(values, None, 3, np.zeros((3, 2), np.int32), known, element="float32")
    need, out, pending = np.ones(3, np.uint8), np.empty((3, 2), np.float32), Pending(3, 2)
    decode_into(parse(delta), out, need, 0, pending)
    with pytest.raises(
        PayloadError, match=r"is not on a lattice|another grid than the floating grid of 7 bits"
    ):
        decode_into(parse(older.encode_rows(values, None, 3, element="float32")), out, need, 0, pending)


def test_relative_rows_over_other_bits_are_found_by_the_check() -> None:
    values, known = np.ones((3, 2), np.float32), np.ones(3, bool)
    parent = np.full((3, 2), 127 << 23, np.int32)
    delta, *_ = EXACT.encode_over(values, None, 3, parent, known, element="float32")
    other = values.copy()
    other[1, 1] = np.nextafter(np.float32(1), np.float32(2))
    base = EXACT.encode_rows(other, None, 3, element="float32")
    for in_values in (False, True):
        with pytest.raises(PayloadError, match="crc32c differs"):
            compose([base, delta], np.arange(3), 2, "float32", in_values=in_values)


@given(seed=st.integers(0, 1 << 32), mantissa=st.integers(1, 7))
@settings(deadline=None, max_examples=histories(60))
def test_float64_beyond_float32_is_kept_and_what_is_within_is_near(seed: int, mantissa: int) -> None:
    """Rows that a grid of float32's exponents has no codes for are stored as they are."""
    rng = np.random.default_rng(seed)
    exponents = rng.choice([-1074, -200, -150, -127, -126, -125, 0, 126, 127, 128, 200, 1023], (40, 1))
    values = np.ldexp(rng.uniform(0.9, 1.999, (40, 3)) * rng.choice([-1, 1], (40, 3)), exponents)
    values[rng.random(40) < 0.2, 0] = rng.choice([np.nan, np.inf, 1e300, 5e-324, 1e-42, 0.0])
    out = decode(encode(FloatingRows(mantissa), values, "float64"))
    is_same = (out.view(np.uint64) == values.view(np.uint64)).all(axis=1)
    sizes = np.abs(np.where(values == 0, 1, values))
    is_normal = ((sizes >= 2.0**-126) & (sizes < 2.0**126)).all(axis=1)
    is_beyond = ((sizes < 2.0**-127) | (sizes >= 2.0**127) | np.isnan(values)).any(axis=1)
    assert is_same[is_beyond].all()
    with np.errstate(invalid="ignore"):
        near = (np.abs(out - values) <= np.abs(values) * 2.0 ** -(mantissa + 1)).all(axis=1)
    assert (is_same | near).all()
    assert near[is_normal].all()
