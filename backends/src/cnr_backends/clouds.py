"""Backends on S3, Google's and Azure's storage, whose servers refuse a conditional write to a key that is taken."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from cnr_backends.errors import server_answer
from cnr_backends.remote import ANY_DRIVER_ERROR, FsspecBackend, has_create_mode

_LOST_CREATE = frozenset({"PreconditionFailed", "412"})
_CONFLICT = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})


class ConditionalBackend(FsspecBackend):
    """Stores objects on a server that decides which of several exclusive creates succeeds.

    A driver repeats a request whose answer it misses. If the first one arrived, the repeated one is refused, and the
    object's bytes tell whose it is. This class repeats requests that S3 answers with 409.
    """

    atomic_create = True

    _CREATE: ClassVar[Mapping[str, Any]]
    """What makes the filesystem's ``pipe_file`` send the condition, and raise FileExistsError where it fails."""

    _NEEDED: ClassVar[str] = ""
    """The first release of the driver whose ``pipe_file`` has ``mode="create"``, where that is what it takes."""

    _CONFLICT_WAITS_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)

    def _probe(self) -> None:
        if self._NEEDED and not has_create_mode(self._fs):
            driver = self._NEEDED.partition(" ")[0]
            raise ImportError(f"this {driver} has no exclusive writes; install {self._NEEDED} or newer")
        if not self._root.strip("/"):
            raise ValueError("there is no bucket or container in the URL")
        super()._probe()

    def _create(self, key: str, data: bytes) -> bool:
        for wait_seconds in (*self._CONFLICT_WAITS_SECONDS, None):
            try:
                self._call("pipe_file", self._at(key), data, sent_bytes=len(data), **self._CREATE)
                return True
            except ANY_DRIVER_ERROR as error:
                _, code = server_answer(error)
                if isinstance(error, FileExistsError) or code in _LOST_CREATE:
                    # Our own request is refused too, if it was repeated because the first answer got lost.
                    return self._holds(key, data)
                if code not in _CONFLICT or wait_seconds is None:
                    raise
            time.sleep(wait_seconds)
        raise AssertionError("unreachable")

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        try:
            return super()._get_range(key, start, length)
        except ANY_DRIVER_ERROR:
            if start < self._size(key):
                raise
            return b""  # drivers tell of a range beyond the end in different ways

    def _make_parent(self, path: str) -> None:
        """Do nothing: there are no folders, and to make one could make the bucket."""


class S3Backend(ConditionalBackend):
    """Stores objects on S3, or on a server that speaks its protocol and honours ``If-None-Match: *``.

    The driver repeats a request with growing pauses if it gets no answer, a server error (500, 502, 503, 504) or a
    request to slow down.

    By default a connection must be made within 10 seconds, a request must be answered within 60 seconds, each is tried
    4 times, and there are 32 connections. ``config_kwargs`` changes that.
    """

    _CREATE = {"mode": "create"}  # noqa: RUF012 - the base declares it as a ClassVar
    _NEEDED = "s3fs 2025.2"
    _CONFIG: ClassVar[dict[str, Any]] = {
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        "retries": {"mode": "standard", "total_max_attempts": 4},
    }

    def _driver_options(self) -> dict[str, Any]:
        config = {**self._CONFIG, **(self._options.get("config_kwargs") or {})}
        # One request reads an object: a size that was read before could be that of another version of it.
        return {"max_concurrency": 1, **self._options, "config_kwargs": config}

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._sliced(key, start, start + length)

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._sliced(key, -length, None)

    def _sliced(self, key: str, start: int, end: int | None) -> bytes:
        try:
            return bytes(self._call("cat_file", self._at(key), start=start, end=end))
        except OSError as error:
            if server_answer(error)[1] in ("InvalidRange", "416"):
                return b""  # the range begins beyond the end
            raise

    def _is_missing(self, error: Exception) -> bool:
        return super()._is_missing(error) and server_answer(error)[1] != "NoSuchBucket"

    def _advice(self, error: Exception) -> str:
        _, code = server_answer(error)
        if code == "NoSuchBucket":
            return f"there is no bucket {self._root.split('/')[0]!r}; make it, or correct the URL"
        if isinstance(error, PermissionError) or code or type(error).__name__ == "NoCredentialsError":
            return "check the credentials (key and secret, or the AWS environment) and their permissions"
        return "check that the server is up and that endpoint_url is right"


class GcsBackend(ConditionalBackend):
    """Stores objects on Google Cloud Storage, where a create asks for generation 0: that no object is there."""

    _CREATE = {"mode": "create"}  # noqa: RUF012 - the base declares it as a ClassVar
    _NEEDED = "gcsfs 2024.12"

    def _advice(self, error: Exception) -> str:
        return "check the bucket, the credentials (token, or Google's environment) and their permissions"


class AbfsBackend(ConditionalBackend):
    """Stores objects on Azure Blob Storage, where a create sends ``If-None-Match: *``."""

    _CREATE = {"overwrite": False}  # noqa: RUF012 - the base declares it as a ClassVar

    def _advice(self, error: Exception) -> str:
        return (
            "check the container, the credentials (account_name, account_key and so on) and their permissions"
        )
