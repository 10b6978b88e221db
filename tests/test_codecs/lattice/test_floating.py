"""Floating grids: kernels against numpy, errors within their share, what is raw, and damaged payloads."""

import struct

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import (
    FloatingRows,
    PayloadError,
    RowsError,
    UnsupportedPayloadError,
    build_payload,
    merge_segments,
    parse,
    split_segments,
    take_rows,
)
from cnr_codecs.elements import element_named
from cnr_codecs.lattice.floating import floating_codes
from cnr_codecs.payload.coded import Grid, code_range
from cnr_codecs.protocol import Rows
from tests.nightly import histories
from tests.test_codecs.hard_rows import adversarial_rows, decode, encode, rows_of
from tests.test_codecs.lattice.test_lattice import as_element, body_of, lattice_of
from tests.test_codecs.payload_bytes import header, layout_of, segment
from tests.test_codecs.references import coded as reference
from tests.test_codecs.references.floating import codes_of, floating_values

FLOATS = st.sampled_from(["float32", "float16", "bfloat16", "float64"])
MANTISSAS = st.integers(1, 7)
LEAST_NORMAL = 2.0**-126


def squares(rows: int, dim: int, seed: int = 0, zeros: float = 0.2) -> Rows:
    """Sums of squares: of magnitudes that differ by rows, some of them 0."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (rows, dim)) ** 2 * np.exp(rng.normal(-8, 3, (rows, 1)))
    values[rng.random(rows) < zeros] = 0
    return values.astype(np.float32)


@pytest.mark.slow
@given(values=adversarial_rows(min_rows=0), mantissa=MANTISSAS, element=FLOATS)
@settings(deadline=None, max_examples=histories(300))
def test_rows_equal_the_reference_and_are_within_their_share(
    values: Rows, mantissa: int, element: str
) -> None:
    values = as_element(values, element)
    codes, raw = codes_of(values, mantissa, element)
    payload = encode(FloatingRows(mantissa), values, element)
    out, kept = decode(payload), lattice_of(payload)
    held = np.flatnonzero(~raw)
    assert out[: len(values)][raw].tobytes() == values[raw].tobytes()
    if kept is None:
        assert len(held) == 0
        return
    np.testing.assert_array_equal(rows_of(kept), held)
    assert kept.bits == mantissa
    assert body_of(kept) == reference.on_floats(codes[held].reshape(-1).tolist(), values.shape[1], mantissa)
    assert out[held].tobytes() == floating_values(codes[held], mantissa, element).tobytes()
    exact, found = values[held].astype(np.float64), out[held].astype(np.float64)
    small = (np.abs(exact) < LEAST_NORMAL) & (exact != 0)
    assert (np.abs(found - exact) <= 2.0 ** -(mantissa + 1) * np.abs(exact))[~small].all()
    # Numbers smaller than any normal float32 become the least of these, but in rows with signs 0 or that.
    assert np.isin(np.abs(found[small]), (0, LEAST_NORMAL)).all()
    unsigned = ~(exact < 0).any(axis=1)
    np.testing.assert_array_equal(found[unsigned] == 0, exact[unsigned] == 0)
    again, none = floating_codes(out[held], Grid(mantissa=mantissa), element)
    assert not none.any()
    np.testing.assert_array_equal(again, codes[held])


@pytest.mark.parametrize("element", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("mantissa", range(1, 8))
def test_numbers_about_the_least_normal_one(mantissa: int, element: str) -> None:
    """Smaller ones become it, but of float64, whose rows with any that do not round to it are raw."""
    numbers = np.arange(0x00400000, 0x00900000, 1 << 16 if element == "bfloat16" else 127, dtype=np.uint32)
    numbers = np.append(numbers, 0x00800000 - (0x00800000 >> mantissa + 1)).astype(np.uint32)
    if element == "bfloat16":
        numbers &= np.uint32(0xFFFF0000)
    values = numbers.view(np.float32).astype(cnr_codecs.array_dtype(element))[:, None]
    (found, raw), (codes, none) = (
        floating_codes(values, Grid(mantissa=mantissa), element),
        codes_of(values, mantissa, element),
    )
    np.testing.assert_array_equal(raw, none)
    np.testing.assert_array_equal(found, codes[~none])
    exact = values[~raw, 0].astype(np.float64)
    shares = np.abs(floating_values(found, mantissa, element)[:, 0].astype(np.float64) - exact) / exact
    is_normal, own = exact >= LEAST_NORMAL, 2.0 ** -(mantissa + 1)
    assert shares[is_normal].max() <= own
    if element == "float64":
        assert shares[~is_normal].max() <= own
    else:
        assert not raw.any()
        assert (found[~is_normal] == code_range(mantissa, element)[0]).all()


@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("mantissa", range(1, 8))
def test_every_code_is_that_of_its_value(mantissa: int, element: str) -> None:
    least, most = code_range(mantissa, element)
    if element == "float16":
        least = 113 << mantissa  # below, its numbers are subnormal and have fewer bits
    codes = np.concatenate([[0], np.arange(least, most + 1), -np.arange(least, most + 1)])
    values = floating_values(codes, mantissa, element)
    assert np.isfinite(values).all()
    found, raw = floating_codes(values[:, None], Grid(mantissa=mantissa), element)
    assert not raw.any()
    np.testing.assert_array_equal(found[:, 0], codes)
    positive = values[: most - least + 2].astype(np.float64)
    assert (np.diff(positive) > 0).all()


def test_ties_go_to_even_and_float64_is_rounded_once() -> None:
    values = np.array([[1 + 1 / 16, 1 + 3 / 16, 2 - 1 / 16]])
    assert floating_values(floating_codes(values, Grid(mantissa=3), "float64")[0], 3, "float64").tolist() == [
        [1, 1.25, 2]
    ]
    # As a float32 it would be 1 + 1/16, and then 1.
    values = np.array([[1 + 1 / 16 + 2.0**-40]])
    assert floating_values(floating_codes(values, Grid(mantissa=3), "float64")[0], 3, "float64").tolist() == [
        [1.125]
    ]


@pytest.mark.parametrize(
    ("element", "value"),
    [
        *((element, value) for element in ("float32", "bfloat16", "float64") for value in (-3e38, 2.0**127)),
        *((element, value) for element in ("float32", "float16", "float64") for value in (np.nan, -np.inf)),
        ("float64", 1e-40),
        ("float64", 5e-324),
        ("float64", 1e300),
        ("float64", -1e-300),
        ("float16", 65504.0),
    ],
)
def test_rows_without_codes_are_raw(element: str, value: float) -> None:
    values = np.full((40, 3), 1, cnr_codecs.array_dtype(element))
    values[7, 1] = as_element(np.array([value], np.float64 if element == "float64" else np.float32), element)[
        0
    ]
    payload = encode(FloatingRows(), values, element)
    out, kept = decode(payload), lattice_of(payload)
    assert out.tobytes() == values.tobytes()
    assert kept is not None
    assert 7 not in rows_of(kept)


def test_subnormal_float16_and_negative_zero() -> None:
    values = np.array([[2.0**-24, -(2.0**-15), 1023 * 2.0**-24, -0.0]], np.float16)
    payload = encode(FloatingRows(7), values, "float16")
    assert lattice_of(payload) is not None
    out = decode(payload)[0]
    assert out[:2].tolist() == values[0, :2].tolist()
    assert abs(out[2] / values[0, 2] - 1) <= 2.0**-8
    assert (out[3], np.signbit(out[3])) == (0, False)


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 6, 7, 17, 64, 1024])
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 33, 3000])
def test_dims_and_rows(dim: int, rows: int) -> None:
    values = squares(1000 if rows * dim > 1 << 20 else rows, dim)
    payload = encode(FloatingRows(3), values)
    assert (lattice_of(payload) is None) == (rows == 0)
    found = decode(payload)[: len(values)]
    assert (np.abs(found.astype(np.float64) - values) <= values / 16).all()
    np.testing.assert_array_equal(found == 0, values == 0)


@pytest.mark.parametrize("dim", [1, 16])
@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16", "float64"])
def test_wanted_rows_of_several_blocks(dim: int, element: str) -> None:
    rows = (1 << 18) // dim + 100  # of more codes than a block has
    held = np.sort(np.random.default_rng(7).choice(2 * rows, rows, replace=False))
    values = as_element(squares(rows, dim) + np.float32(1e-4), element)
    data = FloatingRows(2).encode_rows(values, held, 2 * rows, element=element)
    codes, raw = codes_of(values, 2, element)
    assert not raw.any()
    expected = np.full((2 * rows, dim), 7, values.dtype)
    expected[held] = floating_values(codes, 2, element)
    for first, count in (0, 2 * rows), (5000, 300), (-50, 100), (2 * rows - 10, 40):
        window = np.arange(first, first + count)
        wanted = np.isin(window, held)
        out, need = np.full((count, dim), 7, values.dtype), np.ones(count, np.uint8)
        assert cnr_codecs.decode_into(parse(data), out, need, first) == wanted.sum()
        np.testing.assert_array_equal(need == 0, wanted)
        np.testing.assert_array_equal(out[wanted], expected[window[wanted]])


def test_bytes_of_a_payload() -> None:
    values = np.array([[1, 0, 1.25, 0.5, 2], [0, 0, 0, 0, 0]], np.float32)
    data = FloatingRows(2).encode_rows(values, np.array([2, 5]), 8, element="float32")
    codes, rests = [508, 0, 509, 504, 512, 0, 0, 0, 0, 0], [1, 0, 2, -4, 5, 0, 0, 0, 0, 0]
    grid = reference.grid(codes, 5, 0, 2, by=rests)
    assert grid[:12] == struct.pack("<ffhBB", 0, 1, 0, 0, 0)
    # The line of zeros is stored first.
    proven = (
        struct.pack("<ffhB", 0, 1, 0, 2)
        + bytes([16 * 2 + 5, 0])
        + struct.pack("<10h", *codes[5:], *codes[:5])
    )
    assert grid[12:] == struct.pack("<I", google_crc32c.value(proven))
    body = grid + reference.centered([508, 0], rests, 5)
    assert data == (header(1, 8, 5) + segment(6, 2, 2, 1, 2, bytes([0b100100]), body)).encode()
    np.testing.assert_array_equal(decode(parse(data))[[2, 5]], values)


def test_bytes_of_a_payload_with_signs() -> None:
    values = np.array([[1, -1, 2, 4, -8]], np.float32)
    data = FloatingRows(1).encode_rows(values, None, 1, element="float32")
    rests = [-5, -4, -1, 4, 9]
    grid = reference.grid([254, -254, 256, 258, -260], 5, 0, 1, flags=2, by=rests)
    body = grid + reference.centered([513], rests, 5)
    assert data == (header(1, 1, 5) + segment(6, 1, 2, 0, 1, body)).encode()
    np.testing.assert_array_equal(decode(parse(data)), values)


def test_fewer_bytes_than_codes_of_8_bits_with_rows_of_zeros_for_nothing() -> None:
    values = squares(20_000, 32, zeros=0.7)
    data = FloatingRows(3).encode_rows(values, None, len(values), element="float32")
    touched = values[values.any(axis=1)]
    alone = FloatingRows(3).encode_rows(touched, None, len(touched), element="float32")
    assert len(alone) * 8 < 8 * touched.size
    assert len(data) < 1.1 * len(alone)
    assert FloatingRows(3).bytes_per_row(32, "float32") == pytest.approx(len(alone) / len(touched), rel=0.2)


def test_integers_have_no_floating_grid() -> None:
    with pytest.raises(RowsError, match="can't be quantized"):
        FloatingRows().encode_rows(np.zeros((2, 2), np.int32), None, 2, element="int32")


@given(data=st.data(), element=FLOATS)
@settings(deadline=None, max_examples=histories(60))
def test_moved_rows_keep_their_codes(data: st.DataObject, element: str) -> None:
    """Rows of several payloads are taken, merged, cut into chunks, and built again."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    rows, dim = data.draw(st.integers(1, 300)), data.draw(st.sampled_from([1, 2, 5, 16]))
    need, taken = np.ones(rows, np.uint8), []
    expected = np.full((rows, dim), 7, cnr_codecs.array_dtype(element))
    for _ in range(data.draw(st.integers(1, 3))):
        held = np.flatnonzero(rng.random(rows) < 0.6)
        values = as_element(squares(len(held), dim, data.draw(st.integers(0, 9))), element)
        values[rng.random(len(held)) < 0.1] = np.nan
        values *= rng.choice([-1, 1]).astype(values.dtype)
        payload = parse(
            FloatingRows(data.draw(st.sampled_from([2, 3]))).encode_rows(values, held, rows, element=element)
        )
        before = np.flatnonzero(need)
        out = np.full_like(expected, 7)
        cnr_codecs.decode_into(payload, out, need.copy())
        expected[before] = np.where(np.isin(before, held)[:, None], out[before], expected[before])
        taken += take_rows(payload, need)
    merged = merge_segments(taken)
    assert len(merged) <= 3
    chunk = data.draw(st.integers(1, rows + 5))
    found = np.full_like(expected, 7)
    for number, segments in enumerate(split_segments(merged, chunk) if merged else ()):
        part = found[number * chunk : (number + 1) * chunk]
        whole = parse(build_payload(len(part), dim, element_named(element), segments))
        cnr_codecs.decode_into(whole, part, np.ones(len(part), np.uint8))
    assert found[need == 0].tobytes() == expected[need == 0].tobytes()
    assert (found[need != 0] == 7).all()


