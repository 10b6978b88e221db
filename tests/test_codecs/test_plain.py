"""What is done at once, for the payload that nearly every chunk is, against what takes every payload."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_codecs import ParameterType, PayloadError, RowSet, Scheme, Segment, UniformRows, parse
from cnr_codecs.elements import element_named
from cnr_codecs.payload.payload import Draft, build
from cnr_codecs.payload.plain import decode_plain
from cnr_codecs.protocol import Rows
from cnr_codecs.uniform.uniform import SchemeName
from tests.test_codecs.hard_rows import BITS, SCHEMES, adversarial_rows, decode
from tests.test_codecs.payload_bytes import head_bytes, layout_of, proved

ROOM = 1 << 20


def plain_of(data: bytes, max_bytes: int = ROOM, out: Rows | None = None) -> npt.NDArray[np.float32] | None:
    return decode_plain(np.frombuffer(data, np.uint8), max_bytes, out)


@pytest.mark.slow
@given(values=adversarial_rows(), scheme=SCHEMES, bits=BITS)
@settings(deadline=None, max_examples=200)
def test_plain_payloads_decode_to_the_same_bits(values: Rows, scheme: SchemeName, bits: int) -> None:
    data = UniformRows(scheme, bits).encode_rows(values, None, len(values), element="float32")
    payload = parse(data)
    plain = plain_of(data)
    kinds = {(segment.scheme, segment.parameter_type) for segment in payload.segments}
    assert (plain is not None) == (kinds == {(Scheme.ASYMMETRIC, ParameterType.FLOAT16)})
    if plain is not None:
        np.testing.assert_array_equal(plain.view(np.uint32), decode(payload).view(np.uint32))


@given(
    rows=st.integers(1, 1300), dim=st.sampled_from([2, 5, 16, 33, 700]), bits=BITS, seed=st.integers(0, 99)
)
@settings(deadline=None, max_examples=60)
def test_plain_payloads_of_many_blocks_decode_to_the_same_bits(
    rows: int, dim: int, bits: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parameters = rng.integers(0, 0x7C00, (2, rows), np.uint16)
    parameters[1] |= rng.integers(0, 2, rows, np.uint16) << np.uint16(15)
    codes = rng.integers(0, 256, (rows, (dim * bits + 7) // 8), np.uint8)
    row_set = RowSet.first(rows, rows)
    segment = Segment(Scheme.ASYMMETRIC, bits, ParameterType.FLOAT16, row_set, parameters.view("<f2"), codes)
    data = build(rows, dim, element_named("float32"), [segment])
    plain = plain_of(data, 1 << 30)
    assert plain is not None
    np.testing.assert_array_equal(plain.view(np.uint32), decode(parse(data)).view(np.uint32))


def payload_of(
    parameters: Any, parameter_type: ParameterType, bits: int = 4, scheme: Scheme = Scheme.ASYMMETRIC
) -> bytes:
    stored = np.array(parameters, "<f2" if parameter_type is ParameterType.FLOAT16 else "<f4")
    row_set = RowSet.first(stored.shape[1], stored.shape[1])
    codes = np.zeros((stored.shape[1], bits), np.uint8)
    segment = Segment(scheme, bits, parameter_type, row_set, stored, codes)
    return build(stored.shape[1], 8, element_named("float32"), [segment])


HALF_BITS = st.integers(0, 0xFFFF) | st.sampled_from(
    [0, 1, 0x3FF, 0x7BFF, 0x7C00, 0x8000, 0x8001, 0xFBFF, 0xFC00]
)


@pytest.mark.slow
@given(parameters=st.lists(st.tuples(HALF_BITS, HALF_BITS), min_size=1, max_size=40))
@settings(deadline=None, max_examples=300)
def test_float16_parameters_are_refused_by_the_same_rule(parameters: Any) -> None:
    stored = np.array(parameters, np.uint16).T.copy().view(np.float16)
    sound = bool(np.isfinite(stored).all() and not np.signbit(stored[0]).any())
    data = payload_of(stored, ParameterType.FLOAT16)
    assert (plain_of(data) is not None) == sound
    if sound:
        parse(data)
    else:
        with pytest.raises(PayloadError, match=r"not finite|negative"):
            parse(data)


WIDE_BITS = st.integers(0, 0xFFFFFFFF) | st.sampled_from(
    [0, 0x7F7FFFFF, 0x7F800000, 0x80000000, 0xFF7FFFFF, 0x3F800100]
)


@pytest.mark.slow
@given(
    parameters=st.lists(st.tuples(WIDE_BITS, WIDE_BITS), min_size=1, max_size=4),
    bits=BITS,
    symmetric=st.booleans(),
    rounded=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_float32_parameters_are_refused_by_the_same_rule(
    parameters: Any, bits: int, symmetric: bool, rounded: bool
) -> None:
    words = np.array(parameters, np.uint32).T.copy()
    if rounded:
        words[0] &= np.uint32(0xFFFFFF00)
    stored = words.view(np.float32)[: 1 if symmetric else 2]
    with np.errstate(invalid="ignore"):  # of NaN that signal
        scale = stored[0].astype(np.float64)
    spans = scale * ((1 << bits) - 1) * (2 if symmetric else 1)
    sound = bool(
        np.isfinite(stored).all()
        and not np.signbit(stored[0]).any()
        and not (words[0] & 0xFF).any()
        and (spans <= np.finfo(np.float32).max).all()
    )
    scheme = Scheme.SYMMETRIC if symmetric else Scheme.ASYMMETRIC
    data = payload_of(stored, ParameterType.FLOAT32, bits, scheme)
    if sound:
        parse(data)
    else:
        with pytest.raises(PayloadError, match=r"finite|negative|significant|overflows"):
            parse(data)


PLAIN = UniformRows("asymmetric", 4).encode_rows(np.ones((6, 16), np.float32), None, 6, element="float32")


@pytest.mark.parametrize("cut", [0, 5, 31, 32, 40, 47, 48, len(PLAIN) - 1])
def test_cut_payloads_are_not_plain(cut: int) -> None:
    assert plain_of(PLAIN[:cut]) is None


def test_plain_payloads_that_are_too_large_or_long_are_left_to_others() -> None:
    assert plain_of(PLAIN, 6 * 16 * 4 - 1) is None
    assert plain_of(PLAIN, 6 * 16 * 4) is not None
    assert plain_of(PLAIN + b"\0") is None


def test_no_flipped_bit_of_the_head_is_plain() -> None:
    for bit in range(8 * head_bytes(PLAIN)):
        flipped = bytearray(PLAIN)
        flipped[bit // 8] ^= 1 << bit % 8
        assert plain_of(bytes(flipped)) is None
        proven = proved(bytes(flipped))
        if plain_of(proven) is not None:
            assert (
                bit // 8 in range(16, 24) or bit // 8 >= 44
            )  # the seal, and the checksum that was put right
            parse(proven)


@pytest.mark.parametrize("version", [1, 2, 4])
def test_payloads_of_other_versions_are_left_to_others(version: int) -> None:
    assert layout_of(PLAIN).encode() == PLAIN
    assert plain_of(layout_of(PLAIN).encode(version)) is None


def test_where_a_plain_payload_goes() -> None:
    out = np.zeros(6 * 16, np.float32)
    decoded = plain_of(PLAIN, out=out)
    assert decoded is not None
    assert decoded.shape == (6, 16)
    assert decoded.base is out
    assert (out == 1).all()
    read_only = out.copy()
    read_only.flags.writeable = False
    for wrong in (out[1:], out.reshape(6, 16), out.view(np.int32), out.astype(np.float64), read_only):
        assert plain_of(PLAIN, out=wrong) is None


def test_a_draft_is_whole_even_if_its_codes_are_still_held() -> None:
    for held in (False, True):
        draft = Draft(3, 2, 4)
        codes = draft.codes
        codes[:] = 7
        if not held:
            del codes
        assert draft.finish(b"abc") == b"abc" + b"\7" * 8
