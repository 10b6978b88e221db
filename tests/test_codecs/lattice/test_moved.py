"""Floating grids that move with values that decay: kernels against numpy, codes that stay, and what is refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import (
    CodecConfigError,
    FloatingRows,
    PayloadError,
    Pending,
    RowsError,
    UnsupportedPayloadError,
    build_payload,
    decode_into,
    merge_segments,
    parse,
    row_codec,
    take_rows,
)
from cnr_codecs.comparing import OTHER, SAME, code_dtype, compare_rows, read_codes, unknown_code
from cnr_codecs.elements import element_named
from cnr_codecs.lattice.floating import floating_codes
from cnr_codecs.payload.coded import Grid
from cnr_codecs.protocol import Rows
from tests.nightly import at_night, histories
from tests.test_codecs.hard_rows import adversarial_rows, decode, encode
from tests.test_codecs.lattice.test_relative import compose
from tests.test_codecs.payload_bytes import header, layout_of, segment
from tests.test_codecs.references.moved import moved_codes, moved_values

BELOW_2 = float(np.nextafter(np.float32(2), np.float32(1)))
ABOVE_1 = float(np.nextafter(np.float32(1), np.float32(2)))
SCALES = [1.0, ABOVE_1, float(np.float32(4 / 3)), 1.5, float(np.float32(1.9)), BELOW_2]
LEAST_NORMAL = np.float32(2.0**-126)


@pytest.mark.parametrize("mantissa", [each if each in (1, 3) else at_night(each) for each in range(1, 8)])
def test_every_code_is_that_of_its_value(mantissa: int) -> None:
    random = [float(np.float32(each)) for each in np.random.default_rng(mantissa).uniform(1, 2, 4)]
    # Just about where a value is rounded to the least normal number.
    close = [float(np.nextafter(np.float32(1 + 2.0**-mantissa), np.float32(each))) for each in (0, 2)]
    for scale in [*SCALES, *random, *close]:
        for shift in (0, 1, 7, 90):
            if (scale, shift) == (1.0, 0):
                continue
            grid = Grid(0.0, mantissa, scale, shift)
            least, most = grid.code_range
            sizes = np.array([least, *range(grid.lowest + grid.raised, most + 1)])
            codes = np.concatenate([[0], sizes, -sizes[1:]])[:, None]
            values = moved_values(codes, mantissa, scale, shift)
            found, raw = floating_codes(values, Grid(0.0, mantissa, scale, shift), "float32")
            assert not raw.any()
            np.testing.assert_array_equal(found, codes)
            assert (np.diff(values[1 : len(sizes) + 1, 0].astype(np.float64)) > 0).all()
            assert values[1, 0] == LEAST_NORMAL < values[2, 0]
            payload = encode(FloatingRows(mantissa, scale=scale, shift=shift), values)
            assert decode(payload).tobytes() == values.tobytes()
            assert payload.segments[0].grid == grid
            again = np.empty_like(found)
            assert not read_codes(values, grid, "float32", again).any()
            np.testing.assert_array_equal(again, codes)


MOVES = st.tuples(
    st.floats(1, 2, width=32, exclude_max=True), st.sampled_from([0, 1, 2, 5, 40, 130, 300, 5_000, 16_383])
)


@given(values=adversarial_rows(min_rows=1), mantissa=st.integers(1, 7), move=MOVES)
@settings(deadline=None, max_examples=histories(60))
def test_rows_equal_the_reference(values: Rows, mantissa: int, move: tuple[float, int]) -> None:
    if move == (1.0, 0):
        return
    codes, raw = moved_codes(values, mantissa, *move)
    found, none = floating_codes(values, Grid(0.0, mantissa, *move), "float32")
    np.testing.assert_array_equal(none, raw)
    np.testing.assert_array_equal(found, codes[~raw])
    out = decode(encode(FloatingRows(mantissa, scale=move[0], shift=move[1]), values))
    expected = moved_values(codes, mantissa, *move)
    expected[raw] = values[raw]
    assert out.tobytes() == expected.tobytes()
    grid = Grid(0.0, mantissa, *move)
    parent = codes.astype(code_dtype(grid))
    same = np.where(raw, OTHER, SAME)
    np.testing.assert_array_equal(compare_rows(values, parent, grid, "float32"), same)
    parent[:, -1] += 1
    assert (compare_rows(values, parent, grid, "float32") == OTHER).all()
    read = np.empty_like(parent)
    lacking = read_codes(out, grid, "float32", read)
    np.testing.assert_array_equal(
        read[~lacking], floating_codes(out[~lacking], Grid(0.0, mantissa, *move), "float32")[0]
    )
    assert (read[lacking, 0] == unknown_code(read.dtype)).all()
    assert not lacking[~raw].any()


@pytest.mark.parametrize("mantissa", range(1, 8))
def test_rows_that_decay_together_keep_their_codes(mantissa: int) -> None:
    values = np.random.default_rng(0).lognormal(-9, 2, (500, 3)).astype(np.float32)
    first, _ = floating_codes(values, Grid(mantissa=mantissa), "float32")
    total, now, others = 1.0, values.astype(np.float64), 0
    for factor in (0.999, 0.9, 0.5, 0.71, 1e-3):
        total, now = total / factor, now * factor
        shift = int(np.floor(np.log2(total)))
        scale = float(np.float32(total / 2.0**shift))
        found, raw = floating_codes(now.astype(np.float32), Grid(0.0, mantissa, scale, shift), "float32")
        assert not raw.any()
        others += int((found != first).sum())
    assert others <= 1


def over(scale: float, shift: int) -> tuple[list[bytes], Rows, Rows]:
    """A whole payload and one relative to it on a grid that has moved; the codes that result, and all rows' values."""
    rng = np.random.default_rng(1)
    values = (rng.lognormal(-5, 2, (300, 3)) * rng.choice([1, -1], (300, 1))).astype(np.float32)
    codec = FloatingRows(3, relative=True)
    known = np.ones(300, bool)
    first = codec.encode_over(values, None, 300, np.zeros((300, 3), np.int16), ~known, element="float32")
    ids = np.arange(0, 300, 3)
    moved = FloatingRows(3, relative=True, scale=scale, shift=shift)
    decayed = (values[ids] * rng.uniform(0.9, 1.1, (100, 3)) / (scale * 2.0**shift)).astype(np.float32)
    newer = moved.encode_over(decayed, ids, 300, first.codes[ids], known[ids], element="float32")
    codes = first.codes.copy()
    codes[ids] = newer.codes
    return [first.payload, newer.payload], codes, moved_values(codes, 3, scale, shift)


