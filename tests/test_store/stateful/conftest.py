"""Cuts that make small tables behave as large ones do."""

from __future__ import annotations

import pytest

from cnr_store.chains import array_reader
from cnr_store.format import grid
from cnr_store.maintenance.folding import folded_array
from cnr_store.reading import changed_rows

GRID_LIMITS_BYTES = {
    "TARGET_CHUNK_BYTES": 256,
    "MAX_CHUNK_BYTES": 1024,
    "TARGET_SHARD_BYTES": 1024,
    "MAX_SHARD_BYTES": 4096,
}


@pytest.fixture(params=["one chunk", "many chunks"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small tables into shards of chunks, into regions to read or to fold, and into blocks to take."""
    if request.param == "one chunk":
        return
    for name, nbytes in GRID_LIMITS_BYTES.items():
        monkeypatch.setattr(grid, name, nbytes)
    monkeypatch.setattr(array_reader, "REGION_BYTES", 2048)
    monkeypatch.setattr(folded_array, "REGION_BYTES", 2048)
    monkeypatch.setattr(changed_rows, "BLOCK_BYTES", 500)
