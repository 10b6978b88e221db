"""Rows moved between payloads decode to the same bits as where they came from."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import (
    CodecConfigError,
    Compressors,
    FloatingRows,
    Followed,
    KMeansRows,
    LatticeRows,
    LosslessRows,
    ParameterType,
    Payload,
    RowCodec,
    RowsError,
    RowSet,
    Scheme,
    Segment,
    UniformRows,
    build_payload,
    decode_into,
    merge_segments,
    parse,
    present_rows,
    split_segments,
    take_rows,
)
from cnr_codecs.elements import BY_NAME, ELEMENTS, element_named
from cnr_codecs.payload.rowset import BLOCK_ROWS
from cnr_codecs.protocol import Rows
from tests.test_codecs.hard_rows import ROW_MAKERS

FLOATS = ("float32", "float16", "bfloat16")
UNIFORM = st.builds(
    UniformRows, st.sampled_from(["symmetric", "asymmetric", "adaptive"]), st.sampled_from([1, 2, 3, 4, 7, 8])
)
KMEANS = st.builds(KMeansRows, st.sampled_from([1, 2, 4]), st.sampled_from(["row", "block", "cluster"]))

LATTICE = st.builds(LatticeRows, st.sampled_from([0.05, 0.5])) | st.builds(FloatingRows, st.integers(1, 7))


def values_of(element: str, rows: int, dim: int, rng: np.random.Generator) -> Rows:
    """Rows (rows, dim) of an element type; floats are of the kinds that break quantizers."""
    kind = BY_NAME[element]
    if element not in FLOATS:
        raw = rng.integers(0, 256, (rows, dim * kind.stored.itemsize), np.uint8)
        return raw & 1 != 0 if element == "bool" else raw.view(kind.array)
    makers = [ROW_MAKERS[name] for name in rng.choice([*sorted(ROW_MAKERS), *["normal"] * 15], rows)]
    with np.errstate(all="ignore"):
        values = np.array([make(rng, dim) for make in makers]).astype(np.float32).reshape(rows, dim)
        if element == "bfloat16":
            values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return values.astype(kind.array)


def without(payload: Payload, evicted: Rows) -> list[Segment]:
    """The same payload with further rows, absent."""
    nothing = np.empty((0, len(evicted)), np.float32)
    codes = np.empty((len(evicted), 0), np.uint8)
    row_set = RowSet.of(evicted, payload.rows)
    return [*payload.segments, Segment(Scheme.ABSENT, 0, ParameterType.NONE, row_set, nothing, codes)]


@st.composite
def payloads(draw: st.DrawFn, element: str, rows: int, dim: int) -> Payload:
    """A payload of `rows` rows, some of which it holds, some of them as absent."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    codec = draw(st.one_of(UNIFORM, KMEANS, LATTICE) if element in FLOATS else st.just(LosslessRows()))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    held = np.flatnonzero(rng.random(rows) < share)
    data = codec.encode_rows(values_of(element, len(held), dim, rng), held, rows, element=element)
    rest = np.setdiff1d(np.arange(rows), held)
    evicted = rest[rng.random(len(rest)) < draw(st.sampled_from([0.0, 0.2]))]
    if len(evicted):
        data = build_payload(rows, dim, BY_NAME[element], without(parse(data), evicted))
    return parse(data)


def decoded(payload: Payload, need: Rows, first_row: int = 0) -> tuple[bytes, Rows]:
    """(values of the rows asked for, zeros elsewhere; what is still needed)."""
    out = np.zeros((len(need), payload.dim), cnr_codecs.array_dtype(payload.element))
    left = need.copy()
    decode_into(payload, out, left, first_row)
    return out.tobytes(), left


