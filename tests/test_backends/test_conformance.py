"""Every backend fulfils the contract."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from zarr.storage import FsspecStore, MemoryStore, ObjectStore

from cnr_backends import Backend, WrapperBackend, open_backend
from cnr_backends.remote import FsspecBackend
from cnr_backends.testing import BackendConformance, DelayedBackend, FaultyBackend, FoldingBackend

if TYPE_CHECKING:
    from tests.s3_server import S3Server


@pytest.fixture(scope="module")
def session() -> Any:
    """Connections that share one spare the tests the reading of S3's description."""
    return pytest.importorskip("aiobotocore.session").AioSession()


class TestLocal(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return open_backend(tmp_path / "made" / "later")


class TestMemory(BackendConformance):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with open_backend(f"memory://{uuid.uuid4().hex}/root") as backend:
            yield backend
            for key, _ in backend.list_keys(""):
                backend.delete(key)


class TestZarrMemory(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return open_backend(MemoryStore())


class TestAnyFilesystem(BackendConformance):
    folders_vanish = False  # fsspec's memory keeps the folders that were made

    @pytest.fixture
    def backend(self) -> Backend:
        return FsspecBackend(f"memory://{uuid.uuid4().hex}", {})


class TestZarrOverAnyFilesystem(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return open_backend(FsspecStore.from_url(f"memory://{uuid.uuid4().hex}"))


@pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed")
class TestZarrObjectStore(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return open_backend(ObjectStore(import_module("obstore.store").MemoryStore()))


class TestWrapper(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return WrapperBackend(open_backend(tmp_path))


class TestFaultyWithoutFaults(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return FaultyBackend(open_backend(tmp_path), lambda operation, key, index: None, reads=True)


class TestFolding(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return FoldingBackend(open_backend(tmp_path))


class TestDelayed(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return DelayedBackend(open_backend(tmp_path), put_seconds=0.0005, get_seconds=0.0005)


@pytest.mark.server
class TestS3(BackendConformance):
    racers = 4
    folders_vanish = False  # this server removes empty folders in the background

    @pytest.fixture
    def backend(self, s3_server: S3Server, session: Any) -> Iterator[Backend]:
        url = s3_server.url(uuid.uuid4().hex)
        with open_backend(url, session=session, **s3_server.storage_options) as backend:
            yield backend


def test_a_zarr_store_lists_no_object_that_was_deleted_since() -> None:
    class Deleting(MemoryStore):
        async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
            async for name in super().list_prefix(prefix):
                yield name
            yield f"{prefix}gone"

    backend = open_backend(Deleting())
    backend.put("folder/a", b"123")
    assert list(backend.list_keys("folder")) == [("folder/a", 3)]


def test_no_write_comes_between_while_memory_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, find = open_backend(f"memory://{uuid.uuid4().hex}"), MemoryFileSystem.find
    backend.put("folder/a", b"")

    def slowly(*arguments: Any, **options: Any) -> Any:
        writing = pool.submit(backend.put, "folder/b", b"")
        with pytest.raises(TimeoutError):
            writing.result(0.1)
        return find(*arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "find", slowly)
    with ThreadPoolExecutor(1) as pool:
        assert list(backend.list_keys("folder")) == [("folder/a", 0)]
