"""How arrays are cut: limits hold whatever rows are dirty, and grids nest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.format import grid as g


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, int, float, np.ndarray | None]:
    rows = draw(st.integers(1, 200_000))
    columns = draw(st.sampled_from([1, 3, 16, 64, 128, 1000]))
    bytes_per_row = draw(st.sampled_from([0.25, 1.0, 4.5])) * columns + 4
    share = draw(st.sampled_from([None, 0.0, 0.001, 0.05, 0.5, 1.0]))
    if share is None:
        return rows, columns, bytes_per_row, None
    seed = draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    crowded = rng.beta(0.3, 3.0, max(1, int(share * rows)))  # hot rows stand together, as ids by frequency do
    return rows, columns, bytes_per_row, np.unique((crowded * rows).astype(np.int64).clip(0, rows - 1))


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(writes())
def test_limits_hold(write: tuple[int, int, float, np.ndarray | None]) -> None:
    rows, columns, bytes_per_row, ids = write
    grid = g.choose_grid(rows, columns, 4, bytes_per_row, None if ids is None else g.count_blocks(ids, rows))
    for size in (grid.chunk_rows, grid.shard_rows):
        assert size & (size - 1) == 0
    assert grid.shard_rows % grid.chunk_rows == 0
    assert 1 <= grid.chunks_per_shard <= g.MAX_CHUNKS_PER_SHARD
    assert grid.chunk_rows == 1 or grid.chunk_rows * columns * 4 <= g.MAX_CHUNK_DECODED_BYTES
    written = np.arange(rows) if ids is None else ids
    for size, limit in ((grid.chunk_rows, g.MAX_CHUNK_BYTES), (grid.shard_rows, g.MAX_SHARD_BYTES)):
        fullest = np.bincount(written // size).max() if len(written) else 0
        assert size == 1 or fullest * bytes_per_row <= limit


@given(st.integers(1, 5000), st.integers(1, 70), st.integers(0, 6), st.integers(0, 4), st.integers(1, 4))
def test_every_chunk_has_one_place(
    rows: int, columns: int, chunk_log: int, more_log: int, split: int
) -> None:
    chunk_columns = -(-columns // split)
    grid = g.Grid(
        rows, columns, 1 << chunk_log, chunk_columns, 1 << (chunk_log + more_log), chunk_columns * 2
    )
    places = [
        grid.locate(row, column)
        for row in range(-(-rows // grid.chunk_rows))
        for column in range(grid.column_chunks)
    ]
    assert len(set(places)) == len(places)
    shards = grid.shard_grid[0] * grid.shard_grid[1]
    assert all(0 <= shard < shards and 0 <= slot < grid.chunks_per_shard for shard, slot in places)


def test_sparse_deltas_take_wider_chunks_than_baselines() -> None:
    rows = 1 << 22
    dirty = np.arange(0, rows, 100)
    baseline = g.choose_grid(rows, 64, 4, 36, None)
    delta = g.choose_grid(rows, 64, 4, 36, g.count_blocks(dirty, rows))
    assert delta.chunk_rows > baseline.chunk_rows
    assert 64 << 10 <= 36 * len(dirty) / rows * delta.chunk_rows <= 1 << 20
