"""The lattice: kernels against numpy, errors within half a step, what is raw, steps, and damaged payloads."""

import contextlib
import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import (
    FloatingRows,
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
from cnr_codecs.lattice.lattice import most_code
from cnr_codecs.lattice.steps import COUNTED_ROWS, median_scale, no_counts, scale_counts
from cnr_codecs.payload.coded import CodedRows, Grid
from cnr_codecs.payload.validate import MIN_STEP
from cnr_codecs.protocol import Rows
from tests.nightly import histories
from tests.test_codecs.hard_rows import adversarial_rows, decode, encode, rows_of
from tests.test_codecs.payload_bytes import header, layout_of, segment
from tests.test_codecs.references import coded as reference
from tests.test_codecs.references.lattice import codes_of, values_of

FLOATS = st.sampled_from(["float32", "float16", "bfloat16"])
STEPS = st.builds(lambda m, e: math.ldexp(m, e), st.integers(128, 255), st.integers(-60, 20))


def as_element(values: Rows, element: str) -> Rows:
    with np.errstate(all="ignore"):
        if element == "bfloat16":
            return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return values.astype(cnr_codecs.array_dtype(element))


def lattice_of(payload: Payload) -> Segment | None:
    """The segment on the coarsest step, or on a floating grid."""
    found = [each for each in payload.segments if each.scheme is Scheme.LATTICE]
    return max(found, key=lambda each: each.grid.step, default=None)


def body_of(kept: Segment) -> bytes:
    """What a payload stores of a coded segment."""
    data = build_payload(kept.row_set.rows, kept.codes.shape[1] // 2, element_named("float32"), [kept])
    return layout_of(data).parts[0].body


def normal(rows: int, dim: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).normal(0, 0.1, (rows, dim)).astype(np.float32)


@given(values=adversarial_rows(min_rows=0), step=STEPS, element=FLOATS)
@settings(deadline=None, max_examples=histories(300))
def test_rows_equal_the_reference_and_are_within_half_a_step(values: Rows, step: float, element: str) -> None:
    values = as_element(values, element)
    limit = most_code(step, element_named(element))
    codes, raw = codes_of(values, step, limit)
    payload = encode(LatticeRows(step=step), values, element)
    out, held = decode(payload), np.flatnonzero(~raw)
    finer = rows_on_finer_steps(values, step, element, payload, out)
    plain = raw & ~np.isin(np.arange(len(values)), finer)
    assert out[: len(values)][plain].tobytes() == values[plain].tobytes()
    if len(held) == 0:
        assert all(each.grid.step < step for each in payload.segments if each.scheme is Scheme.LATTICE)
        return
    kept = lattice_of(payload)
    assert kept is not None
    np.testing.assert_array_equal(rows_of(kept), held)
    assert body_of(kept) == reference.on_step(codes[held].reshape(-1).tolist(), values.shape[1], step)
    expected = values_of(codes[held], step, element)
    assert out[held].tobytes() == expected.tobytes()
    if element == "float32":
        assert (np.abs(out[held].astype(np.float64) - values[held]) <= step / 2).all()
    again, _ = codes_of(out[held], step, limit)
    np.testing.assert_array_equal(again, codes[held])


def rows_on_finer_steps(values: Rows, step: float, element: str, payload: Payload, out: Rows) -> Rows:
    """The rows that would be zero on the step, and are not; float32 ones lie on steps of which they are 4 to 64."""
    found = [np.empty(0, np.intp)]
    for part in payload.segments:
        if part.scheme is not Scheme.LATTICE or part.grid.step == step:
            continue
        assert element == "float32"
        assert math.log2(step / part.grid.step) % 4 == 0
        rows = rows_of(part)
        most = np.abs(values[rows]).max(axis=1).astype(np.float64)
        assert (most <= step / 2).all()
        assert (most >= 4 * part.grid.step).all()
        assert (most < 64 * part.grid.step).all()
        assert (np.abs(out[rows].astype(np.float64) - values[rows]) <= part.grid.step / 2).all()
        found.append(rows)
    if element == "float32":
        with np.errstate(invalid="ignore"):
            most = np.abs(values.astype(np.float64)).max(axis=1, initial=0)
            small = (most <= step / 2) & (most >= 64 * MIN_STEP)
        assert set(np.flatnonzero(small)) <= {*np.concatenate(found).tolist()}
    return np.concatenate(found)


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
        assert step == lattice_step(0.2 * median_scale(scale_counts(values)))
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


@pytest.mark.parametrize("dim", [1, 3, 4, 17])
def test_the_scale_is_the_median_of_magnitudes_whoever_counts_them(dim: int) -> None:
    values = normal(2 * COUNTED_ROWS // dim + 77, dim) * np.float32(37)
    values[5], values[9], values[11:40], values[50:60, 0] = np.nan, -np.inf, 0, 1e30
    counted = scale_counts(values)
    parts = [scale_counts(values[first : first + 999]) for first in range(0, len(values), 999)]
    columns = [scale_counts(values[:, place : place + 2]) for place in range(0, dim, 2)]
    for some in parts, columns:
        np.testing.assert_array_equal(sum(some, no_counts()), counted)
    found = np.abs(values[np.isfinite(values) & (values != 0)])
    assert counted.sum() == found.size
    assert median_scale(counted) == pytest.approx(1.4826 * np.median(found), rel=1 / 30)
    assert median_scale(counted) == pytest.approx(3.7, rel=0.05)
    assert median_scale(no_counts()) == 0


@pytest.mark.parametrize("value", [1e30, 3e38, 1e-30, 1e-41, 1.0])
def test_scales_of_any_size(value: float) -> None:
    assert median_scale(scale_counts(np.full((9, 5), value, np.float32))) == pytest.approx(
        1.4826 * value, rel=1 / 30, abs=2.0**-130
    )


def test_a_few_huge_rows_do_not_widen_the_step() -> None:
    values = normal(1000, 8)
    (step,) = {each.grid.step for each in encode(LatticeRows(0.2), values).segments}
    values[:100] *= np.float32(1e9)
    kept = lattice_of(encode(LatticeRows(0.2), values))
    assert kept is not None
    assert kept.grid.step == pytest.approx(step, rel=0.2)


def test_rows_of_any_size_where_they_belong() -> None:
    """On the step, on finer ones, or as they are: 1e30, NaN and infinities are; nothing becomes zero that was not."""
    values = normal(9, 6)
    for row, value in enumerate([1e30, np.nan, np.inf, -np.inf, 1e-41, 1e-6, 1e-12, 0, -0.0]):
        values[row] = np.float32(value)
    payload = encode(LatticeRows(step=0.0625), values)
    steps = {
        each.grid.step: rows_of(each).tolist() for each in payload.segments if each.scheme is Scheme.LATTICE
    }
    assert steps == {0.0625: [7, 8], 0.0625 / 16**5: [5], 0.0625 / 16**10: [6]}
    out = decode(payload)
    assert out[:5].tobytes() == values[:5].tobytes()
    np.testing.assert_allclose(out[5:7], values[5:7], rtol=1 / 8)
    assert out[7:].tobytes() == bytes(48)


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
    rows = (1 << 18) // dim + 100  # of more codes than a block has
    held = np.sort(np.random.default_rng(7).choice(2 * rows, rows, replace=False))
    values = np.abs(normal(rows, dim)) + np.float32(0.01)
    payload = parse(LatticeRows(step=2.0**-8).encode_rows(values, held, 2 * rows, element="float32"))
    (part,) = payload.segments
    assert part.coded is not None
    assert len(part.coded.lines.blocks) > 1
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
    body = reference.on_step(codes.tolist(), 3, 0.5)
    assert body[:12] == struct.pack("<ffhBB", 0.5, 1, 0, 0, 0)
    assert data == (header(1, 8, 3) + segment(6, 0, 2, 1, 2, bytes([0b100100]), body)).encode()
    np.testing.assert_array_equal(decode(parse(data))[[2, 5]], values)


@pytest.mark.parametrize(("dim", "rows"), [(1, 32), (2, 16), (3, 10), (4, 8), (5, 1), (64, 1)])
def test_narrow_rows_are_coded_in_lines_of_several(dim: int, rows: int) -> None:
    values = normal(100, dim) + np.float32(1)
    payload = encode(LatticeRows(0.1), values)
    (held,) = payload.segments
    assert held.coded is not None
    assert held.coded.lines.line == rows * dim
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


@pytest.mark.slow
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
    chunk = data.draw(st.integers(1, rows + 5))
    found = np.full_like(expected, 7)
    for number, segments in enumerate(split_segments(merged, chunk) if merged else ()):
        part = found[number * chunk : (number + 1) * chunk]
        whole = parse(build_payload(len(part), dim, element_named(element), segments))
        cnr_codecs.decode_into(whole, part, np.ones(len(part), np.uint8))
    assert found[need == 0].tobytes() == expected[need == 0].tobytes()
    assert (found[need != 0] == 7).all()


GOOD = LatticeRows(step=2.0**-7).encode_rows(normal(50, 4), None, 50, element="float32")


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
        (spoiled(16, b"\xff"), "sizes of 1 frames are cut off|the classes of 7 lines"),
    ],
)
def test_malformed_bodies_are_refused(data: bytes, message: str) -> None:
    parse(spoiled(0, b""))
    with pytest.raises(PayloadError, match=f"segment 0: .*{message}"):
        parse(data)


@pytest.mark.parametrize(
    ("at", "new"),
    [
        (10, b"\1"),
        (10, b"\2"),
        (10, b"\4"),
        (11, b"\1"),
        (8, b"\1"),
        (9, b"\x80"),
        (4, struct.pack("<f", 2)),
        (4, struct.pack("<f", math.nan)),
        (4, struct.pack("<f", 0)),
    ],
)
def test_what_is_reserved_is_refused_by_name(at: int, new: bytes) -> None:
    with pytest.raises(UnsupportedPayloadError, match=r"flags .* of a grid are unknown: a newer release"):
        parse(spoiled(at, new))


@pytest.mark.parametrize("count", [50, 7])
def test_codes_that_do_not_decode_change_no_marks(count: int) -> None:
    body = len(layout_of(GOOD).parts[0].body)
    payload = parse(spoiled(body - 3, b"\xff\x00\xff"))
    need = np.zeros(50, np.uint8)
    need[:count] = 1
    with pytest.raises(PayloadError, match=r"payload: block 0 of 1: a zstd frame of .* is damaged"):
        cnr_codecs.decode_into(payload, np.empty((50, 4), np.float32), need)
    assert need.sum() == count
    with pytest.raises(PayloadError, match="block 0 of 1: a zstd frame"):
        take_rows(payload, need)


def test_codes_that_are_not_those_of_the_check_are_damage() -> None:
    payload = parse(spoiled(12, b"\1\2\3\4"))
    with pytest.raises(PayloadError, match="crc32c differs"):
        cnr_codecs.decode_into(payload, np.empty((50, 4), np.float32), np.ones(50, np.uint8))
    with pytest.raises(PayloadError, match="crc32c differs"):
        take_rows(payload, np.ones(50, np.uint8))


def test_codes_of_more_than_16_bits_are_damage() -> None:
    data = header(1, 1, 4) + segment(6, 0, 2, 0, 1, reference.on_step([40_000, 0, -5, 1], 4, 0.5))
    with pytest.raises(PayloadError, match="beyond 32767"):
        decode(parse(data.encode()))


def test_a_chunk_of_one_row_of_very_many_columns() -> None:
    values = normal(1, 1 << 20)
    payload = encode(LatticeRows(step=2.0**-6), values)
    assert np.abs(decode(payload) - values).max() <= 2.0**-7
    assert sum(len(each.coded.data) for each in payload.segments if each.coded) < values.size


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 20_000])
def test_a_chunk_of_one_column(rows: int) -> None:
    values = normal(rows, 1)
    held = np.arange(rows) * 3 + 1
    payload = parse(LatticeRows(step=2.0**-8).encode_rows(values, held, 3 * rows + 1, element="float32"))
    found = np.full((3 * rows + 1, 1), 7, np.float32)
    need = np.ones(len(found), np.uint8)
    assert cnr_codecs.decode_into(payload, found, need) == rows
    assert np.abs(found[held] - values).max() <= 2.0**-9
    assert (found[need != 0] == 7).all()


