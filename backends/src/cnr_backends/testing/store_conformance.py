"""Zarr's contract of the store over a backend, as tests."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from cnr_backends.backend import Backend
from cnr_backends.errors import StorageError


class StoreConformance:
    """The tests of `BackendConformance` that read through `Backend.zarr_store`."""

    def test_zarr_reads_through_the_store(self, backend: Backend) -> None:
        source = MemoryStore()
        values = np.arange(35, dtype="f4").reshape(7, 5)
        group = zarr.create_group(source)
        group.create_array("tables/a", data=values, chunks=(2, 5), shards=(4, 5))
        group.create_array("b", data=values[0])
        for key, buffer in source._store_dict.items():
            backend.put(key, buffer.to_bytes())

        store = backend.zarr_store()
        opened = zarr.open_group(store, mode="r")
        assert sorted(opened) == ["b", "tables"]
        assert [name for name, _ in zarr.open_group(store, path="tables", mode="r").arrays()] == ["a"]
        array = zarr.open_array(store, path="tables/a", mode="r")
        np.testing.assert_array_equal(array[:], values)
        np.testing.assert_array_equal(array[3:5, 1], values[3:5, 1])
        with pytest.raises((ValueError, StorageError)):
            zarr.open_array(store, path="b")[:] = 0
        assert backend.get("b/c/0") == source._store_dict["b/c/0"].to_bytes()

    @pytest.mark.parametrize(
        ("request_", "expected"),
        [
            (None, b"0123456789"),
            (RangeByteRequest(2, 5), b"234"),
            (RangeByteRequest(8, 20), b"89"),
            (RangeByteRequest(20, 30), b""),
            (OffsetByteRequest(7), b"789"),
            (OffsetByteRequest(10), b""),
            (SuffixByteRequest(2), b"89"),
            (SuffixByteRequest(20), b"0123456789"),
        ],
    )
    def test_the_store_answers_byte_requests_as_zarr_defines_them(
        self, backend: Backend, request_: ByteRequest | None, expected: bytes
    ) -> None:
        backend.put("folder/name", b"0123456789")
        store = backend.zarr_store()
        prototype = default_buffer_prototype()
        found, missing = asyncio.run(
            store.get_partial_values(prototype, [("folder/name", request_), ("folder/none", request_)])
        )
        assert found is not None
        assert found.to_bytes() == expected
        assert missing is None

    def test_the_store_lists(self, backend: Backend) -> None:
        for key in ("a/b", "a/c/d", "ab"):
            backend.put(key, b"value")
        store = backend.zarr_store()

        async def listed() -> tuple[list[str], list[str], list[str], bool, bool, int]:
            return (
                sorted([key async for key in store.list()]),
                sorted([key async for key in store.list_prefix("a/")]),
                sorted([key async for key in store.list_dir("a")]),
                await store.exists("a/b"),
                await store.exists("a/c"),
                await store.getsize("ab"),
            )

        expected = (["a/b", "a/c/d", "ab"], ["a/b", "a/c/d"], ["b", "c"], True, False, 5)
        assert asyncio.run(listed()) == expected
