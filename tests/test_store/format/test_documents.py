"""Zarr documents that zarr makes once for all arrays that look alike."""

from __future__ import annotations

import pytest

from cnr_store.format import arrays
from cnr_store.format.grid import choose_grid


@pytest.mark.parametrize("element", ["float32", "bfloat16", "int32"])
def test_the_document_of_arrays_that_look_alike_is_made_once(element: str) -> None:
    grid = choose_grid(1000, 16, 4, 64, None)
    first = arrays.rows_document((1000, 16), element, grid, [])
    made = arrays._created.cache_info().misses
    assert arrays.rows_document((1000, 16), element, grid, []) == first
    assert arrays._created.cache_info().misses == made
