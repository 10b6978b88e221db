"""Packed lines: the bytes of their readable twin, blocks, damaged and hostile frames; row sets that are packed."""

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import zstd

from cnr_codecs import PayloadError, RowSet, RowSetKind
from cnr_codecs.payload.packed import BLOCK_CODES, PackedLines
from cnr_codecs.payload.rowset import validate_row_set
from cnr_codecs.protocol import Rows
from tests.nightly import histories
from tests.test_codecs.references import packed as reference

LINES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 17, 32, 64])
MOST = 1 << 31


def decoded(coded: PackedLines, size: int) -> Rows:
    codes = np.empty((len(coded.order), coded.line), np.int32)
    for number, (_, begin, end) in enumerate(coded.blocks):
        codes[coded.order[begin:end]] = coded.decode_block(number, MOST).reshape(-1, coded.line)
    return codes.reshape(-1)[:size]


def parsed(data: bytes, size: int, line: int) -> PackedLines:
    return PackedLines.parse(data, -(-size // line), line, "test")


@st.composite
def codes(draw: st.DrawFn, most: int = 400) -> Rows:
    """Integers of several scales, large ones and zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    scales = draw(
        st.lists(st.sampled_from([0, 0.05, 0.4, 3, 20, 500, 20000, 1e7, 2e9]), min_size=1, max_size=5)
    )
    size = draw(st.integers(1, most))
    drawn = np.rint(rng.normal(0, 1, size) * np.repeat(scales, -(-size // len(scales)))[:size])
    found: Rows = np.clip(drawn, -MOST, MOST - 1).astype(np.int32)
    return found


@given(values=codes(), line=LINES)
@settings(max_examples=histories(200))
def test_lines_are_packed_and_unpacked_as_the_reference_does(values: Rows, line: int) -> None:
    data = PackedLines.encode(values, line).data
    assert data == reference.encode(values.tolist(), line)
    assert reference.decode(data, len(values), line) == values.tolist()
    np.testing.assert_array_equal(decoded(parsed(data, len(values), line), len(values)), values)
    assert parsed(data, len(values), line).data == data


@pytest.mark.parametrize("most", [1, 2, 7, 8, 127, 128, 32767, 32768, (1 << 23) - 1, 1 << 23, MOST - 1])
@pytest.mark.parametrize("line", [1, 2, 3, 4, 5, 6, 7, 33])
def test_limits_of_each_width(most: int, line: int) -> None:
    lines = [[0] * line, [most] * line, [-most] * line, [-most - 1] * line, [*[0] * (line - 1), -most]]
    values = np.array(lines, np.int64).reshape(-1).astype(np.int32)
    data = PackedLines.encode(values, line).data
    assert data == reference.encode(values.tolist(), line)
    np.testing.assert_array_equal(decoded(parsed(data, len(values), line), len(values)), values)


@pytest.mark.slow
@pytest.mark.parametrize("line", [1, 3, 32])
def test_blocks_are_decoded_one_by_one(line: int) -> None:
    values = np.random.default_rng(1).integers(-40, 40, 2 * BLOCK_CODES[3] + 5).astype(np.int32)
    values[:4000] = 0
    data = PackedLines.encode(values, line).data
    if line < 32:
        assert data == reference.encode(values.tolist(), line)
    coded = parsed(data, len(values), line)
    assert sorted(coded.order.tolist()) == [*range(len(coded.order))]
    table = np.concatenate([values, np.zeros(-len(values) % line, np.int32)]).reshape(-1, line)
    for number in reversed(range(len(coded.blocks))):
        _, begin, end = coded.blocks[number]
        assert (end - begin) * line <= BLOCK_CODES[3]
        np.testing.assert_array_equal(
            coded.decode_block(number, 40).reshape(-1, line), table[coded.order[begin:end]]
        )


def test_codes_beyond_the_most_are_refused() -> None:
    values = np.array([1000, -1000, 0, 3], np.int32)
    coded = PackedLines.encode(values, 4)
    np.testing.assert_array_equal(coded.decode_block(0, 1000), values)
    with pytest.raises(PayloadError, match="block 0 of 1: a code is beyond 999"):
        coded.decode_block(0, 999)


def test_classes_follow_width_and_mean_magnitude() -> None:
    for mean, expected in ((0, 0), (1 / 16, 16), (1 / 8, 33), (1 / 4, 34), (1, 52), (4, 54), (900, 77)):
        line = [round(mean * 16)] + [0] * 15
        assert reference.class_of(line) == expected
        assert PackedLines.encode(np.array(line, np.int32), 16).blocks[0][0] == expected // 16


SOUND = PackedLines.encode(np.random.default_rng(3).integers(-50, 50, 900).astype(np.int32), 9).data
(CLASSES,) = struct.unpack_from("<I", SOUND)
BLOCK = SOUND[8 + CLASSES :]


def frame(data: bytes) -> bytes:
    found: bytes = zstd.compress(data, 1)
    return found


def framed(classes: bytes, *blocks: bytes) -> bytes:
    sizes = struct.pack(f"<{len(blocks)}I", *map(len, blocks))
    return struct.pack("<I", len(classes)) + classes + sizes + b"".join(blocks)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "sizes of 1 frames are cut off"),
        (SOUND[:3], "sizes of 1 frames are cut off"),
        (SOUND[: 4 + CLASSES], "sizes of 1 frames are cut off"),
        (SOUND[:20], "the classes of 100 lines: a zstd frame"),
        (SOUND[:-2], "its blocks are said"),
        (SOUND + bytes(2), "its blocks are said"),
        (framed(frame(bytes([7 << 4] * 100))), "none that a line may have"),
        (framed(frame(bytes([52] * 99)), BLOCK), "not one of 100 bytes"),
        (framed(frame(bytes([52] * 101)), BLOCK), "not one of 100 bytes"),
        (framed(frame(bytes(100)), BLOCK), "its blocks are said"),
    ],
)
def test_malformed_lines_are_refused(data: bytes, message: str) -> None:
    parsed(SOUND, 900, 9)
    with pytest.raises(PayloadError, match=message):
        parsed(data, 900, 9)


def claiming(size: int) -> bytes:
    """A frame of one block of that says it holds so many bytes."""
    return struct.pack("<IBQ", 0xFD2FB528, 0b11100000, size) + b"\x01\x00\x00"


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"\x28",
        BLOCK[:-1],
        BLOCK[: len(BLOCK) // 2],
        BLOCK + BLOCK,
        frame(bytes(899)),
        frame(bytes(901)),
        frame(bytes(450)) + frame(bytes(450)),
        claiming(1 << 40),
        claiming((1 << 64) - 1),
        claiming(900),
        BLOCK[:4] + bytes([BLOCK[4] | 1]) + BLOCK[5:],  # a dictionary
        BLOCK[:4] + bytes([BLOCK[4] | 8]) + BLOCK[5:],  # the reserved bit
        struct.pack("<II", 0x184D2A50, 4) + bytes(4) + BLOCK,  # a skippable frame in front
    ],
)
def test_other_frames_are_refused(block: bytes) -> None:
    coded = parsed(framed(SOUND[4 : 4 + CLASSES], block), 900, 9)
    with pytest.raises(PayloadError, match=r"block 0 of 1: a zstd frame of \d+ bytes is"):
        coded.decode_block(0, MOST)


@pytest.mark.parametrize(("width", "bad"), [(1, 81), (1, 255), (2, 225), (2, 255)])
def test_bytes_that_stand_for_no_integers_are_refused(width: int, bad: int) -> None:
    size = 4 if width == 1 else 8
    for place in range(size):
        data = bytearray(size)
        data[place] = bad
        coded = PackedLines.parse(framed(frame(bytes([width << 4])), frame(bytes(data))), 1, 16, "test")
        with pytest.raises(PayloadError, match="stands for no integers"):
            coded.decode_block(0, MOST)


def test_damaged_blocks_are_refused_or_decode_to_as_many_codes() -> None:
    rng, refused = np.random.default_rng(4), 0
    for _ in range(3000):
        data = bytearray(SOUND)
        data[int(rng.integers(8 + CLASSES, len(data)))] ^= int(rng.integers(1, 256))
        coded = parsed(bytes(data), 900, 9)
        refused += 1
        with suppress(PayloadError):
            assert len(coded.decode_block(0, MOST)) == 900
            refused -= 1
    assert (
        refused > 50
    )  # most damage to a frame without a checksum is other codes, which the segment's checksum finds


@pytest.mark.slow
@given(data=st.data(), rows=st.one_of(st.integers(1, 80), st.integers(65530, 65545), st.just(3_000_000)))
@settings(max_examples=histories(150))
def test_row_sets_are_packed_where_that_takes_fewer_bytes(data: st.DataObject, rows: int) -> None:
    share = data.draw(st.sampled_from([0.001, 0.01, 0.1, 0.3, 1]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    offsets = np.unique(rng.integers(0, rows, max(1, int(min(rows, 200_000) * share))))
    flags = np.zeros(rows, np.bool_)
    flags[offsets] = True
    chosen, marked = RowSet.of(offsets, rows), RowSet.marked(flags)
    assert (chosen.kind, chosen.data.tobytes()) == (marked.kind, marked.data.tobytes())
    gaps = np.diff(offsets, prepend=-1) - 1
    packed = frame(b"".join(b"\xff" * (gap // 255) + bytes([gap % 255]) for gap in gaps.tolist()))
    least = min((rows + 7) // 8, 4 * len(offsets), 2 * len(offsets) if rows <= 1 << 16 else 1 << 62)
    is_prefix = offsets[-1] == len(offsets) - 1
    assert (chosen.kind is RowSetKind.GAPS) == (len(packed) < least and not is_prefix)
    np.testing.assert_array_equal(chosen.offsets(), offsets)
    stored = chosen.data.tobytes()
    found = validate_row_set(chosen.kind, len(offsets), rows, stored, "test")
    np.testing.assert_array_equal(found.offsets(), offsets)
    if chosen.kind is RowSetKind.GAPS:
        for wrong in stored[:-1], stored + b"\0", b"":
            with pytest.raises(PayloadError, match="test: a zstd frame"):
                validate_row_set(chosen.kind, len(offsets), rows, wrong, "test")
        with pytest.raises(PayloadError, match="test: the gaps are not those of"):
            validate_row_set(chosen.kind, len(offsets) + 1, rows, stored, "test")


def test_rows_at_random_take_few_bits() -> None:
    rows = np.flatnonzero(np.random.default_rng(5).random(1 << 20) < 0.05)
    assert RowSet.of(rows, 1 << 20).data.nbytes * 8 < 6 * len(rows)


@given(data=st.binary(max_size=60), count=st.integers(1, 500), rows=st.integers(1, 1 << 20))
@settings(max_examples=histories(500))
def test_any_bytes_are_a_row_set_or_are_refused(data: bytes, count: int, rows: int) -> None:
    with suppress(PayloadError):
        found = validate_row_set(RowSetKind.GAPS, count, rows, data, "test").offsets()
        assert len(found) == count
        assert (np.diff(found) > 0).all()
        assert found[-1] < rows
