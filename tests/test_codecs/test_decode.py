"""Decoding rows into windows of arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_codecs import (
    LosslessRows,
    ParameterType,
    Payload,
    RowCodec,
    RowsError,
    RowSet,
    Scheme,
    Segment,
    UniformRows,
    decode_into,
    fill_value,
    parse,
    present_rows,
)
from cnr_codecs.elements import element_named, round_to_bfloat16
from cnr_codecs.payload.payload import build
from cnr_codecs.protocol import Rows
from tests.test_codecs.hard_rows import affine
from tests.test_codecs.references import uniform as reference

ROWS = 40


def run_payload(bits: int, dim: int = 5) -> tuple[Payload, Rows]:
    """A payload whose rows follow one another, and all of its rows decoded at once."""
    values = np.random.default_rng(5).normal(size=(30, dim)).astype(np.float32)
    payload = parse(
        UniformRows("asymmetric", bits).encode_rows(values, np.arange(4, 34), ROWS, element="float32")
    )
    codes = reference.unpack(payload.segments[0].codes, bits, dim)
    whole = np.full((ROWS, dim), -1, np.float32)
    whole[4:34] = reference.dequantize(codes, *affine(payload.segments[0]))
    return payload, whole


def mixed_payload(element: str, dim: int = 5) -> tuple[Payload, Rows]:
    """A payload with quantized, raw and missing rows, and all of its rows decoded at once."""
    rng = np.random.default_rng(4)
    values = rng.normal(size=(30, dim)).astype(np.float32)
    values[::5] += 1e6 if element == "float32" else 100
    values[::4] = np.inf
    if element == "float16":
        values = values.astype(np.float16)
    elif element == "bfloat16":
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    offsets = np.sort(rng.choice(ROWS, 30, replace=False))
    payload = parse(UniformRows("asymmetric", 3).encode_rows(values, offsets, ROWS, element=element))
    whole = np.full((ROWS, dim), -1, values.dtype)
    assert decode_into(payload, whole, np.ones(ROWS, np.uint8)) == 30
    return payload, whole


PAYLOADS = {element: mixed_payload(element) for element in ("float32", "float16", "bfloat16")}
PAYLOADS |= {f"run of {bits} bits": run_payload(bits) for bits in (1, 2, 4, 8)}


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(PAYLOADS)),
    first_row=st.integers(-50, 50),
    marks=st.lists(st.integers(0, 3), max_size=60) | st.integers(0, 60).map(lambda count: [1] * count),
    margin=st.integers(0, 3),
)
@settings(deadline=None, max_examples=300)
def test_windows_take_the_rows_that_are_asked_for(
    name: str, first_row: int, marks: list[int], margin: int
) -> None:
    payload, whole = PAYLOADS[name]
    need = np.array(marks, np.uint8)
    wide = np.full((len(need), 5 + 2 * margin), 9, whole.dtype)
    out = wide[:, margin : margin + 5]
    held = np.isin(np.arange(len(need)) + first_row, present_rows(payload))
    expected = held & (need != 0)
    before = need.copy()
    assert decode_into(payload, out, need, first_row) == expected.sum()
    np.testing.assert_array_equal(need, np.where(expected, 0, before))
    np.testing.assert_array_equal(out[expected], whole[np.flatnonzero(expected) + first_row])
    assert (out[~expected] == 9).all()
    assert (wide[:, :margin] == 9).all()
    assert (wide[:, margin + 5 :] == 9).all()


@pytest.mark.slow
@given(
    element=st.sampled_from(["float32", "float16", "bfloat16"]),
    codec=st.builds(UniformRows, st.sampled_from(["symmetric", "asymmetric"]), st.integers(1, 8)),
    dim=st.sampled_from([3, 16, 40, 700]),
    held_share=st.sampled_from([0.1, 0.9, 1.0]),
    asked_share=st.sampled_from([0.02, 0.5, 0.99, 1.0]),
    large_share=st.sampled_from([0, 0.1, 1]),
    first_row=st.integers(-700, 1300),
    count=st.integers(0, 1500),
    seed=st.integers(0, 1 << 32),
)
@settings(deadline=None, max_examples=150)
def test_rows_of_many_blocks_equal_the_reference(
    element: str,
    codec: RowCodec,
    dim: int,
    held_share: float,
    asked_share: float,
    large_share: float,
    first_row: int,
    count: int,
    seed: int,
) -> None:
    rows = 1200
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, dim)).astype(np.float32)
    values[rng.random(rows) < large_share] *= 1000  # which float16 parameters serve badly
    if element == "float16":
        values = values.astype(np.float16)
    elif element == "bfloat16":
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    held = np.flatnonzero(rng.random(rows) < held_share)
    payload = parse(codec.encode_rows(values[held], held, rows, element=element))
    whole = np.full_like(values, 9)
    for segment in payload.segments:
        places = np.concatenate([block for _, block in segment.row_set.blocks()])
        if segment.scheme is Scheme.RAW:
            whole[places] = values[places]
            continue
        codes = reference.unpack(segment.codes, segment.bits, dim)
        decoded = reference.dequantize(codes, *affine(segment))
        whole[places] = round_to_bfloat16(decoded) if element == "bfloat16" else decoded
    out = np.full((count, dim), 9, values.dtype)
    need = (rng.random(count) < asked_share).astype(np.uint8)
    places = np.arange(count) + first_row
    expected = (need != 0) & np.isin(places, held)
    assert decode_into(payload, out, need, first_row) == expected.sum()
    assert not need[expected].any()
    np.testing.assert_array_equal(out[expected], whole[places[expected]])
    assert (out[~expected] == 9).all()


@pytest.mark.parametrize("element", ["float32", "float16", "int16", "bool"])
def test_evicted_rows_are_found_and_read_as_fill(element: str) -> None:
    kind = element_named(element)
    nothing = np.empty((0, 0), np.float32)
    rows = RowSet.of(np.array([1, 4]), 6)
    evicted = Segment(Scheme.ABSENT, 0, ParameterType.NONE, rows, nothing, np.empty((2, 0), np.uint8))
    payload = parse(build(6, 3, kind, [evicted]))
    out = np.ones((4, 3), kind.array)
    need = np.array([1, 1, 1, 0], np.uint8)
    assert decode_into(payload, out, need, 1) == 1
    assert need.tolist() == [0, 1, 1, 0]
    np.testing.assert_array_equal(out[0], [fill_value(element)] * 3)
    assert (out[1:] == 1).all()
    assert decode_into(payload, out, need, 1) == 0
    assert decode_into(payload, out, need, 2) == 1


def test_float16_is_rounded_like_numpy_rounds() -> None:
    # Every kind of float16: steps of all sizes around zero, subnormal and near the largest.
    rng = np.random.default_rng(9)
    offsets = np.concatenate([[0, -65504], 10.0 ** rng.uniform(-9, 4, 300) * rng.choice([-1, 1], 300)])
    steps = np.concatenate([[2.0**-26, 40], 2.0 ** rng.integers(-30, 5, 300)])
    parameters = np.stack([steps, offsets]).astype("<f4")
    codes = np.tile(np.arange(256, dtype=np.uint8), (302, 1))
    rows = RowSet.of(np.arange(302), 302)
    segment = Segment(Scheme.ASYMMETRIC, 8, ParameterType.FLOAT32, rows, parameters, codes)
    out = np.empty((302, 256), np.float16)
    decode_into(parse(build(302, 256, element_named("float16"), [segment])), out, np.ones(302, np.uint8))
    wide = parameters[0][:, None] * codes.astype(np.float32) + parameters[1][:, None]
    np.testing.assert_array_equal(out.view(np.uint16), wide.astype(np.float16).view(np.uint16))


def test_float16_overflows_to_infinity() -> None:
    parameters = np.array([[512], [65504]], "<f4")
    segment = Segment(
        Scheme.ASYMMETRIC,
        2,
        ParameterType.FLOAT32,
        RowSet.of(np.arange(1), 1),
        parameters,
        np.array([[4]], np.uint8),
    )
    out = np.empty((1, 2), np.float16)
    decode_into(parse(build(1, 2, element_named("float16"), [segment])), out, np.ones(1, np.uint8))
    assert out.tolist() == [[65504, np.inf]]


def test_many_rows_are_decoded_block_by_block() -> None:
    rows = 150_000
    # Each magnitude is a float16, and tells neighbouring blocks apart.
    values = np.repeat((np.arange(rows) % 2039).astype(np.float32)[:, None], 2, axis=1)
    for held in (np.arange(rows), np.arange(1, rows), np.arange(0, rows, 40)):
        for codec in LosslessRows(), UniformRows("symmetric", 1):
            payload = parse(codec.encode_rows(values[held], held, rows, element="float32"))
            out = np.full_like(values, -1)
            need = np.ones(rows, np.uint8)
            assert decode_into(payload, out, need) == len(held)
            assert need.sum() == rows - len(held)
            np.testing.assert_array_equal(out[held], values[held])


PAYLOAD = PAYLOADS["float32"][0]
READ_ONLY = np.zeros((3, 5), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("out", "need"),
    [
        (np.zeros((3, 4), np.float32), np.ones(3, np.uint8)),
        (np.zeros((3, 5), np.float64), np.ones(3, np.uint8)),
        (np.zeros(15, np.float32), np.ones(15, np.uint8)),
        (np.zeros((3, 5), ">f4"), np.ones(3, np.uint8)),
        (READ_ONLY, np.ones(3, np.uint8)),
        (np.zeros((5, 3), np.float32).T, np.ones(3, np.uint8)),
        (np.zeros((3, 5), np.float32)[::-1], np.ones(3, np.uint8)),
        (np.zeros((3, 10), np.float32)[:, ::2], np.ones(3, np.uint8)),
        (np.lib.stride_tricks.as_strided(np.zeros(5, np.float32), (3, 5), (0, 4)), np.ones(3, np.uint8)),
        (np.zeros((3, 5), np.float32), np.ones(4, np.uint8)),
        (np.zeros((3, 5), np.float32), np.ones(3, bool)),
        (np.zeros((3, 5), np.float32), np.ones(6, np.uint8)[::2]),
    ],
)
def test_outputs_that_do_not_fit_are_refused(out: Rows, need: Rows) -> None:
    with pytest.raises(RowsError):
        decode_into(PAYLOAD, out, need)
