"""The contract of `cnr_backends.backend`, as tests."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from cnr_backends.backend import Backend
from cnr_backends.errors import (
    ArgumentError,
    BackendError,
    KeyNameError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StorageError,
)


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


BAD_KEYS = (
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/./b",
    "a\\b",
    "a\0b",
    ".tmp-a",
    "a/.tmp-b/c",
    "\ud800",
)
ODD_KEYS = (
    "a b/c",
    "per%20cent/%2F",
    "plus+hash#query?x=1&y",
    "é/日本",
    "star*[x]{y}",
    "~tilde",
    ".hidden/.zattrs",
    "a:b",
)

Read = Callable[[Backend], object]
READS: dict[str, Read] = {
    "get": lambda backend: backend.get("some/missing"),
    "get_range": lambda backend: backend.get_range("some/missing", 0, 1),
    "empty range": lambda backend: backend.get_range("some/missing", 0, 0),
    "get_suffix": lambda backend: backend.get_suffix("some/missing", 1),
    "empty suffix": lambda backend: backend.get_suffix("some/missing", 0),
    "size": lambda backend: backend.size("some/missing"),
}


class BackendConformance(StoreConformance):
    """Tests of a backend. Subclass it and add a fixture `backend` that makes an empty one for each test."""

    racers: ClassVar[int] = 8
    """Threads that compete in a race. Set it lower where each request is slow."""

    folders_vanish: ClassVar[bool] = True
    """Whether a folder disappears from listings as soon as its last object is deleted."""

    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"", b""),
            (b"abc", b"abc"),
            (bytearray(b"abc"), b"abc"),
            (memoryview(b"abcdef")[::2].tobytes(), b"ace"),
            ([], b""),
            ([b"", b""], b""),
            ([b"ab", bytearray(b"c"), memoryview(b"\1\0\2\0").cast("H")], b"abc\x01\0\x02\0"),
        ],
    )
    def test_what_is_put_can_be_read(
        self, backend: Backend, data: bytes | list[bytes], expected: bytes
    ) -> None:
        backend.put("folder/name", data)
        assert backend.get("folder/name") == expected
        assert backend.size("folder/name") == len(expected)

    def test_put_replaces_the_whole_object(self, backend: Backend) -> None:
        backend.put("name", b"a long object")
        backend.put("name", b"short")
        assert backend.get("name") == b"short"

    def test_a_put_that_was_begun_is_finished_by_another_thread(self, backend: Backend) -> None:
        backend.put("folder/name", b"older")
        begun = [backend.begin_put(key, [b"ne", b"w"]) for key in ("folder/name", "other/name")]
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(list, begun)) == [[], []]
        assert backend.get("folder/name") == backend.get("other/name") == b"new"

    def test_what_is_prepared_is_no_object(self, backend: Backend) -> None:
        backend.prepare("folder/name")
        backend.prepare("")  # a failure is no error
        assert list(backend.list_keys("")) == []
        backend.put("folder/name", b"new")
        backend.prepare("folder/name")
        backend.confirm("folder/name")
        assert backend.get("folder/name") == b"new"

    def test_a_put_that_is_closed_before_its_end_leaves_the_object(self, backend: Backend) -> None:
        backend.put("folder/name", b"older")
        for key in ("folder/name", "other/name"):
            backend.begin_put(key, b"new").close()
        assert dict(backend.list_keys("")) == {"folder/name": 5}
        with pytest.raises(KeyNameError):
            backend.begin_put("", b"new")

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_but_proper_keys_are_kept_as_they_are(self, backend: Backend, key: str) -> None:
        backend.put(key, b"value")
        backend.create(f"{key}-created", b"other")
        assert backend.get(key) == b"value"
        assert dict(backend.list_keys("")) == {key: 5, f"{key}-created": 5}
        folder, _, name = key.rpartition("/")
        assert backend.list_names(folder) == sorted([name, f"{name}-created"])
        backend.delete(key)
        assert dict(backend.list_keys("")) == {f"{key}-created": 5}

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_improper_keys_are_refused_everywhere(self, backend: Backend, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: backend.put(key, b""),
            lambda: backend.create(key, b""),
            lambda: backend.get(key),
            lambda: backend.get_range(key, 0, 1),
            lambda: backend.get_suffix(key, 1),
            lambda: backend.size(key),
            lambda: backend.delete(key),
        ]
        if key not in ("", "a/"):
            calls += [lambda: backend.list_names(key), lambda: backend.list_keys(key)]
        for call in calls:
            with pytest.raises(KeyNameError):
                call()
        assert list(backend.list_keys("")) == []

    @pytest.mark.parametrize("read", READS.values(), ids=READS)
    def test_a_missing_object_is_an_error(self, backend: Backend, read: Read) -> None:
        with pytest.raises(ObjectNotFoundError, match="some/missing"):
            read(backend)

    @pytest.mark.parametrize("read", READS.values(), ids=READS)
    def test_a_folder_is_not_an_object(self, backend: Backend, read: Read) -> None:
        backend.put("some/missing/object", b"")
        with pytest.raises(ObjectNotFoundError):
            read(backend)

    @pytest.mark.parametrize("read", READS.values(), ids=READS)
    def test_nothing_lies_below_an_object(self, backend: Backend, read: Read) -> None:
        backend.put("some", b"")
        with pytest.raises(ObjectNotFoundError):
            read(backend)

    def test_ranges_are_exact(self, backend: Backend) -> None:
        backend.put("name", b"0123456789")
        assert backend.get_range("name", 0, 10) == b"0123456789"
        assert backend.get_range("name", 3, 4) == b"3456"
        assert backend.get_range("name", 10, 0) == b""
        assert backend.get_suffix("name", 3) == b"789"
        assert backend.get_suffix("name", 10) == b"0123456789"
        assert backend.get_suffix("name", 0) == b""

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (8, 3), (10, 1), (50, 1)])
    def test_ranges_beyond_the_end_are_errors(self, backend: Backend, start: int, length: int) -> None:
        backend.put("name", b"0123456789")
        with pytest.raises(ObjectTooShortError, match="name"):
            backend.get_range("name", start, length)

    @pytest.mark.parametrize("data", [b"", b"0123456789"])
    def test_suffixes_longer_than_the_object_are_errors(self, backend: Backend, data: bytes) -> None:
        backend.put("name", data)
        with pytest.raises(ObjectTooShortError, match="name"):
            backend.get_suffix("name", 11)

    def test_negative_ranges_are_errors(self, backend: Backend) -> None:
        backend.put("name", b"0123456789")
        for start, length in [(-1, 1), (0, -1)]:
            with pytest.raises(ArgumentError):
                backend.get_range("name", start, length)
        with pytest.raises(ArgumentError):
            backend.get_suffix("name", -1)

    def test_create_is_exclusive(self, backend: Backend) -> None:
        backend.create("folder/name", b"first")
        with pytest.raises(ObjectExistsError, match="folder/name"):
            backend.create("folder/name", b"second")
        assert backend.get("folder/name") == b"first"
        backend.delete("folder/name")
        backend.create("folder/name", b"third")
        assert backend.get("folder/name") == b"third"

    def test_create_does_not_replace_what_was_put(self, backend: Backend) -> None:
        backend.put("name", b"put")
        with pytest.raises(ObjectExistsError):
            backend.create("name", b"created")
        assert backend.get("name") == b"put"

    def test_create_has_one_winner_among_threads(self, backend: Backend) -> None:
        if not backend.atomic_create:
            pytest.skip("this backend does not promise atomic creation")
        gate = threading.Barrier(self.racers)

        def race(number: int) -> bytes | None:
            data = b"racer %d" % number
            gate.wait()
            try:
                backend.create("folder/name", data)
            except ObjectExistsError:
                return None
            return data

        with ThreadPoolExecutor(self.racers) as pool:
            winners = [data for data in pool.map(race, range(self.racers)) if data is not None]
        assert winners == [backend.get("folder/name")]

    def test_readers_see_whole_objects(self, backend: Backend) -> None:
        sizes = (200_000, 300_000)
        objects = [bytes([letter]) * size for letter, size in zip(b"ab", sizes, strict=True)]
        backend.put("name", objects[0])
        done = threading.Event()

        def write() -> None:
            try:
                for data in itertools.islice(itertools.cycle(objects), 4 * self.racers):
                    backend.put("name", data)
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(write)
            reads = 0
            while not done.is_set() or reads < 2:
                assert backend.get("name") in objects
                reads += 1
            writer.result()

    def test_listings(self, backend: Backend) -> None:
        sizes = {"a": 1, "b/c": 2, "b/d/e": 3, "b-c/f": 4, "bb": 5, "b/d/g": 0}
        for key, size in sizes.items():
            backend.put(key, bytes(size))
        assert backend.list_names("") == ["a", "b", "b-c", "bb"]
        assert backend.list_names("b") == backend.list_names("b/") == ["c", "d"]
        assert backend.list_names("b/d") == ["e", "g"]
        assert dict(backend.list_keys("")) == sizes
        assert dict(backend.list_keys("b")) == {"b/c": 2, "b/d/e": 3, "b/d/g": 0}

    @pytest.mark.parametrize("prefix", ["missing", "missing/deeper", "object", "object/deeper", "obj"])
    def test_listings_without_a_folder_are_empty(self, backend: Backend, prefix: str) -> None:
        backend.put("object", b"value")
        assert backend.list_names(prefix) == []
        assert list(backend.list_keys(prefix)) == []

    def test_listings_of_an_empty_backend_are_empty(self, backend: Backend) -> None:
        assert backend.list_names("") == []
        assert list(backend.list_keys("")) == []

    def test_listings_show_every_change_at_once(self, backend: Backend) -> None:
        expected = []
        for name in ("a", "b", "c", "d"):
            backend.create(f"folder/{name}/object", name.encode())
            expected.append(name)
            assert backend.list_names("folder") == expected
        for name in ("b", "a", "d", "c"):
            backend.delete(f"folder/{name}/object")
            expected.remove(name)
            assert sorted(key.split("/")[1] for key, _ in backend.list_keys("folder")) == expected
            assert backend.list_names(f"folder/{name}") == []
            assert backend.list_names("folder") == expected or not self.folders_vanish
        assert backend.list_names("") == [] or not self.folders_vanish

    def test_deleting_twice_is_fine(self, backend: Backend) -> None:
        backend.put("folder/name", b"value")
        backend.delete("folder/name")
        backend.delete("folder/name")
        backend.delete("never/was")
        assert list(backend.list_keys("")) == []

    def test_deleting_a_folder_does_nothing(self, backend: Backend) -> None:
        backend.put("folder/name", b"value")
        backend.delete("folder")
        assert backend.get("folder/name") == b"value"

    def test_threads_may_share_a_backend(self, backend: Backend) -> None:
        def work(number: int) -> list[str]:
            backend.put(f"shared/{number}/object", b"%d" % number)
            assert backend.get(f"shared/{number}/object") == b"%d" % number
            if number % 2:
                backend.delete(f"shared/{number}/object")
            return backend.list_names("shared")

        with ThreadPoolExecutor(self.racers) as pool:
            listings = list(pool.map(work, range(4 * self.racers)))
        even = [str(number) for number in range(0, 4 * self.racers, 2)]
        assert sorted(key for key, _ in backend.list_keys("")) == sorted(
            f"shared/{name}/object" for name in even
        )
        assert backend.list_names("shared") == sorted(even) or not self.folders_vanish
        assert all(name in listing for name, listing in zip(even, listings[::2], strict=True))

    def test_errors_say_what_where_and_which(self, backend: Backend) -> None:
        with pytest.raises(BackendError) as caught:
            backend.get("some/name")
        assert (caught.value.operation, caught.value.key, caught.value.url) == (
            "get",
            "some/name",
            backend.url,
        )