GOOD = FloatingRows(3).encode_rows(squares(50, 5), None, 50, element="float32")


def spoiled(at: int, new: bytes) -> bytes:
    """The payload with other bytes in the body of its segment."""
    layout = layout_of(GOOD)
    (part,) = layout.parts
    body = part.body[:at] + new + part.body[at + len(new) :]
    return (header(1, 50, 5) + segment(*part.numbers, body)).encode()


def of_rests(rests: list[int], codes: list[int], center: int = 1016, flags: int = 0) -> bytes:
    """A payload of one row of 5 values on a grid of 3 bits."""
    body = reference.grid(codes, 5, 0, 3, flags=flags, by=rests) + reference.centered([center], rests, 5)
    return (header(1, 1, 5) + segment(6, 3, 2, 0, 1, body)).encode()


@pytest.mark.parametrize(
    ("at", "new"),
    [(10, b"\1"), (10, b"\3"), (10, b"\4"), (11, b"\1"), (9, b"\x80"), (4, struct.pack("<f", 2.5))],
)
def test_what_is_reserved_is_refused_by_name(at: int, new: bytes) -> None:
    with pytest.raises(UnsupportedPayloadError, match=r"flags .* of a grid are unknown: a newer release"):
        parse(spoiled(at, new))


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, struct.pack("<f", 0.5), "the step 0.5 is not 0 on a floating grid"),
        (0, struct.pack("<f", np.nan), "the step nan is not 0 on a floating grid"),
        (16, b"\xff\xff", "the centers of its lines are cut off"),
        (16, b"\0", "sizes of 1 frames are cut off|the classes of 50 lines"),
        (20, b"\xff", "bytes are not the centers of"),
    ],
)
def test_malformed_centers_are_refused(at: int, new: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=f"segment 0: .*({message})"):
        parse(spoiled(at, new))


