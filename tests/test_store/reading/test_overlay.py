"""The overlay as a Zarr store: zarr's own suite for stores, and what a hierarchy of a version must answer."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import StorePath
from zarr.testing.store import StoreTests

import cnr_store
from cnr_backends import open_backend
from cnr_store import Checkpointer, ReadOnlyError
from cnr_store.catalog.catalog import Catalog
from cnr_store.reading.overlay import Overlay
from tests.test_store.chains.test_relative import RELATIVE
from tests.test_store.support.filled_store import FilledStore

ROWS, DIM = 5000, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c = nn.Embedding(ROWS, DIM, sparse=True)
        self.small = nn.Embedding(9, 3, dtype=torch.float16)
        self.top = nn.Linear(4, 2)
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("empty", torch.zeros(0, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a baseline and two deltas of a table called c, which are relative."""
    place = tmp_path_factory.mktemp("overlay")
    model = Model()
    with Checkpointer(place, model, policy="consecutive", codec={"c": RELATIVE}) as checkpointer:
        for step in range(3):
            with torch.no_grad():
                model.c.weight[step * 7 :: 97] += 1
            checkpointer.touch("c", range(step * 7, ROWS, 97))
            checkpointer.save(step).result()
    return place


# zarr's suite


class _Filled(FilledStore):
    """Objects that the suite puts there."""

    supports_writes = True
    supports_deletes = True

    def __init__(self, objects: dict[str, bytes], read_only: bool = False) -> None:
        super().__init__(objects)
        self._read_only = read_only

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Filled) and other.objects == self.objects

    def with_read_only(self, read_only: bool = False) -> _Filled:
        return _Filled(self.objects, read_only)

    async def set(self, key: str, value: Buffer) -> None:
        if self.read_only:
            await super().set(key, value)
        self.objects[key] = value.to_bytes()

    async def delete(self, key: str) -> None:
        if self.read_only:
            await super().delete(key)
        self.objects.pop(key, None)


class TestReading(StoreTests[_Filled, cpu.Buffer]):
    """The whole suite. It fills the store itself, so only filling and emptying are written here."""

    store_cls = _Filled
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self) -> dict[str, Any]:
        return {"objects": {}}

    async def set(self, store: _Filled, key: str, value: Buffer) -> None:
        store.objects[key] = value.to_bytes()

    async def get(self, store: _Filled, key: str) -> Buffer:
        return self.buffer_cls.from_bytes(store.objects[key])

    def test_store_repr(self, store: _Filled) -> None:
        assert "_Filled" in repr(store)

    def test_store_supports_writes(self, store: _Filled) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: _Filled) -> None:
        assert store.supports_listing


class TestVersion(StoreTests[Overlay, cpu.Buffer]):
    """The same of a version, but for those tests that write, or look for keys that no version has."""

    store_cls = Overlay
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, folder: Path) -> dict[str, Any]:
        catalog = Catalog(open_backend(folder))
        return {"catalog": catalog, "record": catalog.find()}

    async def set(self, store: Overlay, key: str, value: Buffer) -> None:
        raise AssertionError("versions can't be filled")

    async def get(self, store: Overlay, key: str) -> Buffer:
        raise AssertionError("versions can't be filled")

    def test_store_repr(self, store: Overlay) -> None:
        assert repr(store) == f"Overlay('cnr://{store.version}@{store._catalog.backend.url}')"

    def test_store_supports_writes(self, store: Overlay) -> None:
        assert not store.supports_writes

    def test_store_supports_listing(self, store: Overlay) -> None:
        assert store.supports_listing


_WRITES = ["set", "set_not_open", "set_many", "set_if_not_exists", "clear", "serializable_store"]
_FILLS_THROUGH_THE_STORE = ["exists", "list", "list_prefix", "list_empty_path", "list_dir", "getsize_prefix"]
_READS_KEYS_OF_ITS_OWN = ["get", "get_not_open", "get_raises", "get_many", "get_partial_values", "getsize"]
_READS_KEYS_OF_ITS_OWN += ["get_bytes", "get_bytes_sync", "get_json", "get_json_sync", "get_sync", "is_empty"]
_WANTS_IT_WRITABLE = ["store_read_only", "store_open_read_only"]
for _name in [*_WRITES, *_FILLS_THROUGH_THE_STORE, *_READS_KEYS_OF_ITS_OWN, *_WANTS_IT_WRITABLE]:
    assert hasattr(StoreTests, f"test_{_name}")
    setattr(TestVersion, f"test_{_name}", None)


# A version


@pytest.fixture(scope="module")
def overlay(folder: Path) -> Store:
    return cnr_store.view(folder)


def _get(store: Store, key: str, byte_range: Any = None) -> bytes | None:
    found = sync(store.get(key, default_buffer_prototype(), byte_range))
    return None if found is None else found.to_bytes()


def _keys(store: Store) -> list[str]:
    async def collect() -> list[str]:
        return [key async for key in store.list()]

    return sync(collect())


def _names(store: Store, prefix: str) -> list[str]:
    async def collect() -> list[str]:
        return [name async for name in store.list_dir(prefix)]

    return sync(collect())


def test_a_version_is_read_only_always(folder: Path, overlay: Store) -> None:
    catalog = Catalog(open_backend(folder))
    with pytest.raises(ValueError, match="never change"):
        Overlay(catalog, catalog.find(), read_only=False)
    assert overlay.read_only
    assert overlay.with_read_only(True) == overlay
    with pytest.raises(ReadOnlyError, match=r"tables/c/zarr\.json.*save a new one"):
        sync(overlay.set("tables/c/zarr.json", cpu.Buffer.from_bytes(b"")))
    with pytest.raises(PermissionError):
        sync(overlay.delete("zarr.json"))


