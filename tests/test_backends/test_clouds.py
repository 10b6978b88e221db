"""Exclusive creates on Google's and Azure's storage: by fakes here, and by emulators where they run.

The emulators are no dependencies. ``CNR_GCS_ENDPOINT`` names a fake-gcs-server with a bucket ``bucket``, and
``CNR_AZURE_CONNECTION`` is the connection string of an Azurite with a container ``bucket``.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from cnr_backends import Backend, ObjectExistsError, OpenError, StorageError, open_backend
from cnr_backends.testing import BackendConformance

GCS_ENDPOINT = os.environ.get("CNR_GCS_ENDPOINT")
AZURE_CONNECTION = os.environ.get("CNR_AZURE_CONNECTION")
GOOGLE, AZURE = {"mode": "create"}, {"overwrite": False}
CONDITIONS: dict[str, dict[str, Any]] = {
    "gs": GOOGLE,
    "gcs": GOOGLE,
    "abfs": AZURE,
    "abfss": AZURE,
    "az": AZURE,
}


class Driver(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Objects in memory, written on conditions as the drivers of both clouds name them."""

    cachable = False
    root_marker = ""
    sent: list[dict[str, Any]] = []  # noqa: RUF012 - every instance's
    lost_answers = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.rpartition('://')[2]}".replace("//", "/").rstrip("/")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", overwrite: bool = True) -> None:
        self.sent.append({"mode": mode, "overwrite": overwrite})
        if (mode == "create" or not overwrite) and self.exists(path):
            raise FileExistsError(path)
        super().pipe_file(path, value)
        if Driver.lost_answers:
            Driver.lost_answers -= 1
            self.pipe_file(path, value, mode, overwrite)  # drivers repeat a request that gets no answer

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError("this could make a bucket")


class OldDriver(Driver):
    def pipe_file(self, path: str, value: bytes) -> None:  # type: ignore[override]  # as gcsfs was
        raise AssertionError("it would replace the object")


def opened(monkeypatch: pytest.MonkeyPatch, protocol: str, driver: type[Driver] = Driver) -> Backend:
    monkeypatch.setitem(_registry, protocol, driver)
    monkeypatch.setattr(Driver, "sent", [])
    return open_backend(f"{protocol}://bucket/{uuid.uuid4().hex}")


@pytest.mark.parametrize("protocol", CONDITIONS)
def test_creates_are_sent_with_their_condition(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    backend = opened(monkeypatch, protocol)
    assert backend.atomic_create
    backend.create("folder/name", b"first")
    with pytest.raises(ObjectExistsError):
        backend.create("folder/name", b"second")
    assert [{name: each[name] for name in CONDITIONS[protocol]} for each in Driver.sent] == [
        CONDITIONS[protocol]
    ] * 2
    assert backend.get("folder/name") == b"first"
    backend.put("folder/name", b"third")
    assert Driver.sent[-1] == {"mode": "overwrite", "overwrite": True}
    assert backend.get("folder/name") == b"third"


@pytest.mark.parametrize("protocol", CONDITIONS)
def test_a_create_whose_answer_was_lost_is_ones_own(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    backend = opened(monkeypatch, protocol)
    monkeypatch.setattr(Driver, "lost_answers", 1)
    backend.create("folder/name", b"mine")
    assert len(Driver.sent) == 2
    with pytest.raises(ObjectExistsError):
        backend.create("folder/name", b"theirs")


@pytest.mark.parametrize("protocol", CONDITIONS)
def test_failures_say_what_to_check(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    backend = opened(monkeypatch, protocol)

    def forbidden(*_: object, mode: str = "", overwrite: bool = True) -> None:
        raise OSError("Forbidden")

    monkeypatch.setattr(Driver, "pipe_file", forbidden)
    with pytest.raises(StorageError, match=r"Forbidden.*credentials.*permissions"):
        backend.create("folder/name", b"value")
    with pytest.raises(OpenError, match="no bucket or container"):
        open_backend(f"{protocol}://")


def test_a_driver_without_exclusive_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OpenError, match=r"install gcsfs 2024\.12 or newer"):
        opened(monkeypatch, "gs", OldDriver)


@pytest.mark.server
@pytest.mark.skipif(GCS_ENDPOINT is None, reason="CNR_GCS_ENDPOINT names no emulator")
class TestGcs(BackendConformance):
    racers = 4

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        options = {"endpoint_url": GCS_ENDPOINT, "token": "anon"}
        with open_backend(f"gs://bucket/{uuid.uuid4().hex}", **options) as backend:
            yield backend


@pytest.mark.server
@pytest.mark.skipif(AZURE_CONNECTION is None, reason="CNR_AZURE_CONNECTION names no emulator")
class TestAbfs(BackendConformance):
    racers = 4

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        options = {"connection_string": AZURE_CONNECTION}
        with open_backend(f"abfs://bucket/{uuid.uuid4().hex}", **options) as backend:
            yield backend
