"""The lattice: kernels against numpy, errors within half a step, what is raw, steps, and damaged payloads."""

import math
import struct
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import (
    LatticeRows,
    Payload,
    PayloadError,
    RowsError,
    Scheme,
    Segment,
    UniformRows,
    UnsupportedPayloadError,
    build_payload,
    lattice_step,
    merge_segments,
    parse,
    split_segments,
    take_rows,
)
from cnr_codecs.elements import element_named
from cnr_codecs.entropy.lines import BLOCK_LINES
from cnr_codecs.lattice.lattice import most_code
from cnr_codecs.lattice.steps import SUM_ROWS, block_sums, root_mean_square, values_of
from cnr_codecs.protocol import Rows
from tests.nightly import histories
from tests.test_codecs.hard_rows import adversarial_rows, decode, encode, rows_of
from tests.test_codecs.payload_bytes import header, layout_of, segment
from tests.test_codecs.references import entropy as reference
from tests.test_codecs.references.lattice import codes_of

FLOATS = st.sampled_from(["float32", "float16", "bfloat16"])
STEPS = st.builds(lambda m, e: math.ldexp(m, e), st.integers(128, 255), st.integers(-60, 20))


def as_element(values: Rows, element: str) -> Rows:
    with np.errstate(all="ignore"):
        if element == "bfloat16":
            return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return values.astype(cnr_codecs.array_dtype(element))


def lattice_of(payload: Payload) -> Segment | None:
    return next((each for each in payload.segments if each.scheme is Scheme.LATTICE), None)


def normal(rows: int, dim: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).normal(0, 0.1, (rows, dim)).astype(np.float32)


@given(values=adversarial_rows(min_rows=0), step=STEPS, element=FLOATS)
@settings(deadline=None, max_examples=histories(300))
def test_rows_equal_the_reference_and_are_within_half_a_step(values: Rows, step: float, element: str) -> None:
    values = as_element(values, element)
    limit = most_code(step, element_named(element))
    codes, raw = codes_of(values, step, limit)
    payload = encode(LatticeRows(step=step), values, element)
    out, kept = decode(payload), lattice_of(payload)
    held = np.flatnonzero(~raw)
    assert out[: len(values)][raw].tobytes() == values[raw].tobytes()
    if kept is None:
        assert len(held) == 0
        return
    np.testing.assert_array_equal(rows_of(kept), held)
    assert kept.coded is not None
    dim = values.shape[1]
    line = dim if dim > 4 else 32 // dim * dim
    assert bytes(kept.coded.lines.data) == reference.encode(codes[held].reshape(-1).tolist(), line)
    assert kept.coded.check == google_crc32c.value(codes[held].astype("<i4").tobytes())
    expected = values_of(codes[held], step, element)
    assert out[held].tobytes() == expected.tobytes()
    if element == "float32":
        assert (np.abs(out[held].astype(np.float64) - values[held]) <= step / 2).all()
    again, _ = codes_of(out[held], step, limit)
    np.testing.assert_array_equal(again, codes[held])


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 6, 7, 17, 64, 1024])
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 33, 3000])
def test_dims_and_rows(dim: int, rows: int) -> None:
    if rows * dim > 1 << 20:
        rows = 1000
    values = normal(rows, dim)
    payload = encode(LatticeRows(0.2), values)
    kept = lattice_of(payload)
    assert (kept is None) == (rows == 0)
    if kept is not None:
        step = float(kept.parameters[0, 0])
        assert step == lattice_step(0.2 * root_mean_square(block_sums(values)))
        assert np.abs(decode(payload)[:rows] - values).max() <= step / 2


@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, np.inf, 1e-41, 6e4, -1e-6])
def test_rows_of_one_value(element: str, value: float) -> None:
    values = as_element(np.full((40, 9), value, np.float32), element)
    out = decode(encode(LatticeRows(), values, element))
    if np.isfinite(value):
        assert np.abs(out.astype(np.float64) - values).max() <= max(0.2 * abs(value), 2.0**-101)
    else:
        assert out.tobytes() == values.tobytes()


