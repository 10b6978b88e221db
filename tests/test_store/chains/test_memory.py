"""Memory follows the chunks in flight, not the table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.storage_bench.memory import peak_bytes
from benchmarks.storage_bench.peak import SNAPSHOT_BYTES
from cnr_store.format.grid import MAX_CHUNK_DECODED_BYTES
from cnr_store.writing.stage import PUT_BYTES_IN_FLIGHT
from tests.nightly import NIGHT
from tests.test_store.support.places import quick_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc"),
]

ROWS, DIM = 2_500_000 if NIGHT else 500_000, 64
MAX_LOAD_BYTES = 32 << 20
"""However many rows there are: a twentieth of the table at night, a quarter by day."""


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    """A store of one table; it takes 90 MB there."""
    with quick_folder() as name:
        folder = Path(name)
        rise = peak_bytes("save", folder, ROWS, DIM)
        # Its rows have no room in the snapshot, so they are taken from the model; its shards may all be under way.
        assert rise < SNAPSHOT_BYTES + PUT_BYTES_IN_FLIGHT
        yield folder


def test_memory_of_a_load(store: Path) -> None:
    assert peak_bytes("load", store, ROWS, DIM) < MAX_LOAD_BYTES


@pytest.mark.nightly
def test_memory_of_verifying_and_folding_a_delta(store: Path) -> None:
    """A chunk of a sparse delta spans many rows: each worker may hold one as it is when decoded."""
    assert peak_bytes("verify", store, ROWS, DIM) < 2 * MAX_LOAD_BYTES
    assert peak_bytes("save_delta", store, ROWS, DIM) < 2 * MAX_LOAD_BYTES
    assert peak_bytes("verify", store, ROWS, DIM) < 4 * MAX_CHUNK_DECODED_BYTES
    assert peak_bytes("compact", store, ROWS, DIM) < 2 * MAX_CHUNK_DECODED_BYTES
