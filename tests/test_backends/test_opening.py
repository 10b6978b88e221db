"""From URLs, paths and stores to backends, and the stores that come back."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from fsspec.registry import _registry, known_implementations
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ZipStore

from cnr_backends import (
    ArgumentError,
    Backend,
    BackendError,
    BackendStore,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    OpenError,
    StorageError,
    open_backend,
    zarr_store,
)
from cnr_backends.testing import FaultyBackend
from tests.plain_http import plain_http


def test_one_folder_has_many_names(tmp_path: Path) -> None:
    for url in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}", f"{tmp_path}/"):
        backend = open_backend(url)
        assert backend.url == f"file://{tmp_path}"
        assert backend.atomic_create
        assert open_backend(backend) is backend


def test_a_path_may_hold_two_colons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"{tmp_path}/run::1", f"file://{tmp_path}/run::1", "run::1", "./run::1"):
        backend = open_backend(url)
        assert backend.url == f"file://{tmp_path}/run::1"
        backend.put("name", b"value")
    assert (tmp_path / "run::1" / "name").read_bytes() == b"value"


def test_a_relative_path_needs_a_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(OpenError, match="working folder, which it is relative to, was deleted"):
        open_backend("folder")
    assert open_backend(tmp_path).list_names("") == []


def test_a_local_zarr_store_is_taken_as_its_folder(tmp_path: Path) -> None:
    assert open_backend(LocalStore(tmp_path)).url == f"file://{tmp_path}"
    assert not open_backend(LocalStore(tmp_path, read_only=True)).atomic_create


def test_memory_is_shared_by_url() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    open_backend(url).create("name", b"value")
    other = open_backend(f"{url}/")
    assert other.get("name") == b"value"
    with pytest.raises(ObjectExistsError):
        other.create("name", b"other")
    assert open_backend("memory://").get(f"{url.removeprefix('memory://')}/name") == b"value"


def test_a_backend_may_be_closed_twice_and_leaves_what_it_holds(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"memory://{uuid.uuid4().hex}"):
        with open_backend(url) as backend:
            backend.put("name", b"value")
            backend.close()
        assert open_backend(url).get("name") == b"value"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "give a path or a URL"),
        (3, "give a path, a URL"),
        (b"bytes", "give a path, a URL"),
        ("nothing://bucket", "not known: nothing"),
        ("simplecache::memory://x", "chained"),
        ("simplecache://x", "a cache gives what objects were.* give the URL of what it caches"),
        ("FileCache://x", "a cache"),
        ("blockcache://x", "a cache"),
        ("cached://x", "a cache"),
        ("simplecache::folder/x", "'./' before a path"),
        ("file:///folder::s3://bucket/x", "chained"),
        ("s3:/bucket/x", "two slashes"),
        ("path\0", "null byte"),
    ],
)
def test_what_can_not_be_opened_says_why(url: str, message: str) -> None:
    with pytest.raises(OpenError, match=message):
        open_backend(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        known_implementations,
        "cnr-far",
        {"class": "not_installed.FS", "err": "Install far-fs"},
    )
    with pytest.raises(OpenError, match="Install far-fs"):
        open_backend("cnr-far://x")


@pytest.mark.parametrize(
    ("protocol", "extra"), [("s3", "s3"), ("gs", "gcs"), ("az", "abfs"), ("abfss", "abfs")]
)
def test_a_missing_package_of_an_extra_is_installed_by_it(
    monkeypatch: pytest.MonkeyPatch, protocol: str, extra: str
) -> None:
    absent = {"class": "not_installed.FS", "err": "Install it"}
    monkeypatch.delitem(_registry, protocol, raising=False)
    monkeypatch.setitem(known_implementations, protocol, absent)
    with pytest.raises(OpenError, match=rf"Install it: pip install 'cnr-store\[{extra}\]'"):
        open_backend(f"{protocol}://bucket/x")


def test_options_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, MemoryStore(), open_backend(tmp_path)):
        with pytest.raises(OpenError, match="secret_option"):
            open_backend(place, secret_option=1)
    assert open_backend(f"file://{tmp_path}", auto_mkdir=True).list_names("") == []


def test_secrets_in_a_url_are_not_repeated() -> None:
    with pytest.raises(OpenError) as caught:
        open_backend("nothing://user:password@host/path?token=123")
    assert "nothing://***@host/path" in str(caught.value)
    assert "password" not in str(caught.value)
    assert "123" not in str(caught.value)


def test_a_read_only_store_can_be_read_and_says_that_it_is() -> None:
    store = MemoryStore()
    open_backend(store).put("name", b"value")
    backend = open_backend(store.with_read_only(True))
    assert backend.get("name") == b"value"
    writes: list[Callable[[], None]] = [
        lambda: backend.put("name", b""),
        lambda: backend.create("new", b""),
        lambda: backend.delete("name"),
    ]
    for write in writes:
        with pytest.raises(StorageError, match="read-only"):
            write()


def test_errors_can_be_pickled(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    with pytest.raises(BackendError) as caught:
        backend.get("some/name")
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes
    assert type(error) is type(caught.value)
    assert (str(error), error.key, error.operation) == (str(caught.value), "some/name", "get")


def _store(tmp_path: Path) -> BackendStore:
    zarr.create_array(LocalStore(tmp_path), data=np.arange(64), chunks=(1,))
    backend = open_backend(tmp_path)
    store = backend.zarr_store()
    assert zarr_store(backend) == store
    assert isinstance(store, BackendStore)
    return store


def test_the_store_is_read_only(tmp_path: Path) -> None:
    store = _store(tmp_path)
    assert store.read_only
    assert not store.supports_writes
    assert not store.supports_deletes
    assert store.with_read_only(True) == store
    with pytest.raises(ArgumentError):
        store.with_read_only(False)
    with pytest.raises((ValueError, StorageError)):
        zarr.create_array(store, name="new", shape=(1,), dtype="i4")
    assert open_backend(tmp_path).list_names("") == ["c", "zarr.json"]


def test_the_store_can_be_pickled_and_closed(tmp_path: Path) -> None:
    store = _store(tmp_path)
    with pickle.loads(pickle.dumps(store)) as copy:  # noqa: S301 - our own bytes
        assert copy == store
        np.testing.assert_array_equal(zarr.open_array(copy)[:], np.arange(64))
    assert copy != open_backend(tmp_path / "other").zarr_store()
    np.testing.assert_array_equal(zarr.open_array(store)[:], np.arange(64))


@pytest.mark.slow
def test_pickled_memory_opens_in_its_own_process_alone() -> None:
    backend = open_backend(f"memory://{uuid.uuid4().hex}")
    backend.put("name", b"value")
    data = pickle.dumps(backend)
    assert pickle.loads(data).get("name") == b"value"  # noqa: S301 - our own bytes
    code = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))"
    child = subprocess.run([sys.executable, "-c", code, data.hex()], capture_output=True, check=False)
    assert child.returncode == 1
    assert b"OpenError" in child.stderr
    assert b"memory of process" in child.stderr


@pytest.mark.slow
def test_reads_nested_in_reads_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """More chunks than any pool has threads, each read through a second store whose reads are synchronous."""
    inner = _store(tmp_path)
    middle = open_backend(inner)
    outer = zarr.open_array(middle.zarr_store())
    np.testing.assert_array_equal(outer[:], np.arange(64))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_with_threads_of_its_own(tmp_path: Path) -> None:
    array = zarr.open_array(_store(tmp_path))
    assert array[3] == 3
    child = os.fork()
    if child == 0:
        # Whatever happens, the child must not return into pytest.
        code = 1
        try:
            code = 0 if np.array_equal(array[:], np.arange(64)) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_faults_come_where_they_are_asked_for(tmp_path: Path) -> None:
    faults = iter([None, "before", "after", "full", None, "after"])
    backend = FaultyBackend(open_backend(tmp_path), lambda operation, key, index: next(faults))  # type: ignore[arg-type]
    backend.put("a", b"1")
    for key, kind in (("b", StorageError), ("c", StorageError), ("d", StorageError)):
        with pytest.raises(kind, match=f"put of '{key}' failed"):
            backend.put(key, b"2")
    assert backend.list_names("") == ["a", "c"]
    backend.create("e", b"3")
    with pytest.raises(StorageError, match="delete of 'e'"):
        backend.delete("e")
    assert backend.list_names("") == ["a", "c"]
    assert backend.log == [
        ("put", "a"),
        ("put", "b"),
        ("put", "c"),
        ("put", "d"),
        ("create", "e"),
        ("delete", "e"),
    ]


def test_faults_can_be_asked_for_in_reads(tmp_path: Path) -> None:
    asked: list[tuple[str, str, int]] = []

    def fault(operation: str, key: str, index: int) -> None:
        asked.append((operation, key, index))

    backend = FaultyBackend(open_backend(tmp_path), fault, reads=True)
    backend.put("a", b"1")
    backend.get("a")
    list(backend.list_keys(""))
    assert asked == [("put", "a", 0), ("get", "a", 1), ("list_keys", "", 2)]


def test_a_zip_store_is_opened_to_read_it(tmp_path: Path) -> None:
    with contextlib.closing(ZipStore(tmp_path / "objects.zip", mode="w")) as written:
        with pytest.raises(
            OpenError, match=r"this ZipStore is not open, or closed; open it with `await ZipStore"
        ):
            open_backend(written)
        written._sync_open()
        open_backend(written).put("name", b"value")
    with pytest.raises(OpenError, match="not open, or closed"):  # a second opening would truncate it
        open_backend(written)
    with contextlib.closing(ZipStore(tmp_path / "objects.zip", mode="r")) as store:
        backend = open_backend(store)
        assert (backend.list_names(""), backend.get("name")) == (["name"], b"value")
    with pytest.raises(OpenError, match=r"can't open zip://.*none.zip: .*No such file.*; check the path"):
        open_backend(ZipStore(tmp_path / "none.zip", mode="r"))
    (tmp_path / "text").write_text("text")
    with pytest.raises(OpenError, match="not a zip file"):
        open_backend(ZipStore(tmp_path / "text", mode="r"))


def test_what_a_kind_of_storage_can_not_do_is_named(tmp_path: Path) -> None:
    with contextlib.closing(ZipStore(tmp_path / "objects.zip", mode="w")) as store:
        store._sync_open()
        backend = open_backend(store)
        backend.put("name", b"value")
        backend.delete("none")
        with pytest.raises(
            StorageError, match=r"delete of 'name' failed .*this kind of storage can't.*copy the store"
        ):
            backend.delete("name")


def test_a_server_that_ignores_ranges(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "name").write_bytes(b"0123456789")
    with plain_http(tmp_path) as url:
        backend = open_backend(url)
        assert (backend.get("folder/name"), backend.size("folder/name")) == (b"0123456789", 10)
        assert backend.get_range("folder/name", 0, 10) == b"0123456789"
        assert list(backend.list_keys("")) == [("folder/name", 10)]
        reads: list[Callable[[], bytes]] = [
            lambda: backend.get_range("folder/name", 2, 3),
            lambda: backend.get_suffix("folder/name", 3),
        ]
        for read in reads:
            with pytest.raises(
                StorageError, match="and 10 came, so the server ignores Range requests; use one"
            ) as told:
                read()
            assert not isinstance(told.value, ObjectTooShortError)
        with pytest.raises(ObjectTooShortError):
            backend.get_range("folder/name", 2, 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "opened",
    [
        open_backend,
        lambda url: open_backend(url, encoded=True),
        lambda url: open_backend(url, simple_links=False),
        lambda url: open_backend(FsspecStore.from_url(url, read_only=True)),
    ],
)
def test_keys_behind_a_web_server_are_names_of_files(
    tmp_path: Path, opened: Callable[[str], Backend]
) -> None:
    pytest.importorskip("aiohttp")
    names = [
        "plain",
        "a b",
        "a%20b",
        "a%2520b",
        "user:item",
        "user%3Aitem",
        "%41",
        "A",
        "~",
        "%7E",
        "a+b",
        "é",
    ]
    local = open_backend(tmp_path / "the store")
    for name in names:
        local.put(f"folder of {name}/{name}", name.encode())
        local.put(f"{name}/inner", b"")
    with plain_http(tmp_path) as url:
        backend = opened(f"{url}/the%20store")
        for name in names:
            key = f"folder of {name}/{name}"
            assert (backend.get(key), backend.size(key)) == (name.encode(), len(name.encode()))
            assert backend.list_names(f"folder of {name}") == [name]
            assert list(backend.list_keys(f"folder of {name}")) == [(key, len(name.encode()))]
            with pytest.raises(ObjectNotFoundError):
                backend.get(f"folder of {name}/other")
        assert backend.list_names("") == local.list_names("")
        assert sorted(backend.list_keys("")) == sorted(local.list_keys(""))