def test_rows_that_are_stored_as_they_are_widen_no_step() -> None:
    values = normal(100, 8)
    spoiled = np.vstack([values, np.full((1, 8), 3e38, np.float32)])
    spoiled[100, 3] = np.nan
    out = decode(encode(LatticeRows(0.2), spoiled))
    assert out[:100].tobytes() == decode(encode(LatticeRows(0.2), values)).tobytes()
    assert out[100].tobytes() == spoiled[100].tobytes()


def test_codes_beyond_16_bits_and_huge_values_are_raw() -> None:
    values = np.array(
        [[32767, -32767], [32768, 0], [0, -32768], [3e38, 1], [1, np.nan], [0.5, -1.5]], np.float32
    )
    payload = encode(LatticeRows(step=1.0), values)
    assert rows_of(payload.segments[0]).tolist() == [0, 5]
    out = decode(payload)
    assert out[:5].tobytes() == values[:5].tobytes()
    assert out[5].tolist() == [0, -2]


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_codes_beyond_127_are_raw_in_types_of_16_bits(element: str) -> None:
    values = np.array([[127, -127], [128, 0], [1, -128]], cnr_codecs.array_dtype(element))
    payload = encode(LatticeRows(step=1.0), values, element)
    assert rows_of(payload.segments[0]).tolist() == [0]
    assert decode(payload).tobytes() == values.tobytes()


def test_float16_rows_that_would_decode_to_infinity_are_raw() -> None:
    values = np.array([[65504, 0], [65000, 0], [100, 0]], np.float16)
    out = decode(encode(LatticeRows(step=float(lattice_step(2000))), values, "float16"))
    assert np.isfinite(out).all()


