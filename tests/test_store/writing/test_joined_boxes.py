"""A dense array of any number of dimensions comes together from the boxes that ranks hold of it."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import SaveError
from cnr_store.ranks.protocol import Team
from cnr_store.writing.exchange import joined
from cnr_store.writing.plan import DensePiece, DenseWrite

DTYPES = ["float32", "uint16", "bool", "complex64"]


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[DensePiece]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, shape).astype(dtype)
    edges = [sorted({0, size, *draw(st.sets(st.integers(1, size), max_size=2))}) for size in shape]
    boxes = [tuple(slice(*ends) for ends in box) for box in product(*map(pairwise, edges))]
    pieces = [DensePiece(tuple(each.start for each in box), np.array(values[box])) for box in boxes]
    return values, draw(st.permutations(pieces))


def write_of(values: np.ndarray[Any, Any], pieces: list[DensePiece]) -> DenseWrite:
    return DenseWrite("model/w", np.broadcast_to(np.zeros((), values.dtype), values.shape), pieces=(*pieces,))


@settings(deadline=None, max_examples=60)
@given(cut_arrays())
def test_boxes_come_together(cut: tuple[np.ndarray[Any, Any], list[DensePiece]]) -> None:
    values, pieces = cut
    (found,) = joined([write_of(values, [*pieces, pieces[0]])], Team.alone())  # one of them on two ranks
    assert found.pieces is None
    np.testing.assert_array_equal(found.values, values)


def test_a_box_that_no_rank_has_is_missed() -> None:
    values = np.ones((2, 3), np.float32)
    with pytest.raises(SaveError, match="have 3 of its 6 elements"):
        joined([write_of(values, [DensePiece((0,), values[:1])])], Team.alone())