@pytest.mark.parametrize("codec", [LatticeRows(step=0.1015625), FloatingRows(3)], ids=["step", "m3"])
def test_no_bit_of_a_payload_gives_other_values(codec: LatticeRows | FloatingRows) -> None:
    """Not of the step, nor of the classes: the check of the codes covers both."""
    values = normal(30, 6) * np.exp(np.arange(30, dtype=np.float32)[:, None] / 9)
    values[::7] = 0
    data = codec.encode_rows(values, None, 30, element="float32")
    expected = decode(parse(data))
    for at, bit in np.ndindex(len(data), 8):
        spoiled = bytearray(data)
        spoiled[at] ^= 1 << bit
        with contextlib.suppress(PayloadError, UnsupportedPayloadError):
            found = decode(parse(bytes(spoiled)))
            assert found.tobytes() == expected.tobytes(), (at, bit)


def test_classes_that_change_places_are_damage() -> None:
    codes = np.array([[1, 40, 0, 0, 0], [60, 3, 20, 9, 9], [90, 90, 90, 90, 90]], np.int16)
    coded = CodedRows.encode(codes, Grid(0.5))
    np.testing.assert_array_equal(coded.decode().reshape(3, 5), codes)
    lines = coded.lines
    assert len({*lines.classes.tolist()}) == 3
    swapped = replace(lines, classes=lines.classes[[1, 0, 2]], order=lines.order[[1, 0, 2]])
    with pytest.raises(PayloadError, match="the codes are damaged"):
        replace(coded, lines=swapped).decode()
