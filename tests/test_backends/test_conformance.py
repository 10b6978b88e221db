"""Every backend fulfils the contract."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from zarr.storage import MemoryStore

from cnr_backends import Backend, open_backend
from cnr_backends.testing import BackendConformance, FaultyBackend

if TYPE_CHECKING:
    from tests.conftest import S3Server


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


class TestFaultyWithoutFaults(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return FaultyBackend(open_backend(tmp_path), lambda operation, key, index: None, reads=True)


@pytest.mark.server
class TestS3(BackendConformance):
    racers = 4
    folders_vanish = False  # this server removes empty folders in the background

    @pytest.fixture
    def backend(self, s3_server: S3Server) -> Iterator[Backend]:
        with open_backend(s3_server.url(uuid.uuid4().hex), **s3_server.storage_options) as backend:
            yield backend
