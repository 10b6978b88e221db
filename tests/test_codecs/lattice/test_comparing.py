"""A comparison says of each row what the codec of its grid would: the same codes, others, or none."""

from __future__ import annotations

from itertools import combinations, islice
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from cnr_codecs import FloatingRows, LatticeRows
from cnr_codecs.comparing import OTHER, SAME, UNKNOWN, code_dtype, compare_rows, row_digests, unknown_code
from cnr_codecs.elements import element_named
from cnr_codecs.payload.coded import Grid, has_floating_codes

GRIDS = [Grid(0.125), Grid(3 / 32), Grid(2.0**-90), *(Grid(mantissa=bits) for bits in (1, 3, 7, 23))]
Rows = npt.NDArray[Any]


def rows_of(random: np.random.Generator, count: int, dim: int, element: str) -> Rows:
    """Rows of all magnitudes, some with values that no grid has."""
    sizes = random.choice([0, 1e-42, 1e-30, 1e-3, 1, 30, 1e30], (count, 1))
    values = random.normal(0, 1, (count, dim)) * sizes
    odd = random.choice([np.nan, np.inf, -np.inf, -0.0, 1e-42, -1e-42, 3e38, 0.0625, -0.0625], (count, dim))
    values = np.where(random.random((count, dim)) < 0.05, odd, values)
    with np.errstate(over="ignore", invalid="ignore"):
        if element == "bfloat16":
            wide = values.astype(np.float32)
            return (wide.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return values.astype(element)


def codes_of(values: Rows, grid: Grid, element: str) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """The codes that the codec gives, and which rows have any."""
    codec = FloatingRows(grid.mantissa) if grid.mantissa else LatticeRows(step=grid.step)
    none = np.zeros(values.shape, np.int16), np.zeros(len(values), np.bool_)
    _, codes, coded, _ = codec.encode_over(values, None, len(values), *none, element=element)
    return codes, coded


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    dim=st.integers(1, 40),
    grid=st.sampled_from(GRIDS),
    element=st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
)
def test_rows_compare_as_their_codes_do(seed: int, dim: int, grid: Grid, element: str) -> None:
    if element == "float64" and not grid.mantissa:
        return  # which has no lattice
    if grid.is_exact and element != "float32":
        return  # of which none are kept
    assert has_floating_codes(element_named(element))
    random = np.random.default_rng(seed)
    older, newer = (rows_of(random, 60, dim, element) for _ in range(2))
    kept = random.random(60) < 0.5
    newer[kept] = older[kept]
    near = random.random(newer.shape) < 0.02  # moved by less than a step, or by a bit
    with np.errstate(all="ignore"):
        newer = np.where(near, newer * newer.dtype.type(1.01), newer)
    if element == "bfloat16":
        newer = (newer.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    (before, known), (after, coded) = codes_of(older, grid, element), codes_of(newer, grid, element)
    dtype = code_dtype(grid)
    known &= (np.abs(before.astype(np.int64)) <= np.iinfo(dtype).max).all(axis=1)
    parent = before.astype(dtype)
    parent[~known, 0] = unknown_code(dtype)
    expected = np.where(coded & (after == before).all(axis=1), SAME, OTHER)
    expected[~known] = UNKNOWN
    found = compare_rows(np.ascontiguousarray(newer), parent, grid, element)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 8, 17, 32])
def test_digests_tell_rows_apart(dim: int) -> None:
    random = np.random.default_rng(dim)
    row = random.normal(size=dim).astype(np.float32)
    rows = [
        row,
        *(np.roll(row, by) for by in range(1, dim)),
        *random.integers(0, 2, (500, dim)).astype(np.float32),
    ]
    for count in (1, 2, 3, 4):  # signs flipped together
        for columns in islice(combinations(range(dim), count), 3000):
            flipped = row.copy()
            flipped[list(columns)] *= -1
            rows.append(flipped)
    for columns in combinations(range(dim), 2):  # values swapped
        swapped = row.copy()
        swapped[list(columns)] = swapped[list(columns[::-1])]
        rows.append(swapped)
    for column, bit in np.ndindex(dim, 32):
        changed = row.copy()
        changed.view(np.uint32)[column] ^= np.uint32(1 << bit)
        rows.append(changed)
    alone = np.unique(np.stack(rows).view(np.uint32), axis=0).view(np.float32)
    for key in (0, 1, 2**63 + 5, 2**64 - 1):
        assert len(np.unique(row_digests(alone, key))) == len(alone)


@pytest.mark.slow
def test_digests_of_any_type_are_of_the_bits() -> None:
    rows = np.array([[0.0, 1.0, 2.0], [-0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    for dtype in (np.float64, np.float32, np.float16):
        first, negative, again = row_digests(rows.astype(dtype), 7).tolist()
        assert first == again != negative
    assert len(set(row_digests(np.arange(256, dtype=np.uint8).reshape(256, 1), 7).tolist())) == 256
    assert row_digests(np.empty((0, 4), np.float32), 7).shape == (0,)
    many = np.zeros((1_000_000, 2), np.uint32)
    many[:, 0] = np.arange(len(many))
    assert len(np.unique(row_digests(many, 7))) == len(many)