def test_every_key_that_is_listed_can_be_read_and_has_the_size_it_is_said_to_have(overlay: Store) -> None:
    keys = _keys(overlay)
    assert len(keys) == len(set(keys))
    assert {"zarr.json", "tables/c/weight/c/0/0", "dense/model/scalar/c", "tables/zarr.json"} <= set(keys)
    assert not any(key.startswith("dense/model/empty/c") for key in keys)
    for key in keys:
        data = _get(overlay, key)
        assert data is not None
        assert sync(overlay.getsize(key)) == len(data)
        assert sync(overlay.exists(key))


def test_folders_hold_what_is_listed_below_them(overlay: Store) -> None:
    keys = _keys(overlay)
    folders = {key.rsplit("/", depth)[0] for key in keys for depth in range(1, key.count("/") + 1)}
    for folder in ["", *folders]:
        below = f"{folder}/" if folder else ""
        expected = sorted({key[len(below) :].split("/")[0] for key in keys if key.startswith(below)})
        assert sorted(_names(overlay, folder)) == sorted(_names(overlay, below)) == expected


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "zarr.json/",
        "/zarr.json",
        "tables",
        "tables/c",
        "c/0",
        "tables/c/weight/c",
        "tables/c/weight/c/0",
        "tables/c/weight/c/0/0/0",
        "tables/c/weight/c/00/0",
        "tables/c/weight/c/-1/0",
        "tables/c/weight/c/\u0661/0",
        "tables/c/weight/c/0/1",
        "tables/c/weight/c/9999999/0",
        pytest.param("tables/c/weight/c/" + "9" * 5000 + "/0", id="a long number"),
        "tables/c/weight/0/0",
        "tables/c/../c/zarr.json",
        "dense/model/scalar/c/0",
        "dense/model/empty/c/0/0",
    ],
)
def test_what_a_version_does_not_hold_is_not_there(overlay: Store, key: str) -> None:
    assert _get(overlay, key) is None
    assert not sync(overlay.exists(key))
    with pytest.raises(FileNotFoundError):
        sync(overlay.getsize(key))
    if key not in ("", "/", "tables", "tables/c", "tables/c/weight/c", "tables/c/weight/c/0"):
        assert _names(overlay, key) == []


@pytest.mark.parametrize(
    "key", ["zarr.json", "tables/c/weight/c/0/0", "tables/small/weight/c/0/0", "dense/model/top.weight/c/0/0"]
)
def test_a_range_of_an_object_is_that_part_of_it(overlay: Store, key: str) -> None:
    whole = _get(overlay, key)
    assert whole is not None
    n = len(whole)
    for start, stop in [(0, 1), (1, 2), (23, 25), (24, 48), (7, n), (0, n), (n - 1, n + 5), (5, 5)]:
        assert _get(overlay, key, RangeByteRequest(start, stop)) == whole[start:stop]
        assert _get(overlay, key, OffsetByteRequest(start)) == whole[start:]
        assert _get(overlay, key, SuffixByteRequest(stop)) == whole[-stop:]
    assert _get(overlay, key, SuffixByteRequest(2 * n)) == whole
    assert _get(overlay, key, RangeByteRequest(n + 1, n + 2)) == b""


def test_chunks_are_the_rows_followed_by_fill(folder: Path) -> None:
    overlay, values = cnr_store.view(folder), cnr_store.state_dict(folder)["c.weight"]
    rows = zarr.open_array(StorePath(overlay, "tables/c/weight"), mode="r").chunks[0]
    found = [_get(overlay, f"tables/c/weight/c/{i}/0") for i in range(-(-ROWS // rows))]
    table = np.frombuffer(b"".join(data for data in found if data), "<f4").reshape(-1, DIM)
    np.testing.assert_array_equal(table[:ROWS], values)
    assert np.isnan(table[ROWS:]).all()
    assert len(table) % rows == 0


def test_a_copy_in_another_process_has_the_same_cut(folder: Path) -> None:
    catalog = Catalog(open_backend(folder))
    overlay = Overlay(catalog, catalog.find(), chunk_rows={"tables/c/weight": 64})
    copy = pickle.loads(pickle.dumps(overlay))  # noqa: S301 - our own bytes
    assert copy == overlay
    assert copy.document("") == overlay.document("")
    array = zarr.open_array(StorePath(copy, "tables/c/weight"), mode="r")
    assert array.chunks == (64, DIM)
    np.testing.assert_array_equal(array[:], cnr_store.state_dict(folder)["c.weight"])


@pytest.mark.slow
def test_many_threads_read_one_store(folder: Path) -> None:
    catalog = Catalog(open_backend(folder))
    overlay = Overlay(catalog, catalog.find(), chunk_rows={"tables/c/weight": 256})
    array = zarr.open_array(StorePath(overlay, "tables/c/weight"), mode="r")
    expected = cnr_store.state_dict(folder)["c.weight"]

    def agrees(seed: int) -> bool:
        begin, end = sorted(np.random.default_rng(seed).integers(0, ROWS, 2))
        return np.array_equal(array[begin:end], expected[begin:end])

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(agrees, range(200)))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_reads_on(folder: Path) -> None:
    """In a process of its own, because pytest's has threads that nobody should fork."""
    script = f"""
import asyncio, os, sys
import cnr_store
from zarr.core.buffer import default_buffer_prototype as prototype

view = cnr_store.view({str(folder)!r})
read = lambda: asyncio.run(view.get("tables/c/weight/c/0/0", prototype())).to_bytes()
expected = read()
child = os.fork()
if child == 0:
    os._exit(0 if read() == expected else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