def rebuilt(segments: Sequence[Segment], rows: int, dim: int, element: str, seal: int = 5) -> Payload:
    return parse(build_payload(rows, dim, BY_NAME[element], segments, seal))


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(data=st.data(), element=st.sampled_from([each.name for each in ELEMENTS] + 9 * list(FLOATS)))
def test_taken_rows_decode_to_the_same_bits(data: st.DataObject, element: str) -> None:
    rows, dim = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 40))
    payload = data.draw(payloads(element, rows, dim))
    window, first_row = data.draw(st.integers(1, 400)), data.draw(st.integers(-320, 320))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    need = (rng.random(window) < data.draw(st.sampled_from([0.1, 0.9, 1.0]))).astype(np.uint8)
    left = need.copy()
    moved = rebuilt(take_rows(payload, left, first_row), window, dim, element)
    expected, still_needed = decoded(payload, need, first_row)
    assert decoded(moved, need)[0] == expected
    np.testing.assert_array_equal(left, still_needed)
    np.testing.assert_array_equal(present_rows(moved), np.flatnonzero(need & ~left))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(data=st.data(), element=st.sampled_from([each.name for each in ELEMENTS] + 9 * list(FLOATS)))
def test_merged_segments_decode_to_the_same_bits(data: st.DataObject, element: str) -> None:
    """Several payloads, newest first, composed into one with a segment for each way of storing rows."""
    rows, dim = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 20))
    links = data.draw(st.lists(payloads(element, rows, dim), min_size=1, max_size=4))
    need, segments = np.ones(rows, np.uint8), []
    out = np.zeros((rows, dim), cnr_codecs.array_dtype(element))
    left = need.copy()
    for link in links:
        segments += take_rows(link, left)
        decode_into(link, out, need)
    moved = rebuilt(merge_segments(segments), rows, dim, element)
    assert decoded(moved, 1 - need)[0] == out.tobytes()
    np.testing.assert_array_equal(left, need)
    # A lattice on another grid is another way.
    kinds = [
        (each.scheme, each.bits, each.parameter_type, each.scheme == Scheme.LATTICE and each.grid)
        for each in moved.segments
    ]
    assert len(kinds) == len(set(kinds))
    assert sum(segment.row_set.count for segment in moved.segments) == rows - need.sum()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), element=st.sampled_from([each.name for each in ELEMENTS] + 9 * list(FLOATS)))
def test_split_segments_decode_to_the_same_bits(data: st.DataObject, element: str) -> None:
    rows, dim = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 20))
    payload = data.draw(payloads(element, rows, dim))
    each = data.draw(st.one_of(st.sampled_from([1, 64, 128, 256, 512]), st.integers(1, 310)))
    expected, left = decoded(payload, np.ones(rows, np.uint8))
    found = b""
    for number, chunk in enumerate(split_segments(payload.segments, each) if payload.segments else ()):
        part = rebuilt(chunk, min(each, rows - number * each), dim, element)
        need = 1 - left[number * each : (number + 1) * each]
        values, missing = decoded(part, need)
        assert not missing.any()
        found += values
    assert found == (expected if payload.segments else b"")


def test_only_the_codebooks_in_use_are_kept() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, (256, 32)).astype(np.float32)
    codec = KMeansRows(2, "block", block_rows=16)
    payload = parse(codec.encode_rows(values, None, 256, element="float32"))
    (whole,) = payload.segments
    need = np.zeros(256, np.uint8)
    need[[20, 21, 200]] = 1
    (taken,) = take_rows(payload, need)
    assert (len(whole.parameters), len(taken.parameters)) == (16, 2)
    np.testing.assert_array_equal(taken.books, [0, 0, 1])


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    "codec", [LosslessRows(), UniformRows("symmetric", 4), KMeansRows(1, "block"), LatticeRows()]
)
def test_rows_of_several_blocks_are_taken(codec: RowCodec, step: int) -> None:
    rows = 3 * BLOCK_ROWS + 5
    values = np.random.default_rng(2).normal(0, 1, (rows, 16)).astype(np.float32)
    payload = parse(codec.encode_rows(values, None, rows, element="float32"))
    need = np.zeros(rows - 1000, np.uint8)
    need[step - 1 :: step] = 1
    wanted = need.copy()
    (taken,) = take_rows(payload, need, 900)
    assert not need.any()
    moved = rebuilt([taken], len(need), 16, "float32")
    np.testing.assert_array_equal(present_rows(moved), np.flatnonzero(wanted))
    expected, found = (np.zeros((len(need), 16), np.float32) for _ in range(2))
    decode_into(payload, expected, wanted.copy(), 900)
    decode_into(moved, found, wanted)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("step", [1, 2])