def test_the_step_is_that_of_the_rows_whatever_block_is_summed_first() -> None:
    values = normal(2 * SUM_ROWS + 77, 3)
    values[5] = np.nan
    values[SUM_ROWS, 1] = -np.inf
    blocks = [block_sums(values[first : first + SUM_ROWS]) for first in range(0, len(values), SUM_ROWS)]
    together = [each for block in blocks for each in block]
    assert together == block_sums(values)
    assert sum(count for _, count in together) == values.size - 6
    squares = values[np.isfinite(values).all(axis=1)].astype(np.float64) ** 2
    assert root_mean_square(together) == pytest.approx(math.sqrt(squares.mean()), rel=1e-12)
    lanes = np.zeros((-(-SUM_ROWS * 3 // 64), 64))
    finite = np.where(np.isfinite(values[:SUM_ROWS]), values[:SUM_ROWS].astype(np.float64), 0) ** 2
    lanes.reshape(-1)[: finite.size] = finite.reshape(-1)
    total = 0.0
    for lane in np.add.accumulate(lanes, axis=0)[-1].tolist():
        total += lane
    assert together[0][0] == total


@pytest.mark.parametrize("value", [1.0, 0.1, 1e-40, 1e35, 0.0, 255.5, math.inf, 2.0**-100, 3.3333e-31])
def test_steps_have_8_significant_bits(value: float) -> None:
    step = lattice_step(value)
    assert LatticeRows(step=step).step == step
    assert float(np.float32(step)) == step
    if 2.0**-100 <= value <= 2.0**100:
        assert abs(step - value) <= value / 256
    codes = np.arange(-32767, 32768)
    np.testing.assert_array_equal(
        np.float32(step) * codes.astype(np.float32), step * codes.astype(np.float64)
    )


@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.parametrize("step", [1, 7, 5000])
def test_wanted_rows_of_several_blocks(dim: int, step: int) -> None:
    rows = 3 * BLOCK_LINES + 100
    held = np.sort(np.random.default_rng(7).choice(2 * rows, rows, replace=False))
    values = normal(rows, dim)
    payload = parse(LatticeRows(step=2.0**-8).encode_rows(values, held, 2 * rows, element="float32"))
    expected = np.full((2 * rows, dim), 7, np.float32)
    expected[held] = values_of(codes_of(values, 2.0**-8, 32767)[0], 2.0**-8, "float32")
    for first, count in (0, 2 * rows), (5000, 300), (-50, 100), (2 * rows - 10, 40), (3 * rows, 5), (-9, 4):
        window = np.arange(first, first + count)
        inside = (window >= 0) & (window < 2 * rows)
        need = (window % step == 0).astype(np.uint8)
        wanted = need.astype(bool) & inside
        wanted[inside] &= np.isin(window[inside], held)
        wide = np.full((count, dim + 3), 7, np.float32)
        assert cnr_codecs.decode_into(payload, wide[:, 1 : dim + 1], need, first) == wanted.sum()
        np.testing.assert_array_equal(need.astype(bool), (window % step == 0) & ~wanted)
        np.testing.assert_array_equal(wide[wanted, 1 : dim + 1], expected[window[wanted]])
        assert (wide[~wanted] == 7).all()
        assert (wide[:, [0, dim + 1, dim + 2]] == 7).all()


def test_bytes_of_a_payload() -> None:
    values = np.array([[0, 0.5, -1], [0, 0, 0]], np.float32)
    data = LatticeRows(step=0.5).encode_rows(values, np.array([2, 5]), 8, element="float32")
    codes = np.array([0, 1, -2, 0, 0, 0], "<i4")
    grid = struct.pack("<fBBHI", 0.5, 0, 10, 0, google_crc32c.value(codes.tobytes()))
    words = reference.encode(codes.tolist(), 30)
    assert data == (header(1, 8, 3) + segment(6, 0, 2, 1, 2, bytes([0b100100]), grid, words)).encode()
    np.testing.assert_array_equal(decode(parse(data))[[2, 5]], values)


@pytest.mark.parametrize(("dim", "rows"), [(1, 32), (2, 16), (3, 10), (4, 8), (5, 1), (64, 1)])
def test_narrow_rows_are_coded_in_lines_of_several(dim: int, rows: int) -> None:
    values = normal(100, dim)
    payload = encode(LatticeRows(0.1), values)
    (held,) = payload.segments
    assert held.coded is not None
    assert (held.coded.line_rows, held.coded.lines.line) == (rows, rows * dim)
    assert np.abs(decode(payload) - values).max() <= held.parameters[0, 0] / 2


def test_fewer_bytes_than_adaptive_codes_at_their_error() -> None:
    values = normal(20_000, 64)

    def measured(codec: Any) -> tuple[float, float]:
        data = codec.encode_rows(values, None, len(values), element="float32")
        error = np.linalg.norm(decode(parse(data)) - values, axis=1).mean()
        return len(data) / values.size * 8, float(error)

    adaptive, error = measured(UniformRows("adaptive", 4))
    bits, own_error = measured(LatticeRows(0.27))
    assert own_error <= error
    assert bits < 0.9 * adaptive
    assert LatticeRows(0.27).bytes_per_row(64, "float32") * 8 / 64 == pytest.approx(bits, abs=0.5)


def test_integers_are_no_rows_of_a_lattice() -> None:
    with pytest.raises(RowsError, match="can't be quantized"):
        LatticeRows().encode_rows(np.zeros((2, 2), np.int32), None, 2, element="int32")


@given(data=st.data(), element=FLOATS)
@settings(deadline=None, max_examples=histories(80))
def test_moved_rows_keep_their_codes(data: st.DataObject, element: str) -> None:
    """Rows of several payloads are taken, merged, cut into chunks, and built again."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    rows, dim = data.draw(st.integers(1, 300)), data.draw(st.sampled_from([1, 2, 5, 16]))
    need, taken = np.ones(rows, np.uint8), []
    expected = np.full((rows, dim), 7, cnr_codecs.array_dtype(element))
    for _ in range(data.draw(st.integers(1, 3))):
        step = data.draw(st.sampled_from([0.125, 0.01171875]))
        held = np.flatnonzero(rng.random(rows) < 0.6)
        values = as_element(rng.normal(0, 0.2, (len(held), dim)).astype(np.float32), element)
        values[rng.random(len(held)) < 0.1] = np.nan
        payload = parse(LatticeRows(step=step).encode_rows(values, held, rows, element=element))
        cnr_codecs.decode_into(payload, expected, need.copy())
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


GOOD = LatticeRows(step=0.125).encode_rows(normal(50, 4), None, 50, element="float32")


def spoiled(at: int, new: bytes) -> bytes:
    """The payload with other bytes in the body of its segment."""
    layout = layout_of(GOOD)
    (part,) = layout.parts
    body = part.body[:at] + new + part.body[at + len(new) :]
    return (header(1, 50, 4) + segment(*part.numbers, body)).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (spoiled(0, struct.pack("<f", 0.1)), "step 0.1.* not one of 8"),
        (spoiled(0, struct.pack("<f", 0)), "step 0.0 is not"),
        (spoiled(0, struct.pack("<f", -0.5)), "step -0.5 is not"),
        (spoiled(0, struct.pack("<f", math.nan)), "step nan is not"),
        (spoiled(0, struct.pack("<f", math.inf)), "step inf is not"),
        (spoiled(0, struct.pack("<f", 2.0**101)), "is not one of 8"),
        (spoiled(0, struct.pack("<f", 2.0**-101)), "is not one of 8"),
        (spoiled(5, b"\0"), "lines have no rows"),
        (spoiled(12, b"\x09"), "model 0"),
    ],
)
def test_malformed_bodies_are_refused(data: bytes, message: str) -> None:
    parse(spoiled(0, b""))
    with pytest.raises(PayloadError, match=f"segment 0: .*{message}"):
        parse(data)


@pytest.mark.parametrize(("at", "new"), [(4, b"\1"), (4, b"\4"), (6, b"\1")])
def test_what_is_reserved_is_refused_by_name(at: int, new: bytes) -> None:
    with pytest.raises(UnsupportedPayloadError, match=r"flags .* of a lattice are unknown: a newer release"):
        parse(spoiled(at, new))


def test_row_exponents_are_named() -> None:
    with pytest.raises(UnsupportedPayloadError, match="row exponents"):
        parse(spoiled(4, b"\1"))


@pytest.mark.parametrize("count", [50, 7])
def test_codes_that_do_not_decode_change_no_marks(count: int) -> None:
    body = len(layout_of(GOOD).parts[0].body)
    payload = parse(spoiled(body - 3, b"\xff\x00\xff"))
    need = np.zeros(50, np.uint8)
    need[:count] = 1
    with pytest.raises(PayloadError, match="payload: block 0 of 1 is damaged"):
        cnr_codecs.decode_into(payload, np.empty((50, 4), np.float32), need)
    assert need.sum() == count
    with pytest.raises(PayloadError, match="block 0 of 1 is damaged"):
        take_rows(payload, need)


def test_codes_that_are_not_those_of_the_check_are_damage() -> None:
    payload = parse(spoiled(8, b"\1\2\3\4"))
    with pytest.raises(PayloadError, match="crc32c differs"):
        cnr_codecs.decode_into(payload, np.empty((50, 4), np.float32), np.ones(50, np.uint8))
    with pytest.raises(PayloadError, match="crc32c differs"):
        take_rows(payload, np.ones(50, np.uint8))


def test_codes_of_more_than_16_bits_are_damage() -> None:
    codes = np.array([40_000, 0, -5, 1], "<i4")
    grid = struct.pack("<fBBHI", 0.5, 0, 1, 0, google_crc32c.value(codes.tobytes()))
    data = header(1, 1, 4) + segment(6, 0, 2, 0, 1, grid, reference.encode(codes.tolist(), 4))
    with pytest.raises(PayloadError, match="beyond 32767"):
        decode(parse(data.encode()))


def test_version_1_has_no_lattice() -> None:
    with pytest.raises(PayloadError, match="scheme 6 is unknown"):
        parse((header() + segment(6, 0, 2, 0, 1, bytes(40))).encode(1))
    with pytest.raises(PayloadError, match="row-set kind 4 is unknown"):
        parse((header() + segment(1, 32, 0, 4, 1, b"\0\0", bytes(8))).encode(1))