@pytest.mark.parametrize(("scale", "shift"), [(1.25, 0), (1.0, 3), (BELOW_2, 30)])
def test_a_chain_is_read_on_the_grid_of_its_newest_payload(scale: float, shift: int) -> None:
    payloads, codes, expected = over(scale, shift)
    out, need = np.empty_like(expected), np.ones(300, np.uint8)
    pending = Pending(300, 3)
    for data in reversed(payloads):
        decode_into(parse(data).at(scale, shift), out, need, 0, pending)
    pending.prove()
    assert not need.any()
    assert out.tobytes() == expected.tobytes()
    need, pending = np.ones(300, np.uint8), Pending(300, 3)
    taken = [
        each
        for data in reversed(payloads)
        for each in take_rows(parse(data).at(scale, shift), need, 0, pending)
    ]
    folded = parse(build_payload(300, 3, element_named("float32"), merge_segments(taken)))
    assert decode(folded).tobytes() == expected.tobytes()
    again, _ = floating_codes(decode(folded), Grid(0.0, 3, scale, shift), "float32")
    np.testing.assert_array_equal(again, codes)


def test_grids_that_differ_do_not_compose_and_never_go_back() -> None:
    (first, newer), _, _ = over(1.25, 3)
    with pytest.raises(PayloadError, match="relative to it on another grid"):
        compose([first, newer], np.arange(300), 3, "float32")
    for move in ((1.0, 0), (1.0, 3), (1.2, 3), (BELOW_2, 2)):
        with pytest.raises(PayloadError, match="has moved further than"):
            parse(newer).at(*move)


def test_codes_beneath_what_the_grid_has_stand_for_the_least_normal_number() -> None:
    values = np.array([[2.0**-120, -(2.0**-120)], [0, 1]], np.float32)
    payload = parse(FloatingRows(3).encode_rows(values, None, 2, element="float32"))
    found = decode(payload.at(1.5, 6))
    np.testing.assert_array_equal(
        found, np.array([[LEAST_NORMAL, -LEAST_NORMAL], [0, 2.0**-6 / 1.5]], np.float32)
    )


MOVED = FloatingRows(3, scale=1.5, shift=4).encode_rows(
    np.random.default_rng(0).lognormal(-5, 1, (50, 5)).astype(np.float32), None, 50, element="float32"
)


def spoiled(data: bytes, at: int, new: bytes) -> bytes:
    (part,) = layout_of(data).parts
    body = part.body[:at] + new + part.body[at + len(new) :]
    return (header(1, 50, 5) + segment(*part.numbers, body)).encode()


@pytest.mark.parametrize(
    ("at", "new"),
    [
        (4, struct.pack("<f", 2.0)),
        (4, struct.pack("<f", 0.99)),
        (4, struct.pack("<f", 0.0)),
        (4, struct.pack("<f", np.inf)),
        (4, struct.pack("<f", -1.5)),
        (4, struct.pack("<f", np.nan)),
        (8, struct.pack("<h", -1)),
        (8, struct.pack("<h", 16_384)),
    ],
)
def test_a_grid_where_none_moves_to_is_refused_by_name(at: int, new: bytes) -> None:
    with pytest.raises(UnsupportedPayloadError, match=r"of a grid are unknown: a newer release"):
        parse(spoiled(MOVED, at, new))


@pytest.mark.parametrize(("at", "new"), [(4, struct.pack("<f", 1.25)), (8, struct.pack("<h", 5))])
def test_another_scale_or_shift_is_damage(at: int, new: bytes) -> None:
    with pytest.raises(PayloadError, match="crc32c differs"):
        decode(parse(spoiled(MOVED, at, new)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 2.0}, "scale and shift must be"),
        ({"scale": 0.5}, "scale and shift must be"),
        ({"scale": 1.1}, "scale and shift must be"),  # no float32
        ({"scale": float("nan")}, "scale and shift must be"),
        ({"scale": 1}, "scale and shift must be"),
        ({"shift": -1}, "scale and shift must be"),
        ({"shift": 1.0}, "scale and shift must be"),
        ({"shift": 1 << 14}, "scale and shift must be"),
        ({"mantissa_bits": 23, "scale": 1.5}, "with 23 bits 1.0 and 0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecConfigError, match=message):
        FloatingRows(**options)


def test_only_float32_moves_and_configurations_say_where_to() -> None:
    codec = FloatingRows(2, relative=True, scale=1.5, shift=4)
    assert row_codec(codec.get_config()) == codec
    assert FloatingRows(2, relative=True).get_config().keys() == {"id", "mantissa_bits", "relative"}
    for element in ("float16", "bfloat16", "float64"):
        values = np.ones((1, 1), cnr_codecs.array_dtype(element))
        with pytest.raises(RowsError, match="only float32 rows do"):
            codec.encode_rows(values, None, 1, element=element)
