"""Placements: pieces of all ranks in, who holds what out, against a dictionary of cells."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import UnsupportedModelError
from cnr_store.ranks.placement import Band, Piece, Placement, Span
from tests.test_store.ranks.support.placements import cells, placed, replicated

Cells = dict[tuple[int, int], set[int]]


def of_bands(bands: tuple[Band, ...]) -> Cells:
    return {
        (row, column): set(span.ranks)
        for band in bands
        for span in band.spans
        for row in range(band.first_row, band.end_row)
        for column in range(span.first_column, span.first_column + span.columns)
    }


def boxes(placement: Placement) -> list[Piece]:
    """What each rank holds, in ascending order."""
    return sorted(
        Piece(band.first_row, band.rows, span.first_column, span.columns, rank)
        for band in placement.bands
        for span in band.spans
        for rank in span.ranks
    )


@pytest.mark.slow
@settings(deadline=None)
@given(placed(), st.randoms())
def test_each_cell_is_held_by_the_pieces_given(given_pieces: tuple[Any, list[Piece]], rnd: Any) -> None:
    shape, pieces = given_pieces
    rnd.shuffle(pieces)
    placement = Placement.of("t", shape, pieces)
    expected = cells(pieces)
    assert of_bands(placement.bands) == expected
    assert boxes(placement) == sorted(each for each in pieces if each.rows and each.columns)


@pytest.mark.slow
@settings(deadline=None)
@given(placed(), st.randoms())
def test_the_order_of_pieces_does_not_matter(given_pieces: tuple[Any, list[Piece]], rnd: Any) -> None:
    shape, pieces = given_pieces
    placement = Placement.of("t", shape, pieces)
    rnd.shuffle(pieces)
    assert Placement.of("t", shape, iter(pieces)) == placement
    assert Placement.from_json(json.loads(json.dumps(placement.to_json()))) == placement


@pytest.mark.slow
@settings(deadline=None)
@given(placed())
def test_what_is_said_of_rows(given_pieces: tuple[Any, list[Piece]]) -> None:
    shape, pieces = given_pieces
    placement = Placement.of("t", shape, pieces)
    held: defaultdict[int, set[int]] = defaultdict(set)
    for (row, _), ranks in cells(pieces).items():
        held[row] |= ranks
    for band in placement.bands:
        for row in range(band.first_row, band.end_row):
            assert held[row] == set(band.ranks)
            assert band.counting_rank in held[row]
            assert band.needs_or == (len(held[row]) > 1)
    assert placement.needs_or == any(len(ranks) > 1 for ranks in held.values())


@pytest.mark.slow
@settings(deadline=None)
@given(placed(), st.data())
def test_the_bands_of_some_rows(given_pieces: tuple[Any, list[Piece]], data: st.DataObject) -> None:
    shape, pieces = given_pieces
    placement = Placement.of("t", shape, pieces)
    first, end = (data.draw(st.integers(0, shape[0])) for _ in range(2))
    expected = [band for band in placement.bands if max(band.first_row, first) < min(band.end_row, end)]
    assert list(placement.overlapping(first, end)) == expected


@pytest.mark.slow
@settings(deadline=None)
@given(placed(), st.data())
def test_a_gap_is_refused(given_pieces: tuple[Any, list[Piece]], data: st.DataObject) -> None:
    shape, pieces = given_pieces
    box = data.draw(st.sampled_from([each[:4] for each in pieces if each.rows and each.columns]))
    left = [each for each in pieces if each[:4] != box]
    with pytest.raises(
        UnsupportedModelError, match=r"no rank holds rows \d+:\d+, columns \d+:\d+ of table 't'"
    ):
        Placement.of("t", shape, left)


@pytest.mark.slow
@settings(deadline=None)
@given(placed(), st.data())
def test_another_box_is_refused(given_pieces: tuple[Any, list[Piece]], data: st.DataObject) -> None:
    """Whatever it is, it overlaps, or is there already."""
    shape, pieces = given_pieces
    first_row, first_column = (data.draw(st.integers(0, size - 1)) for size in shape)
    rows = data.draw(st.integers(1, shape[0] - first_row))
    columns = data.draw(st.integers(1, shape[1] - first_column))
    more = Piece(first_row, rows, first_column, columns, data.draw(st.integers(0, 9)))
    if more[:4] in [each[:4] for each in pieces] and more not in pieces:
        assert more in boxes(Placement.of("t", shape, [*pieces, more]))
        return
    with pytest.raises(UnsupportedModelError, match=r"table 't'"):
        Placement.of("t", shape, [*pieces, more])


REFUSED = {
    "overlap in rows": (
        [Piece(0, 6, 0, 4, 0), Piece(5, 5, 0, 4, 3)],
        "overlap without being equal: rank 0 holds rows 0:6, columns 0:4, rank 3 rows 5:10, columns 0:4",
    ),
    "overlap in columns": (
        [Piece(0, 10, 0, 3, 0), Piece(0, 10, 2, 2, 3)],
        "overlap without being equal: rank 0 holds rows 0:10, columns 0:3, rank 3 rows 0:10, columns 2:4",
    ),
    "a box within another": (
        [Piece(0, 10, 0, 4, 0), Piece(0, 3, 0, 4, 1)],
        "overlap without being equal: rank 1 holds rows 0:3, columns 0:4, rank 0 rows 0:10, columns 0:4",
    ),
    "twice on a rank": (
        [Piece(0, 10, 0, 4, 2), Piece(0, 10, 0, 4, 2)],
        "rank 2 names rows 0:10, columns 0:4 of table 't' twice",
    ),
    "first rows": ([Piece(1, 9, 0, 4, 0)], "no rank holds rows 0:1, columns 0:4"),
    "last rows": ([Piece(0, 9, 0, 4, 0)], "no rank holds rows 9:10, columns 0:4"),
    "first columns": ([Piece(0, 10, 1, 3, 0)], "no rank holds rows 0:10, columns 0:1"),
    "last columns": ([Piece(0, 10, 0, 3, 0)], "no rank holds rows 0:10, columns 3:4"),
    "nothing": ([], "no rank holds rows 0:10, columns 0:4"),
    "rows cut differently": (
        [Piece(0, 10, 0, 2, 0), Piece(0, 5, 2, 2, 1), Piece(5, 5, 2, 2, 2)],
        "cut into other rows in some columns than in others: rank 1 holds rows 0:5, columns 2:4, rank 0 rows 0:10",
    ),
    "below": ([Piece(0, 11, 0, 4, 7)], "(10, 4), and rows 0:11, columns 0:4 of it on rank 7 are outside"),
    "beside": ([Piece(0, 10, 0, 5, 7)], "(10, 4), and rows 0:10, columns 0:5 of it on rank 7 are outside"),
    "negative": (
        [Piece(-1, 11, 0, 4, 7)],
        "(10, 4), and rows -1:10, columns 0:4 of it on rank 7 are outside",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_place(name: str) -> None:
    pieces, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=re.escape(message)) as caught:
        Placement.of("t", (10, 4), pieces)
    assert "table 't'" in str(caught.value)


def test_empty_shards_are_ignored() -> None:
    pieces = [Piece(0, 10, 0, 4, 0), Piece(10, 0, 0, 4, 1), Piece(0, 0, 0, 0, 2), Piece(0, 10, 4, 0, 3)]
    assert Placement.of("t", (10, 4), pieces) == Placement.of("t", (10, 4), pieces[:1])


def test_replicas() -> None:
    placement = replicated("t", (10, 4), range(3))
    assert placement.bands == (Band(0, 10, (Span(0, 4, (0, 1, 2)),)),)
    alone = replicated("t", (10, 4), [5])
    assert alone.bands == (Band(0, 10, (Span(0, 4, (5,)),)),)


def test_a_table_without_rows() -> None:
    placement = Placement.of("t", (0, 4), [Piece(0, 0, 0, 4, 0)])
    assert (placement.bands, placement.needs_or) == ((), False)
    assert Placement.from_json(placement.to_json()) == placement


DOC: dict[str, Any] = {
    "name": "t",
    "shape": [10, 4],
    "bands": [[6, [4, 0, 2]], [4, [3, 0, 1, 5, 6], [1, 1, 2]]],
}


def test_the_form_of_a_document() -> None:
    pieces = [Piece(0, 6, 0, 4, rank) for rank in (0, 1)] + [Piece(6, 4, 0, 3, rank) for rank in (0, 5)]
    placement = Placement.of("t", (10, 4), [*pieces, Piece(6, 4, 3, 1, 1)])
    assert placement.to_json() == DOC


def test_bands_cover_rows_in_order() -> None:
    pieces = [Piece(1000 * rank, 1000, 0, 8, rank) for rank in range(1024)]
    bands = Placement.of("t", (1024_000, 8), pieces[::-1]).bands
    assert all(one.end_row == other.first_row for one, other in pairwise(bands))
    assert [band.ranks for band in bands] == [(rank,) for rank in range(1024)]
