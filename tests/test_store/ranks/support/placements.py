"""Tables that are cut anyhow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import strategies as st

from cnr_store.ranks.placement import Piece, Placement

RANKS = 6


def cuts(size: int) -> st.SearchStrategy[list[int]]:
    """Edges of boxes along one axis."""
    return st.sets(st.integers(0, size), max_size=5).map(lambda inner: sorted(inner | {0, size}))


@st.composite
def placed(draw: st.DrawFn, max_rows: int = 12, max_columns: int = 5) -> tuple[tuple[int, int], list[Piece]]:
    """The shape of a table and the pieces of its ranks, in any order, empty ones among them."""
    shape = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    pieces = [
        Piece(top, below - top, left, right - left, rank)
        for top, below in pairwise(draw(cuts(shape[0])))
        for left, right in pairwise(draw(cuts(shape[1])))
        for rank in draw(st.sets(st.integers(0, RANKS - 1), min_size=1, max_size=3))
    ]
    empty = [
        Piece(top, 0, 0, shape[1], rank)
        for top, rank in draw(st.sets(st.tuples(st.integers(0, shape[0]), st.integers(0, 9)), max_size=2))
    ]
    return shape, draw(st.permutations([*pieces, *empty]))


def cells(pieces: list[Piece]) -> dict[tuple[int, int], set[int]]:
    """The ranks that hold each value: (row, column)."""
    held: dict[tuple[int, int], set[int]] = {}
    for first_row, rows, first_column, columns, rank in pieces:
        for row in range(first_row, first_row + rows):
            for column in range(first_column, first_column + columns):
                held.setdefault((row, column), set()).add(rank)
    return held


def replicated(name: str, shape: tuple[int, int], ranks: Iterable[int]) -> Placement:
    """A table that each of `ranks` holds whole."""
    return Placement.of(name, shape, [Piece(0, shape[0], 0, shape[1], rank) for rank in ranks])