def test_a_grid_of_more_than_7_bits_or_of_integers_is_malformed() -> None:
    parts = (2, 0, 1, bytes(16), b"\0\0")
    with pytest.raises(PayloadError, match="8 bits don't fit scheme LATTICE"):
        parse((header(1, 1, 5) + segment(6, 8, *parts)).encode())
    with pytest.raises(PayloadError, match="int32 values can't be stored with scheme LATTICE"):
        parse((header(1, 1, 5, element=7) + segment(6, 3, *parts)).encode())
    with pytest.raises(PayloadError, match="float64 values can't be stored with scheme LATTICE"):
        parse((header(1, 1, 5, element=4) + segment(6, 0, *parts)).encode())


@pytest.mark.parametrize(
    ("center", "rests", "codes"),
    [
        (0, [1016, 0, 0, 0, 0], [1015, 0, 0, 0, 0]),  # a value without a center
        (1016, [-1009, 0, 0, 0, 0], [7, 0, 0, 0, 0]),  # subnormal
        (1016, [1017, 0, 0, 0, 0], [2032, 0, 0, 0, 0]),  # 2**127
        (1016, [-1016, 0, 0, 0, 0], [0, 0, 0, 0, 0]),  # 0 is a difference of its own
        (1016, [-1200, 0, 0, 0, 0], [-184, 0, 0, 0, 0]),
        (1016, [65535, 0, 0, 0, 0], [66550, 0, 0, 0, 0]),
        (65535, [-64000, 65535, 0, 0, 0], [1535, 131069, 0, 0, 0]),
    ],
)
def test_differences_of_no_codes_are_damage(center: int, rests: list[int], codes: list[int]) -> None:
    decode(parse(of_rests([1, 2, -1, 0, 0], [1016, 1017, 1015, 0, 0])))
    decode(parse(of_rests([1016, -1008, 0, 0, 0], [2031, 8, 0, 0, 0])))
    check_refused(of_rests(rests, codes, center), "a code is none of the floating grid of 3 bits")


