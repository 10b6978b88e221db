"""What reading a few rows asks of the storage: counted, and the same for tables of any size."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

import cnr_store
from benchmarks.reading_bench.counting import CountingBackend
from benchmarks.reading_bench.huge import PATH, Huge
from cnr_backends import open_backend
from cnr_codecs import Payload, UniformRows, parse
from cnr_store import CorruptionError
from cnr_store.chains.bounded_cache import PayloadCache

DELTAS = 10
SIZES = {"a million rows": 1_000_000, "a thousand million rows": 1_000_000_000}


@pytest.fixture(scope="module")
def tables() -> dict[str, tuple[Huge, CountingBackend]]:
    """A baseline and ten deltas of the same rows, of a table of either size."""
    found = {}
    for name, rows in SIZES.items():
        table, backend = Huge.of(rows), CountingBackend(open_backend(MemoryStore()))
        table.write(backend, DELTAS)
        found[name] = table, backend
    return found


@pytest.fixture(params=SIZES)
def huge(
    request: pytest.FixtureRequest, tables: dict[str, tuple[Huge, CountingBackend]]
) -> tuple[Huge, CountingBackend]:
    table, backend = tables[request.param]
    backend.reset()
    return table, backend


def _open(backend: CountingBackend) -> zarr.Array[Any]:
    array = cnr_store.open(backend)[PATH]
    assert isinstance(array, zarr.Array)
    return array


@pytest.mark.slow
def test_ten_rows_take_one_chunk_of_each_link_and_one_index_of_each_shard(
    huge: tuple[Huge, CountingBackend],
) -> None:
    table, backend = huge
    array = _open(backend)
    backend.reset()
    chunks, shards = table.sample // table.grid().chunk_rows, table.sample // table.grid().shard_rows
    row = table.sample[0]
    np.testing.assert_allclose(np.asarray(array[row]), table.values(np.array([row]), DELTAS)[0], atol=0.1)
    assert Counter(operation for operation, _ in backend.log) == {
        "get_range": 1 + DELTAS,
        "get_suffix": 1 + DELTAS,
    }
    assert len({key for operation, key in backend.log if operation == "get_range"}) == 1 + DELTAS
    backend.reset()
    found = np.asarray(array.get_orthogonal_selection((table.sample, slice(None))))
    np.testing.assert_allclose(found, table.values(table.sample, DELTAS), atol=0.1)
    counts = Counter(operation for operation, _ in backend.log)
    assert counts["get_range"] <= len(set(chunks.tolist())) * (1 + DELTAS)
    # The deltas lie in one shard each, whose index is known by now.
    assert counts["get_suffix"] == len(set(shards.tolist())) - 1
    assert counts.keys() <= {"get_range", "get_suffix"}


@pytest.mark.slow
def test_deltas_that_were_read_are_not_fetched_for_the_rows_beside(
    huge: tuple[Huge, CountingBackend],
) -> None:
    table, backend = huge
    array = _open(backend)
    first = table.sample[0] // table.grid().chunk_rows * table.grid().chunk_rows
    array[first]
    backend.reset()
    array[first : first + 10]
    assert Counter(operation for operation, _ in backend.log) == {"get_range": 1}


def test_rows_far_apart_share_the_chunk_of_a_delta_that_spans_them() -> None:
    table, backend = Huge.of(100_000), CountingBackend(open_backend(MemoryStore()))
    table.write(backend, DELTAS)
    array = _open(backend)
    backend.reset()
    found = np.asarray(array.get_orthogonal_selection((table.sample, slice(None))))
    np.testing.assert_allclose(found, table.values(table.sample, DELTAS), atol=0.1)
    fetched = Counter(key for operation, key in backend.log if operation == "get_range")
    assert sorted(fetched.values())[:DELTAS] == [1] * DELTAS


def test_neighbours_that_are_asked_for_together_are_fetched_together() -> None:
    backend = CountingBackend(open_backend(MemoryStore()))
    table = Huge(80_000, 64, np.arange(0, 80_000, 200))
    table.write(backend, 2)  # all of its chunks are complete
    backend.reset()
    array = _open(backend)
    opened = len(backend.log)
    np.testing.assert_allclose(np.asarray(array[table.sample]), table.values(table.sample, 2), atol=0.1)
    chunks = -(-table.rows // array.chunks[0])
    assert chunks >= 8
    fetched = Counter(operation for operation, _ in backend.log[opened:])
    assert fetched["get_range"] < 3 * chunks / 2


def test_a_chunk_that_can_not_be_read_fails_alone(tmp_path: Path) -> None:
    table = Huge(40_000, 64, np.arange(0, 40_000, 100))
    backend = open_backend(tmp_path)
    table.write(backend, 0)
    (shard,) = tmp_path.glob(f"versions/*/{PATH}/c/0/0")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    overlay = cnr_store.view(tmp_path)
    keys = [key for key in overlay.keys_below(PATH) if "/c/" in key]

    async def read_all() -> list[Buffer | BaseException | None]:
        reads = (overlay.get(key, default_buffer_prototype()) for key in keys)
        return await asyncio.gather(*reads, return_exceptions=True)

    failed = [found for found in sync(read_all()) if not isinstance(found, Buffer)]
    assert len(failed) == 1
    assert isinstance(failed[0], CorruptionError)


def test_opening_and_reading_asks_the_same_of_tables_of_any_size(
    tables: dict[str, tuple[Huge, CountingBackend]],
) -> None:
    asked, nbytes = [], []
    for table, backend in tables.values():
        backend.reset()
        array = _open(backend)
        asked.append(Counter(operation for operation, _ in backend.log))
        nbytes.append(backend.nbytes)
        array[table.sample[-1]]
        asked.append(Counter(operation for operation, _ in backend.log))
    assert asked[:2] == asked[2:]
    # Only the list of the shards grows: some ten bytes each.
    assert nbytes[1] - nbytes[0] < 16 * SIZES["a thousand million rows"] / table.grid().shard_rows


def test_reading_rows_takes_no_memory_of_the_size_of_the_table(huge: tuple[Huge, CountingBackend]) -> None:
    table, backend = huge
    _open(backend)[table.sample]  # whatever is made once
    tracemalloc.start()
    try:
        array = _open(backend)
        array[table.sample[0]]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20


def test_a_range_of_one_row_composes_that_row_alone(huge: tuple[Huge, CountingBackend]) -> None:
    table, backend = huge
    overlay = cnr_store.view(backend)
    rows = zarr.open_array(overlay, path=PATH, mode="r").chunks[0]
    index, inside = divmod(int(table.sample[0]), rows)
    row_bytes = table.dim * 4
    part = RangeByteRequest(inside * row_bytes, (inside + 1) * row_bytes)
    key = f"{PATH}/c/{index}/0"

    def peak(byte_range: RangeByteRequest | None) -> tuple[bytes, int]:
        tracemalloc.start()
        try:
            found = sync(overlay.get(key, default_buffer_prototype(), byte_range))
            assert found is not None
            return found.to_bytes(), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    whole, most_bytes = peak(None)
    row, bytes_of_row = peak(part)
    assert row == whole[part.start : part.end]
    assert most_bytes > len(whole) > bytes_of_row


def test_what_is_kept_stays_within_its_bytes() -> None:
    def payload(rows: int) -> Payload:
        return parse(
            UniformRows("asymmetric", 8).encode_rows(
                np.ones((rows, 64), np.float32), None, rows, element="float32"
            )
        )

    kept = PayloadCache(50_000)
    for place in range(10):
        kept.put(("key", place), payload(100))
        assert kept.get(("key", 0)) is not None  # it is used again and again
        kept.put(("key", place), payload(100))
    found = [kept.get(("key", place)) is not None for place in range(10)]
    assert found[0]
    assert found[-1]
    assert 3 <= sum(found) <= 7
    kept.put(("key", 99), payload(10_000))
    assert kept.get(("key", 99)) is None
    assert sum(kept.get(("key", place)) is not None for place in range(10)) == sum(found)
