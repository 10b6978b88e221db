"""Failures of the network and of busy servers are told from those that no retry mends."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from cnr_backends import OpenError, StorageError, open_backend
from cnr_backends.remote import MemoryBackend

if TYPE_CHECKING:
    from tests.s3_proxy import SpoiledOptions
    from tests.s3_server import S3Server


class Raising(MemoryBackend):
    """A backend whose driver raises what a test says."""

    error: Exception

    def _put(self, key: str, pieces: list[memoryview]) -> None:
        raise self.error


def answered(status: int, code: str = "") -> Exception:
    """botocore's error for a server's answer, as s3fs passes it on."""
    botocore = pytest.importorskip("botocore.exceptions")
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(errno.EIO, code)
    error.__cause__ = botocore.ClientError(answer, "PutObject")
    return error


def of(module: str, name: str, *args: Any, **options: Any) -> Exception:
    error = getattr(pytest.importorskip(module), name)(*args, **options)
    assert isinstance(error, Exception)
    return error


def attribute(name: str, status: int) -> Exception:
    """The error of a driver that keeps a server's status in this attribute."""
    error = Exception(f"HTTP {status}")
    setattr(error, name, status)
    return error


TRANSIENT: dict[str, Callable[[], Exception]] = {
    "timeout": lambda: TimeoutError("too long"),
    "reset": lambda: ConnectionResetError(errno.ECONNRESET, "reset by peer"),
    "unreachable": lambda: OSError(errno.ENETUNREACH, "no route"),
    "slow down": lambda: answered(503, "SlowDown"),
    "internal error": lambda: answered(500, "InternalError"),
    "request timeout": lambda: answered(400, "RequestTimeout"),
    "too many requests": lambda: attribute("status", 429),
    "bad gateway": lambda: attribute("status_code", 502),
    "gateway timeout": lambda: attribute("code", 504),
    "botocore's connection": lambda: of(
        "botocore.exceptions", "EndpointConnectionError", endpoint_url="http://far"
    ),
    "botocore's timeout": lambda: of("botocore.exceptions", "ReadTimeoutError", endpoint_url="http://far"),
    "aiohttp's connection": lambda: of("aiohttp", "ServerDisconnectedError"),
    "aiohttp's body": lambda: of("aiohttp", "ClientPayloadError"),
}
LASTING: dict[str, Callable[[], Exception]] = {
    "permission": lambda: PermissionError(errno.EACCES, "no"),
    "full": lambda: OSError(errno.ENOSPC, "full"),
    "broken disk": lambda: OSError(errno.EIO, "broken"),
    "read only": lambda: OSError(errno.EROFS, "read only"),
    "forbidden": lambda: answered(403, "AccessDenied"),
    "no bucket": lambda: answered(404, "NoSuchBucket"),
    "unauthorized": lambda: attribute("status", 401),
    "a bug": lambda: ValueError("wrong"),
}


@pytest.mark.parametrize("name", [*TRANSIENT, *LASTING])
def test_transient_failures_are_marked(name: str) -> None:
    with Raising(f"memory://{uuid.uuid4().hex}", {}) as backend:
        backend.error = (TRANSIENT | LASTING)[name]()
        with pytest.raises(StorageError) as caught:
            backend.put("key", b"data")
    assert caught.value.transient == (name in TRANSIENT)


@pytest.mark.server
@pytest.mark.parametrize("fate", ["500", "503", "lose"])
def test_a_real_driver_shows_that_a_failure_is_transient(
    fate: str, s3_server: S3Server, spoiled: SpoiledOptions
) -> None:
    url = s3_server.url(uuid.uuid4().hex)
    with spoiled(lambda number, method: fate if method == "PUT" else None) as options:
        config = {"retries": {"mode": "standard", "total_max_attempts": 1}}
        with open_backend(url, **options, config_kwargs=config) as backend:
            with pytest.raises(StorageError) as caught:
                backend.put("key", b"data")
    assert caught.value.transient
    if fate != "lose":
        assert str(caught.value).endswith("the server is busy or failed: try again in a while")


@pytest.mark.server
@pytest.mark.parametrize("fate", ["500", "503"])
def test_a_busy_server_is_named_when_a_url_is_opened(
    fate: str, s3_server: S3Server, spoiled: SpoiledOptions
) -> None:
    config = {"retries": {"mode": "standard", "total_max_attempts": 1}}
    with spoiled(lambda number, method: fate) as options:
        with pytest.raises(OpenError, match=r"the server is busy or failed: try again in a while$"):
            open_backend(s3_server.url(uuid.uuid4().hex), **options, config_kwargs=config)


@pytest.mark.server
def test_a_real_driver_shows_that_a_refusal_is_not(s3_server: S3Server, spoiled: SpoiledOptions) -> None:
    url = s3_server.url(uuid.uuid4().hex)
    with spoiled(lambda number, method: "412" if method == "PUT" else None) as options:
        with open_backend(url, **options) as backend, pytest.raises(StorageError) as caught:
            backend.put("key", b"data")
    assert not caught.value.transient