def test_a_difference_that_no_line_has_is_damage() -> None:
    check_refused(of_rests([65536, 0, 0, 0, 0], [0, 0, 0, 0, 0], 1016), "a code is beyond 65535")


def check_refused(data: bytes, message: str) -> None:
    payload, need = parse(data), np.ones(1, np.uint8)
    with pytest.raises(PayloadError, match=message):
        cnr_codecs.decode_into(payload, np.empty((1, 5), np.float32), need)
    assert need.all()
    with pytest.raises(PayloadError, match=message):
        take_rows(payload, np.ones(1, np.uint8))


def test_codes_that_are_not_those_of_the_check_are_damage() -> None:
    for payload in (parse(spoiled(12, b"\1\2\3\4")), parse(spoiled(10, b"\2"))):
        with pytest.raises(PayloadError, match=r"crc32c differs|a code is none"):
            cnr_codecs.decode_into(payload, np.empty((50, 5), np.float32), np.ones(50, np.uint8))


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_numbers_smaller_than_any_normal_one(element: str) -> None:
    """What divides by them must not divide by 0. In rows with signs they become 0, whose sign does not matter."""
    values = as_element(np.array([[1e-40, 1, 0, 2], [1e-40, -1, -1e-40, 0]], np.float32), element)
    payload = encode(FloatingRows(3), values, element)
    assert [each.scheme for each in payload.segments] == [6]
    out = decode(payload)
    assert out.tolist() == [[2.0**-126, 1, 0, 2], [0, -1, 0, 0]]
    wide = encode(FloatingRows(3), values.astype(np.float64), "float64")
    np.testing.assert_array_equal(decode(wide), values)


@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (1, 1 << 20), (40_000, 1)])
def test_chunks_of_one_row_and_of_one_column(rows: int, dim: int) -> None:
    values = squares(rows, dim, zeros=0)
    payload = encode(FloatingRows(3), values)
    assert (np.abs(decode(payload) - values) <= np.abs(values) / 16).all()
    assert sum(len(each.coded.data) for each in payload.segments if each.coded) < 2 * values.size + 100


def test_the_error_report_measures_grids() -> None:
    values = squares(1000, 16)
    reports = cnr_codecs.error_report(values, codecs=[FloatingRows(bits) for bits in range(1, 8)])
    assert [each.config["mantissa_bits"] for each in reports] == list(range(1, 8))
    for bits, report in enumerate(reports, 1):
        assert 2.0 ** -(bits + 4) < report.mean_relative_error < 2.0 ** -(bits + 1)
    sizes = [report.row_bytes for report in reports]
    assert sizes == sorted(sizes)