def test_taking_evicted_rows_takes_little_memory(step: int) -> None:
    """A payload of 32 bytes may speak of 64 Mi rows."""
    rows = 1 << 23
    nothing, codes = np.empty((0, rows), np.float32), np.empty((rows, 0), np.uint8)
    segment = Segment(Scheme.ABSENT, 0, ParameterType.NONE, RowSet.first(rows, rows), nothing, codes)
    payload = parse(build_payload(rows, 1, element_named("int8"), [segment]))
    need = np.zeros(rows, np.uint8)
    need[::step] = 1
    tracemalloc.start()
    try:
        (taken,) = take_rows(payload, need)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        found = present_rows(payload)
        assert tracemalloc.get_traced_memory()[1] - before < found.nbytes + (4 << 20)
    finally:
        tracemalloc.stop()
    assert taken.row_set.count == rows // step
    assert peak < 4 * rows


def test_many_shared_codebooks_are_renumbered() -> None:
    """More than 256 of them take another type of number."""
    rng = np.random.default_rng(1)
    codec = KMeansRows(1, "block", block_rows=2)
    segments, expected = [], np.empty((1024, 32), np.float32)
    for first in range(0, 1024, 256):
        values = rng.normal(0, 1, (256, 32)).astype(np.float32)
        payload = parse(codec.encode_rows(values, None, 256, element="float32"))
        decode_into(payload, expected[first : first + 256], np.ones(256, np.uint8))
        segments += take_rows(payload, np.r_[np.zeros(first), np.ones(1024 - first)].astype(np.uint8), -first)
    (merged,) = merge_segments(segments)
    assert len(merged.parameters) == 512
    moved = rebuilt([merged], 1024, 32, "float32")
    assert decoded(moved, np.ones(1024, np.uint8))[0] == expected.tobytes()


def test_taken_rows_do_not_keep_the_payload() -> None:
    data = bytearray(LosslessRows().encode_rows(np.ones((4, 2), np.float32), None, 4, element="float32"))
    segments = take_rows(parse(data), np.ones(4, np.uint8))
    data.clear()  # refused with BufferError while anything looks into it
    assert (
        decoded(rebuilt(segments, 4, 2, "float32"), np.ones(4, np.uint8))[0]
        == np.ones((4, 2), "f4").tobytes()
    )


@pytest.mark.parametrize("need", [np.ones(4), np.ones((2, 2), np.uint8), np.frombuffer(bytes(4), np.uint8)])
def test_marks_of_another_kind_are_refused(need: Rows) -> None:
    payload = parse(LosslessRows().encode_rows(np.ones((4, 2), np.float32), None, 4, element="float32"))
    with pytest.raises(RowsError, match="need must be writable uint8"):
        take_rows(payload, need)


def test_segments_that_do_not_fit_are_refused() -> None:
    def segment(rows: int, dim: int) -> Segment:
        values = np.ones((2, dim), np.float32)
        return parse(LosslessRows().encode_rows(values, None, rows, element="float32")).segments[0]

    with pytest.raises(RowsError, match="row 0 is in two segments"):
        merge_segments([segment(4, 2), segment(4, 2)])
    for other in segment(8, 2), segment(4, 3):
        with pytest.raises(RowsError, match="differ in rows or columns"):
            merge_segments([segment(4, 2), other])
    assert merge_segments([]) == []


@pytest.mark.parametrize("then", [[], [{"id": "zstd"}], [{"id": "lz4"}, {"id": "zstd"}]])
def test_moved_payloads_are_packed_as_the_codec_packs_them(then: Any) -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    data = UniformRows().encode_rows(values, None, 16, element="float32")
    compressors = Compressors.of(then)
    packed = compressors.pack(data, 16, 4, "float32")
    assert bytes(compressors.unpack(packed, 1 << 20)) == data
    named = Compressors.of_zarr(compressors.zarr_codecs())
    assert bytes(named.unpack(packed, 1 << 20)) == data
    if then:
        followed = Followed(UniformRows(), then)
        assert packed == followed.encode_rows(values, None, 16, element="float32")
        assert cnr_codecs.zarr_codecs(followed)[1:] == compressors.zarr_codecs()


@pytest.mark.parametrize("then", [5, [5], [{"id": "pickle"}], [{"id": "zstd"}] * 5])
def test_what_may_not_follow_is_refused(then: Any) -> None:
    with pytest.raises(CodecConfigError):
        Compressors.of(then)
