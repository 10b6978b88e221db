"""Entropy coding: kernels against their readable twin, the bytes as specified, sizes, and damaged words."""

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_codecs import PayloadError, RowSet, RowSetKind
from cnr_codecs.entropy.lines import BLOCK_LINES, CodedLines, block_room
from cnr_codecs.entropy.models import MAX_TOKENS, model_words, normalize
from cnr_codecs.kernels.rans import CLASSES, TOKENS
from cnr_codecs.payload.rowset import validate_row_set
from cnr_codecs.protocol import Rows
from tests.nightly import histories
from tests.test_codecs.references import entropy as reference

LINES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 17, 32, 64])


def decoded(coded: CodedLines) -> Rows:
    room = block_room(coded)
    found: Rows = np.concatenate([coded.decode_block(n, room)[0].copy() for n in range(coded.blocks)])
    return found


def parsed(data: bytes, size: int, line: int) -> CodedLines:
    return CodedLines.parse(data, size, line, "test")


@st.composite
def codes(draw: st.DrawFn, most: int = 400) -> Rows:
    """Integers of several scales, large ones and zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    scales = draw(st.lists(st.sampled_from([0, 0.05, 0.4, 3, 20, 500, 20000]), min_size=1, max_size=5))
    size = draw(st.integers(1, most))
    drawn = np.rint(rng.normal(0, 1, size) * np.repeat(scales, -(-size // len(scales)))[:size])
    found: Rows = np.clip(drawn, -32767, 32767).astype(np.int16)
    return found


@given(values=codes(), line=LINES)
@settings(deadline=None, max_examples=histories(200))
def test_kernels_write_and_read_what_the_reference_does(values: Rows, line: int) -> None:
    data = bytes(CodedLines.encode(values, line).data)
    assert data == reference.encode(values.tolist(), line)
    np.testing.assert_array_equal(reference.decode(data, len(values), line), values)
    np.testing.assert_array_equal(decoded(parsed(data, len(values), line)), values)
    assert bytes(CodedLines.encode(values.astype(np.int32), line).data) == data
    assert bytes(parsed(data, len(values), line).data) == data


@pytest.mark.parametrize("line", [1, 3, 32])
def test_blocks_are_decoded_one_by_one(line: int) -> None:
    values = np.random.default_rng(1).integers(-40, 40, 2 * BLOCK_LINES * line + 5).astype(np.int16)
    data = bytes(CodedLines.encode(values, line).data)
    if line < 32:
        assert data == reference.encode(values.tolist(), line)
    coded = parsed(data, len(values), line)
    assert coded.blocks == 3
    room = np.empty(BLOCK_LINES * line, np.int32)
    for block in 2, 0, 1:
        first = block * BLOCK_LINES * line
        np.testing.assert_array_equal(
            coded.decode_block(block, room)[0], values[first : first + BLOCK_LINES * line]
        )


def test_codes_of_17_bits_are_coded() -> None:
    values = np.array([65534, -65534, 0, 131071, -131072, 31, 32, -33], np.int32)
    coded = CodedLines.encode(values, 4)
    assert bytes(coded.data) == reference.encode(values.tolist(), 4)
    np.testing.assert_array_equal(decoded(coded), values)
    assert coded.blocks == 1
    assert coded.decode_block(0, block_room(coded))[1] == 2 * 131072 - 1


def test_classes_follow_the_mean_magnitude() -> None:
    for mean, expected in (
        (0, 0),
        (1 / 16, 1),
        (1 / 8, 2),
        (1 / 4, 3),
        (1 / 2, 4),
        (1, 5),
        (2, 6),
        (4, 7),
        (900, 7),
    ):
        line = [round(mean * 16)] + [0] * 15
        assert reference.class_of(line) == expected
        assert reference.class_of([-each for each in line]) == expected


def test_words_of_one_line_of_zeros() -> None:
    models = struct.pack("<2H7H", 1, 4096, *[0] * 7)
    block = struct.pack("<4I", *[1 << 16] * 4)
    data = models + struct.pack("<I", 16) + block
    assert bytes(CodedLines.encode(np.zeros(5, np.int16), 5).data) == data
    np.testing.assert_array_equal(decoded(parsed(data, 5, 5)), np.zeros(5))


@given(counts=st.lists(st.integers(0, 1 << 40), min_size=TOKENS, max_size=TOKENS))
@settings(deadline=None, max_examples=histories(100))
def test_frequencies_sum_to_4096_and_leave_no_symbol_out(counts: list[int]) -> None:
    found = normalize(np.array([counts], np.int64))[0].astype(np.int64)
    assert found.sum() == (4096 if any(counts) else 0)
    np.testing.assert_array_equal(found > 0, np.array(counts) > 0)


@pytest.mark.parametrize("scale", [0.2, 1, 3, 10])
def test_the_size_is_that_of_the_models_entropy(scale: float) -> None:
    values = np.rint(np.random.default_rng(2).normal(0, scale, (40_000, 32))).astype(np.int16)
    coded = CodedLines.encode(values.reshape(-1), 32)
    bits = np.zeros((CLASSES, TOKENS))
    with np.errstate(divide="ignore"):
        costs = 12 - np.log2(coded.frequencies.astype(np.float64))
    for line in values[:1000].tolist():
        held = reference.class_of(line)
        bits[0, held] += costs[0, held]
        for code in line:
            token, _, rest = reference.token_of(code)
            bits[held, token] += (costs[held, token] + rest) if held else 0
    assert len(coded.data) * 8 <= 1.01 * bits.sum() * 40


SOUND = bytes(CodedLines.encode(np.random.default_rng(3).integers(-50, 50, 900).astype(np.int16), 9).data)
HEAD = len(model_words(parsed(SOUND, 900, 9).frequencies)) * 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "model 0 is cut off"),
        (SOUND[:7], "no whole number"),
        (SOUND[:40], "cut off"),
        (struct.pack("<H", 9) + bytes(18), "model 0 is cut off, or has more than 8"),
        (struct.pack("<2H", 1, 4095), "model 0 sum to 4095"),
        (struct.pack("<H", 0), "model 0 sum to 0"),
        (
            struct.pack("<2H", 1, 4096) + struct.pack("<H", MAX_TOKENS + 1) + bytes(200),
            "model 1 is cut off, or",
        ),
        (struct.pack("<2H8H", 1, 4096, 2, 4096, 1, *[0] * 5), "model 1 sum to 4097"),
        (SOUND[:HEAD], "sizes of 1 blocks"),
        (SOUND[:-2], "its blocks are said"),
        (SOUND + bytes(2), "its blocks are said"),
        (SOUND[:HEAD] + struct.pack("<I", 12) + bytes(12), "its blocks are said"),
    ],
)
def test_malformed_words_are_refused(data: bytes, message: str) -> None:
    parsed(SOUND, 900, 9)
    with pytest.raises(PayloadError, match=message):
        parsed(data, 900, 9)


def test_damaged_blocks_are_refused_or_decode_to_as_many_codes() -> None:
    """States end as they began, which most damaged blocks do not. None reads or writes beyond its memory."""
    rng, refused = np.random.default_rng(4), 0
    room = np.full(BLOCK_LINES * 9, 7, np.int32)
    for _ in range(3000):
        data = bytearray(SOUND)
        data[int(rng.integers(HEAD + 4, len(data)))] ^= int(rng.integers(1, 256))
        coded = parsed(bytes(data), 900, 9)
        with suppress(PayloadError):
            assert len(coded.decode_block(0, room)[0]) == 900
            refused -= 1
        refused += 1
        assert (room[900:] == 7).all()
    assert refused > 2000  # open bits of large codes are whatever they are


def test_a_class_without_a_model_is_refused() -> None:
    models = struct.pack("<3H7H", 2, 1, 4095, *[0] * 7)
    data = models + struct.pack("<I", 16) + struct.pack("<4I", *[1 << 16 | 5] * 4)
    with pytest.raises(PayloadError, match="damaged"):
        decoded(parsed(data, 8, 4))


@given(data=st.data(), rows=st.one_of(st.integers(1, 80), st.integers(65530, 65545), st.just(3_000_000)))
@settings(deadline=None, max_examples=histories(150))
def test_gaps_round_trip_where_they_take_fewer_bytes(data: st.DataObject, rows: int) -> None:
    share = data.draw(st.sampled_from([0.001, 0.01, 0.1, 0.3, 1]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    offsets = np.unique(rng.integers(0, rows, max(1, int(min(rows, 200_000) * share))))
    plain, chosen = RowSet.of(offsets, rows), RowSet.of(offsets, rows, gaps=True)
    assert chosen.data.nbytes <= plain.data.nbytes
    assert (chosen.kind is RowSetKind.GAPS) == (chosen.data.nbytes < plain.data.nbytes)
    np.testing.assert_array_equal(chosen.offsets(), offsets)
    stored = chosen.data.tobytes()
    found = validate_row_set(chosen.kind, len(offsets), rows, stored, "test")
    np.testing.assert_array_equal(found.offsets(), offsets)
    if chosen.kind is RowSetKind.GAPS:
        for wrong in stored[:-1], stored + b"\0", bytes([stored[0] | 32]) + stored[1:]:
            with pytest.raises(PayloadError, match=r"gaps of|gaps are not"):
                validate_row_set(chosen.kind, len(offsets), rows, wrong, "test")
        with pytest.raises(PayloadError, match="test: the gaps are not"):
            validate_row_set(chosen.kind, len(offsets), int(offsets[-1]), stored, "test")


def test_bits_of_gaps() -> None:
    # Gaps 100, 0 and 37 with parameter 5: 1110 and 4, 0 and 0, 10 and 5.
    found = RowSet.of(np.array([100, 101, 139]), 1_000_000, gaps=True)
    bits = "1110" + "00100" + "0" + "00000" + "10" + "10100"
    assert found.data.tobytes() == bytes([5]) + int(bits[::-1], 2).to_bytes(3, "little")


def test_rows_at_random_take_few_bits() -> None:
    rows = np.flatnonzero(np.random.default_rng(5).random(1 << 20) < 0.05)
    assert RowSet.of(rows, 1 << 20, gaps=True).data.nbytes * 8 < 5.8 * len(rows)


@given(data=st.binary(max_size=60), count=st.integers(1, 500), rows=st.integers(1, (1 << 32) - 1))
@settings(deadline=None, max_examples=histories(500))
def test_any_bytes_are_gaps_or_are_refused(data: bytes, count: int, rows: int) -> None:
    try:
        found = validate_row_set(RowSetKind.GAPS, count, rows, data, "test").offsets()
    except PayloadError:
        return
    assert len(found) == count
    assert (np.diff(found) > 0).all()
    assert found[-1] < rows
