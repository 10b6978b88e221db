"""Uniform quantization: kernels against their numpy twins, bounds of the error, parameters, independence of rows."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import ChunksCodec, ParameterType, RowsError, Scheme, UniformRows, pack
from cnr_codecs.elements import round_to_bfloat16
from cnr_codecs.kernels.search import greedy_walk
from cnr_codecs.protocol import Rows, encode_chunks
from cnr_codecs.uniform.uniform import SchemeName, row_extremes, search_factor
from tests.test_codecs.hard_rows import (
    BITS,
    FLOAT_MAX,
    SCHEMES,
    adversarial_rows,
    decode,
    encode,
    quantized,
    rows_of,
)
from tests.test_codecs.references import uniform as reference


class WithoutChunks:
    """A codec as others write them, which encodes one chunk a call."""

    def __init__(self, codec: UniformRows) -> None:
        self.get_config, self.zarr_codec = codec.get_config, codec.zarr_codec
        self.bytes_per_row, self.encode_rows = codec.bytes_per_row, codec.encode_rows


@pytest.mark.slow
@given(values=adversarial_rows(min_rows=0), scheme=SCHEMES, bits=BITS)
@settings(deadline=None, max_examples=300)
def test_codes_and_values_equal_the_reference(values: Rows, scheme: SchemeName, bits: int) -> None:
    payload = encode(UniformRows(scheme, bits), values)
    decoded = decode(payload)
    for rows, scale, offset, segment in quantized(payload):
        codes = reference.quantize(values[rows], scale, offset, bits)
        np.testing.assert_array_equal(segment.codes, pack(codes, bits))
        np.testing.assert_array_equal(reference.unpack(segment.codes, bits, values.shape[1]), codes)
        expected = reference.dequantize(codes, scale, offset)
        np.testing.assert_array_equal(decoded[rows].view(np.uint32), expected.view(np.uint32))


@pytest.mark.slow
@given(values=adversarial_rows(), bits=BITS, bins=st.integers(2, 60), data=st.data())
@settings(deadline=None, max_examples=200)
def test_greedy_walk_equals_the_reference(values: Rows, bits: int, bins: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, bins - 1))
    low, high = row_extremes(values)
    factor = search_factor(low, high, bins)
    left, right = np.zeros((2, len(values)), np.int32)
    greedy_walk(values, low, factor, bins, steps, (1 << bits) - 1, left, right)
    expected = reference.greedy_walk(values, low, factor, bins, steps, (1 << bits) - 1)
    np.testing.assert_array_equal((left, right), expected)
    assert (left + right <= steps).all()
    assert not (left + right)[factor == 0].any()


@given(values=adversarial_rows())
@settings(deadline=None)
def test_extremes_equal_the_reference_and_tell_rows_that_are_not_finite(values: Rows) -> None:
    finite = np.isfinite(values).all(axis=1)
    low, high = row_extremes(values)
    np.testing.assert_array_equal(np.isfinite(low) & np.isfinite(high), finite)
    held = values[finite]
    np.testing.assert_array_equal((low[finite], high[finite]), (held.min(axis=1), held.max(axis=1)))
    if len(held):
        expected = np.stack(reference.row_extremes(held)).view(np.uint32)
        np.testing.assert_array_equal(np.stack([low[finite], high[finite]]).view(np.uint32), expected)


@pytest.mark.slow
@given(values=adversarial_rows(), scheme=st.sampled_from(["symmetric", "asymmetric"]), bits=BITS)
@settings(deadline=None, max_examples=300)
def test_errors_stay_within_half_a_step_and_three_roundings(
    values: Rows, scheme: SchemeName, bits: int
) -> None:
    payload = encode(UniformRows(scheme, bits), values)
    decoded = decode(payload)
    for rows, scale, offset, _ in quantized(payload):
        span = scale * np.float32((1 << bits) - 1)
        # Of the half, twice: the spacing of the largest float32 is none itself.
        rounding = 2 * np.spacing(np.maximum(np.abs(offset), span) / 2).astype(np.float64)
        bound = scale.astype(np.float64) / 2 + 3 * rounding
        error = np.abs(values[rows].astype(np.float64) - decoded[rows].astype(np.float64))
        assert (error <= bound[:, None]).all()


@pytest.mark.slow
@given(values=adversarial_rows(), scheme=SCHEMES, bits=BITS)
@settings(deadline=None, max_examples=200)
def test_raw_rows_are_exact_and_hold_every_row_that_is_not_finite(
    values: Rows, scheme: SchemeName, bits: int
) -> None:
    payload = encode(UniformRows(scheme, bits), values)
    np.testing.assert_array_equal(cnr_codecs.present_rows(payload), np.arange(len(values)))
    raw = np.zeros(len(values), bool)
    for segment in payload.segments:
        raw[rows_of(segment)] = segment.scheme is Scheme.RAW
    assert raw[~np.isfinite(values).all(axis=1)].all()
    assert np.isfinite(decode(payload)[~raw]).all()
    np.testing.assert_array_equal(decode(payload)[raw].view(np.uint32), values[raw].view(np.uint32))


@given(values=adversarial_rows(), bits=BITS)
@settings(deadline=None)
def test_constant_rows_are_exact(values: Rows, bits: int) -> None:
    values = np.repeat(values[:, :1], values.shape[1], axis=1)
    decoded = decode(encode(UniformRows("asymmetric", bits), values))
    np.testing.assert_array_equal(decoded, values)


@pytest.mark.slow
@given(values=adversarial_rows(), scheme=SCHEMES, bits=BITS, data=st.data())
@settings(deadline=None)
def test_a_row_decodes_alike_whatever_it_is_encoded_with(
    values: Rows, scheme: SchemeName, bits: int, data: st.DataObject
) -> None:
    codec = UniformRows(scheme, bits)
    together = decode(encode(codec, values))
    chosen = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, unique=True))
    apart = decode(encode(codec, np.ascontiguousarray(values[chosen])))
    np.testing.assert_array_equal(apart.view(np.uint32), together[chosen].view(np.uint32))


@pytest.mark.slow
@given(values=adversarial_rows(), scheme=SCHEMES, bits=BITS, data=st.data())
@settings(deadline=None, max_examples=200)
def test_chunks_encoded_together_are_those_encoded_one_by_one(
    values: Rows, scheme: SchemeName, bits: int, data: st.DataObject
) -> None:
    codec, count, rows = UniformRows(scheme, bits), len(values), len(values) + 9
    inner = data.draw(st.sets(st.integers(1, count - 1), max_size=4)) if count > 1 else set()
    edges = [0, *sorted(inner), count]
    offsets = data.draw(st.sampled_from([None, 2 * np.arange(count) % rows, np.arange(count) % 7]))
    if offsets is not None:  # chunks begin where offsets stop rising
        edges = [0, *(np.flatnonzero(np.diff(offsets) <= 0) + 1).tolist(), count]
    seals = list(range(len(edges) - 1))
    apart = [
        codec.encode_rows(
            values[begin:end],
            None if offsets is None else offsets[begin:end],
            rows,
            element="float32",
            seal=seal,
        )
        for begin, end, seal in zip(edges, edges[1:], seals, strict=False)
    ]
    assert isinstance(codec, ChunksCodec)
    assert not isinstance(WithoutChunks(codec), ChunksCodec)
    for each in codec, WithoutChunks(codec):
        assert encode_chunks(each, values, offsets, edges, rows, element="float32", seals=seals) == apart


def test_no_chunks_are_no_payloads() -> None:
    values = np.zeros((0, 8), np.float32)
    assert encode_chunks(UniformRows(), values, None, [0], 4, element="float32", seals=[]) == []


def test_chunks_of_a_subclass_are_encoded_its_way() -> None:
    class Doubled(UniformRows):
        def encode_rows(self, values: Rows, *rest: Any, **options: Any) -> bytes:
            return super().encode_rows(2 * values, *rest, **options)

    values, codec = np.random.default_rng(8).normal(size=(6, 8)).astype(np.float32), Doubled()
    found = encode_chunks(codec, values, None, [0, 3, 6], 3, element="float32", seals=[0, 0])
    assert found == [codec.encode_rows(part, None, 3, element="float32") for part in (values[:3], values[3:])]


def test_chunks_are_checked_as_one_is() -> None:
    values, codec = np.zeros((4, 8), np.float32), UniformRows()
    for offsets, edges, rows in (
        (np.array([0, 1, 1, 2]), [0, 4], 9),
        (np.array([0, 1, 0, 9]), [0, 2, 4], 9),
        (None, [0, 1, 4], 2),
    ):
        with pytest.raises(RowsError):
            encode_chunks(
                codec, values, offsets, edges, rows, element="float32", seals=[0] * (len(edges) - 1)
            )


@pytest.mark.slow
@given(values=adversarial_rows(), bits=BITS)
@settings(deadline=None, max_examples=200)
def test_asymmetric_parameters_cover_the_range_and_widen_it_little(values: Rows, bits: int) -> None:
    levels = (1 << bits) - 1
    payload = encode(UniformRows("asymmetric", bits), values)
    for rows, scales, offsets, segment in quantized(payload):
        assert not (scales.view(np.uint32) & 0xFF).any(), "more than 16 significant bits"
        for row, scale, offset in zip(values[rows], scales, offsets, strict=True):
            low, high = Fraction(float(row.min())), Fraction(float(row.max()))
            step, start = Fraction(float(scale)), Fraction(float(offset))
            assert start <= low
            # The division that makes the step rounds once, in float64.
            assert (start + step * levels - high) >= -(high - low) / (1 << 50)
            widest = 1 + Fraction(1, 1 << 7 if segment.parameter_type is ParameterType.FLOAT16 else 1 << 14)
            assert step * levels <= (high - low) * widest


def test_float16_parameters_serve_plain_embeddings_and_float32_those_they_would_hurt() -> None:
    rng = np.random.default_rng(5)
    plain = rng.normal(0, 0.1, (50, 64))
    values = np.concatenate([plain, 1000 + plain, plain * 1e6]).astype(np.float32)
    for scheme in "asymmetric", "adaptive":
        kinds = {
            segment.parameter_type: set(rows_of(segment).tolist())
            for segment in encode(UniformRows(scheme, 4), values).segments
        }
        assert kinds[ParameterType.FLOAT16] == set(range(50))
        assert kinds[ParameterType.FLOAT32] == set(range(50, 150))


def test_rows_too_narrow_to_gain_stay_exact() -> None:
    values = np.random.default_rng(6).normal(size=(30, 1)).astype(np.float32)
    payload = encode(UniformRows("asymmetric", 8), values)
    assert [segment.scheme for segment in payload.segments] == [Scheme.RAW]
    np.testing.assert_array_equal(decode(payload), values)


def test_zeros_decode_to_positive_zero() -> None:
    values = np.array([[0.0, -0.0] * 8, [-0.0] * 16], np.float32)
    for scheme in "symmetric", "asymmetric", "adaptive":
        for bits in range(1, 9):
            decoded = decode(encode(UniformRows(scheme, bits), values))
            assert not decoded.any()
            assert not np.signbit(decoded).any()


@pytest.mark.parametrize(("bits", "walk", "expected"), [(2, (25, 0.99), 0.2559), (4, (45, 0.5), 0.0654)])
def test_the_walk_reaches_the_error_of_the_published_search(
    bits: int, walk: tuple[int, float], expected: float
) -> None:
    values = np.random.default_rng(0).normal(0, 0.1, (4000, 64)).astype(np.float32)

    def error(*options: Any) -> float:
        return float(np.linalg.norm(values - decode(encode(UniformRows(*options), values)), axis=1).mean())

    assert error("adaptive", bits, *walk) == pytest.approx(expected, rel=0.01)
    assert error("adaptive", bits) < error("adaptive", bits, *walk)
    assert error("adaptive", bits) < error("asymmetric", bits) < error("symmetric", bits)


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric", "adaptive"])
def test_sixteen_bit_floats_are_quantized_as_float32_and_rounded_when_decoded(
    element: str, scheme: SchemeName
) -> None:
    rng = np.random.default_rng(7)
    scales = 10.0 ** rng.integers(-6, 4, (200, 1))
    wide = np.concatenate([rng.normal(size=(200, 33)) * scales, rng.choice([65504.0, 60000], (9, 33))])
    if element == "float16":
        values = wide.astype(np.float16)
    else:
        values = (wide.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        values[0] = np.array(0x7F7F0000, np.uint32).view(np.float32)  # the largest bfloat16
        values[0, 0] = 1e38
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    payload = encode(UniformRows(scheme, 5), values, element)
    decoded = decode(payload)
    assert np.isfinite(decoded).all()
    for rows, scale, offset, segment in quantized(payload):
        exact = reference.dequantize(reference.unpack(segment.codes, 5, 33), scale, offset)
        rounded = exact.astype(np.float16) if element == "float16" else round_to_bfloat16(exact)
        np.testing.assert_array_equal(decoded[rows], rounded)


def test_expected_size_is_the_size_of_plain_rows() -> None:
    values = np.random.default_rng(8).normal(0, 0.1, (1000, 33)).astype(np.float32)
    for codec in UniformRows("adaptive", 3), UniformRows("symmetric", 8), cnr_codecs.LosslessRows():
        size = len(codec.encode_rows(values, None, 1000, element="float32"))
        assert size == 24 + 4 + 16 + 4 + 1000 * codec.bytes_per_row(33, "float32")


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric", "adaptive"])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(
    ("element", "largest"), [("float32", FLOAT_MAX), ("float16", 65504.0), ("bfloat16", 255 * 2.0**120)]
)
def test_steps_rounded_up_do_not_carry_the_largest_values_to_infinity(
    scheme: SchemeName, bits: int, element: str, largest: float
) -> None:
    lows = np.array([0, 0.1, 0.3, 0.5, -0.3, -1])[:, None] * largest
    values = np.concatenate([np.repeat(lows, 20, axis=1), np.full((6, 20), largest)], axis=1)
    values = values.astype(cnr_codecs.array_dtype(element))
    if element == "bfloat16":
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.isfinite(decode(encode(UniformRows(scheme, bits), values, element))).all()
