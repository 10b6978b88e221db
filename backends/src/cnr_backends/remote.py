"""Any fsspec filesystem, and those whose exclusive create is known to hold: memory and S3."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from fsspec.core import url_to_fs

from cnr_backends.backend import Backend, Pieces
from cnr_backends.errors import BackendError, OpenError
from cnr_backends.urls import without_secrets

# Drivers raise their own kinds of exceptions (botocore's and aiohttp's derive from Exception only), so
# nothing narrower would catch a lost connection.
_ANY_DRIVER_ERROR = (Exception,)


class FsspecBackend(Backend):
    """Objects on a filesystem of fsspec.

    `put` and `create` are as atomic and as durable as the filesystem's own ``pipe_file``: object stores do
    well, ``sftp`` and its like don't. `create` uses ``mode="create"`` where there is such a mode, and reads
    the object back; between processes that is not a guarantee, so `atomic_create` is False.

    Listings are never cached and instances never shared: a forked process makes its own connection.

    Parameters
    ----------
    url : str
        An fsspec URL without "::" chains.
    options : mapping
        Storage options, passed to the filesystem.

    Raises
    ------
    OpenError
        If the protocol is unknown or its package is missing, an option is wrong, or listing the root fails.
    """

    atomic_create = False
    _failures = _ANY_DRIVER_ERROR
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = without_secrets(url)
        self._address = url
        self._options = options
        self._connections: dict[int, Any] = {}
        self._lock = threading.Lock()
        try:
            self._root = self._connect()[1].rstrip("/")
        except ImportError as error:
            raise OpenError(f"can't open {self.url}: {error}", url=self.url) from error
        except _ANY_DRIVER_ERROR as error:
            raise OpenError(
                f"can't open {self.url}: {error}; check the protocol and the options {sorted(options)}",
                url=self.url,
            ) from error
        try:
            self._probe()
        except _ANY_DRIVER_ERROR as error:
            raise OpenError(
                f"can't open {self.url}: listing it failed ({type(error).__name__}: {error}); "
                f"{self._advice(error)}",
                url=self.url,
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._address, self._options)

    def close(self) -> None:
        with self._lock:
            self._connections.clear()

    @property
    def _fs(self) -> Any:
        """The filesystem of this process: neither event loops nor sockets survive a fork."""
        fs = self._connections.get(os.getpid())
        return self._connect()[0] if fs is None else fs

    def _connect(self) -> tuple[Any, str]:
        with self._lock:
            options = {
                **self._defaults,
                **self._options,
                "use_listings_cache": False,
                "skip_instance_cache": True,
            }
            fs, root = url_to_fs(self._address, **options)
            self._connections = {os.getpid(): fs}
            return fs, root

    def _probe(self) -> None:
        self._list_names("")

    def _put(self, key: str, pieces: Pieces) -> None:
        path = self._at(key)
        self._make_parent(path)
        self._fs.pipe_file(path, b"".join(pieces))

    def _create(self, key: str, data: bytes) -> bool:
        fs, path = self._fs, self._at(key)
        if fs.exists(path):
            return False
        self._make_parent(path)
        try:
            fs.pipe_file(path, data, **({"mode": "create"} if _has_create_mode(fs) else {}))
        except FileExistsError:
            return False
        return self._holds(key, data)

    def _get(self, key: str) -> bytes:
        return bytes(self._fs.cat_file(self._at(key)))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self._fs.cat_file(self._at(key), start=start, end=start + length))

    def _get_suffix(self, key: str, length: int) -> bytes:
        size = self._size(key)
        return self._get_range(key, max(size - length, 0), min(length, size)) if size else b""

    def _size(self, key: str) -> int:
        info = self._fs.info(self._at(key))
        if info["type"] != "file":
            raise IsADirectoryError(key)
        return int(info["size"])

    def _list_names(self, prefix: str) -> list[str]:
        folder = self._at(prefix)
        try:
            entries = self._fs.ls(folder, detail=True)
        except _ANY_DRIVER_ERROR as error:
            if self._is_missing(error):
                return []
            raise
        inside = f"{self._bare(folder)}/"
        names = (self._bare(entry["name"]) for entry in entries)
        return [name.removeprefix(inside) for name in names if name.startswith(inside)]

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        try:
            found = self._fs.find(self._at(prefix), detail=True)
        except _ANY_DRIVER_ERROR as error:
            if self._is_missing(error):
                return
            raise
        root = f"{self._bare(self._root)}/"
        below = f"{prefix}/" if prefix else ""
        for name, info in found.items():
            key = self._bare(name).removeprefix(root)
            if key.startswith(below) and info["type"] == "file":
                yield key, int(info["size"])

    def _delete(self, key: str) -> None:
        try:
            self._fs.rm_file(self._at(key))
        except _ANY_DRIVER_ERROR as error:
            if not self._is_missing(error):
                raise

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _bare(self, path: str) -> str:
        """Return a path of the filesystem in the one form that names are compared in."""
        return "/" + path.strip("/") if path.strip("/") else ""

    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _holds(self, key: str, data: bytes) -> bool:
        """Whether the object is what this caller wrote."""
        return self._get(key) == data


class MemoryBackend(FsspecBackend):
    """Objects in this process's memory, shared by all who open the same ``memory://`` URL."""

    atomic_create = True

    _writing: ClassVar[threading.Lock] = threading.Lock()
    """fsspec checks and writes in two steps; its memory is one per process, and so is this lock."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_memory, (os.getpid(), self._address, self._options)

    def _put(self, key: str, pieces: Pieces) -> None:
        with self._writing:
            self._fs.pipe_file(self._at(key), b"".join(pieces))

    def _create(self, key: str, data: bytes) -> bool:
        with self._writing:
            if self._fs.exists(self._at(key)):
                return False
            self._fs.pipe_file(self._at(key), data)
            return True

    def _delete(self, key: str) -> None:
        with self._writing:
            super()._delete(key)


class S3Backend(FsspecBackend):
    """Objects on S3, or a server that speaks its protocol and honours ``If-None-Match: *``."""

    atomic_create = True
    # One request reads an object: a size asked for beforehand could be that of another version of it.
    _defaults: ClassVar[dict[str, Any]] = {"max_concurrency": 1}

    _CONFLICT_WAITS_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)

    def _probe(self) -> None:
        if not self._root.strip("/"):
            raise ValueError("there is no bucket in the URL")
        if not _has_create_mode(self._fs):
            raise ImportError("this s3fs has no exclusive writes; install s3fs 2025.2 or newer")
        super()._probe()

    def _create(self, key: str, data: bytes) -> bool:
        for wait_seconds in (*self._CONFLICT_WAITS_SECONDS, None):
            try:
                self._fs.pipe_file(self._at(key), data, mode="create")
                return True
            except _ANY_DRIVER_ERROR as error:
                if isinstance(error, FileExistsError) or _code(error) in _LOST_CREATE:
                    # Also the answer to our own request, repeated because the first answer got lost.
                    return self._holds(key, data)
                if _code(error) not in _CONFLICT or wait_seconds is None:
                    raise
            time.sleep(wait_seconds)
        raise AssertionError("unreachable")

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._sliced(key, start, start + length)

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._sliced(key, -length, None)

    def _sliced(self, key: str, start: int, end: int | None) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._at(key), start=start, end=end))
        except OSError as error:
            if _code(error) in ("InvalidRange", "416"):
                return b""  # it begins beyond the end
            raise

    def _make_parent(self, path: str) -> None:
        """There are no folders, and making one would make the bucket."""

    def _is_missing(self, error: Exception) -> bool:
        return super()._is_missing(error) and _code(error) != "NoSuchBucket"

    def _advice(self, error: Exception) -> str:
        code = _code(error)
        if code == "NoSuchBucket":
            return f"there is no bucket {self._root.split('/')[0]!r}; make it, or correct the URL"
        if isinstance(error, PermissionError) or code or type(error).__name__ == "NoCredentialsError":
            return "check the credentials (key and secret, or the AWS environment) and their permissions"
        return "check that the server is up and that endpoint_url is right"


_LOST_CREATE = frozenset({"PreconditionFailed", "412"})
_CONFLICT = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})


def _code(error: BaseException | None) -> str:
    """Return the code that an S3 server answered with, or ""."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def _has_create_mode(fs: Any) -> bool:
    """Whether the filesystem itself, not a driver that ignores unknown options, knows ``mode="create"``."""
    method = getattr(fs, "_pipe_file", None) or fs.pipe_file
    return "mode" in inspect.signature(method).parameters


def _reopen_memory(process: int, url: str, options: dict[str, Any]) -> BackendError | MemoryBackend:
    if process != os.getpid():
        raise OpenError(
            f"can't open {url} here: its objects are in the memory of process {process}; use a folder"
        )
    return MemoryBackend(url, options)
