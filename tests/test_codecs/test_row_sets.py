"""Row sets: parts of them, of every kind."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import zstd

from cnr_codecs.payload.rowset import BLOCK_ROWS, RowSet, RowSetKind, validate_row_set


def _gaps(offsets: np.ndarray) -> bytes:
    """The bytes of gaps: 255 as often as a gap has it, then the rest."""
    gaps = np.diff(offsets, prepend=-1) - 1
    return b"".join(b"\xff" * (gap // 255) + bytes([gap % 255]) for gap in gaps.tolist())


def _sets(offsets: np.ndarray, rows: int) -> list[RowSet]:
    """The set as every kind that can store it."""
    bits = np.zeros(rows, np.uint8)
    bits[offsets] = 1
    found = [
        RowSet(RowSetKind.BITMAP, len(offsets), rows, np.packbits(bits, bitorder="little")),
        RowSet(RowSetKind.OFFSETS32, len(offsets), rows, offsets.astype("<u4")),
        RowSet(
            RowSetKind.GAPS, len(offsets), rows, np.frombuffer(zstd.compress(_gaps(offsets), 1), np.uint8)
        ),
    ]
    if rows <= 1 << 16:
        found.append(RowSet(RowSetKind.OFFSETS16, len(offsets), rows, offsets.astype("<u2")))
    if offsets[-1] == len(offsets) - 1:
        found.append(RowSet.first(len(offsets), rows))
    return found


def _check(row_set: RowSet, first: int, stop: int) -> None:
    """The rows come in order, each with its number in the set, and all of those asked for."""
    offsets = row_set.offsets()
    parts = list(row_set.within(first, stop))
    for start, rows in parts:
        assert rows.dtype == np.uint32
        assert len(rows) <= BLOCK_ROWS
        np.testing.assert_array_equal(rows, offsets[start : start + len(rows)])
    found = np.concatenate([np.empty(0, np.uint32), *(rows for _, rows in parts)])
    inside = (found >= max(first, 0)) & (found < stop)
    np.testing.assert_array_equal(found[inside], offsets[(offsets >= first) & (offsets < stop)])
    if row_set.kind in (RowSetKind.BITMAP, RowSetKind.OFFSETS16, RowSetKind.OFFSETS32, RowSetKind.GAPS):
        assert len(found) - inside.sum() <= 14


@given(st.data())
def test_rows_within_a_range_are_found(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 300))
    held = data.draw(st.sets(st.integers(0, rows - 1), min_size=1))
    first, stop = (data.draw(st.integers(-20, rows + 20)) for _ in range(2))
    for row_set in _sets(np.array(sorted(held)), rows):
        _check(row_set, first, stop)


@pytest.mark.parametrize("rows", [1 << 16, (1 << 16) + 1, 3 * BLOCK_ROWS])
def test_parts_of_large_sets_come_in_blocks(rows: int) -> None:
    offsets = np.flatnonzero(np.random.default_rng(0).random(rows) < 0.7)
    for row_set in _sets(offsets, rows):
        for first, stop in (
            (0, rows),
            (5, rows - 5),
            (rows - 9, rows),
            (rows // 2, rows // 2 + 1000),
            (7, 7),
        ):
            _check(row_set, first, stop)


@pytest.mark.parametrize(("first", "stop", "expected"), [(0, 100_000, [3, 60_000]), (4, 65_600, [60_000])])
def test_offsets_of_16_bits_in_chunks_of_more_rows(first: int, stop: int, expected: list[int]) -> None:
    offsets = np.array([3, 60_000], "<u2")
    row_set = RowSet(RowSetKind.OFFSETS16, 2, 100_000, offsets)
    assert [row for _, rows in row_set.within(first, stop) for row in rows.tolist()] == expected
    assert sum(len(rows) for _, rows in row_set.within(70_000, 80_000)) <= 1


def test_gaps_take_little_more_memory_than_the_rows_that_they_are_kept_as() -> None:
    rows = 1 << 22
    flags = np.random.default_rng(1).random(rows) < 0.3
    held = int(flags.sum())
    tracemalloc.start()
    try:
        row_set = RowSet.marked(flags)
        assert row_set.kind is RowSetKind.GAPS
        assert tracemalloc.get_traced_memory()[1] < 2 * rows
        data = row_set.data.tobytes()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        found = validate_row_set(RowSetKind.GAPS, held, rows, data, "test")
        assert tracemalloc.get_traced_memory()[1] - before < 7 * held + (4 << 20)
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found.offsets(), np.flatnonzero(flags))
