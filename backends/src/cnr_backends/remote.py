"""Backends on fsspec filesystems, and in this process's memory."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterator
from typing import Any, ClassVar
from urllib.parse import quote, unquote
from weakref import WeakSet

from fsspec.asyn import sync
from fsspec.core import url_to_fs
from fsspec.exceptions import FSTimeoutError

from cnr_backends.backend import Backend
from cnr_backends.errors import OpenError
from cnr_backends.pieces import Pieces
from cnr_backends.urls import missing_package, without_secrets

# Drivers raise exceptions of their own. Those of botocore and aiohttp derive from Exception directly, so nothing
# narrower would catch a lost connection.
ANY_DRIVER_ERROR = (Exception,)

OPERATION_SECONDS = 300.0
SENT_BYTES_PER_SECOND = 1 << 20

_ALIVE: WeakSet[FsspecBackend] = WeakSet()
_INHERITED: list[object] = []


class FsspecBackend(Backend):
    """Stores objects on a filesystem of fsspec.

    `put` and `create` are as atomic and as durable as the filesystem's ``pipe_file``: that of object stores is both,
    that of ``sftp`` and its like is neither. `create` uses ``mode="create"`` where the filesystem has it, and reads the
    object back. Between processes this guarantees nothing, so `atomic_create` is False.

    Listings are never cached and filesystem instances never shared: a forked process makes its own connection.

    An operation that hangs is cancelled, so that no save waits for ever. Drivers limit the wait for an answer, but not
    all of them limit the wait for a server that stops receiving.

    `url`: an fsspec URL without "::" chains.
    `options`: storage options, passed to the filesystem. ``operation_seconds`` is not passed on: it limits the seconds
    of one operation, repetitions included, and one more second is added for each MiB that it sends; default 300. It
    works on asynchronous filesystems, which all object stores are.
    """

    atomic_create = False
    _failures = ANY_DRIVER_ERROR

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = without_secrets(url)
        self._address = url
        self._options = {name: value for name, value in options.items() if name != "operation_seconds"}
        self._operation_seconds = options.get("operation_seconds", OPERATION_SECONDS)
        self._connection: tuple[int, Any] | None = None
        self._lock = threading.Lock()
        _ALIVE.add(self)
        try:
            self._operation_seconds = checked_seconds(self._operation_seconds)
            self._root = self._connect()[1].rstrip("/")
            self._probe()
        except ImportError as error:
            raise OpenError(f"can't open {self.url}: {missing_package(url, error)}", url=self.url) from error
        except (TypeError, ValueError) as error:
            advice = "check the URL" + (f" and the storage options {sorted(options)}" if options else "")
            raise OpenError(f"can't open {self.url}: {error}; {advice}", url=self.url) from error
        except ANY_DRIVER_ERROR as error:
            reason = f"listing it failed ({type(error).__name__}: {error}); {self._ending(error)}"
            raise OpenError(f"can't open {self.url}: {reason}", url=self.url) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self._address,
            {**self._options, "operation_seconds": self._operation_seconds},
        )

    def close(self) -> None:
        with self._lock:
            self._connection = None

    @property
    def _fs(self) -> Any:
        """The filesystem of this process. Event loops and sockets don't survive a fork."""
        connection = self._connection
        if connection is not None and connection[0] == os.getpid():
            return connection[1]
        return self._connect()[0]

    def _connect(self) -> tuple[Any, str]:
        with self._lock:
            options = {
                **self._driver_options(),
                "use_listings_cache": False,
                "skip_instance_cache": True,
            }
            fs, root = url_to_fs(self._address, **options)
            self._connection = os.getpid(), fs
            return fs, root

    def _driver_options(self) -> dict[str, Any]:
        """Return the storage options, with this kind of filesystem's defaults."""
        return self._options

    def _call(self, method: str, *arguments: Any, sent_bytes: int = 0, **options: Any) -> Any:
        """Call a method of the filesystem. Raise TimeoutError if it takes longer than an operation may."""
        fs = self._fs
        if not fs.async_impl or fs.asynchronous:
            return getattr(fs, method)(*arguments, **options)
        seconds = self._operation_seconds + sent_bytes / SENT_BYTES_PER_SECOND
        try:
            return sync(fs.loop, getattr(fs, f"_{method}"), *arguments, timeout=seconds, **options)
        except FSTimeoutError as error:
            raise TimeoutError(
                f"it took more than {seconds:.0f} seconds; raise the option operation_seconds if the network is slow"
            ) from error

    def _probe(self) -> None:
        """List the root once, which shows at once whether the server, the bucket or the credentials are wrong."""
        self._list_names("")

    def _put(self, key: str, pieces: Pieces) -> None:
        path = self._at(key)
        self._make_parent(path)
        data = b"".join(pieces)
        self._call("pipe_file", path, data, sent_bytes=len(data))

    def _create(self, key: str, data: bytes) -> bool:
        path, mode = self._at(key), {"mode": "create"} if has_create_mode(self._fs) else {}
        if self._call("exists", path):
            return False
        self._make_parent(path)
        try:
            self._call("pipe_file", path, data, sent_bytes=len(data), **mode)
        except FileExistsError:
            return False
        return self._holds(key, data)

    def _get(self, key: str) -> bytes:
        return bytes(self._call("cat_file", self._at(key)))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self._call("cat_file", self._at(key), start=start, end=start + length))

    def _get_suffix(self, key: str, length: int) -> bytes:
        size = self._size(key)
        return self._get_range(key, max(size - length, 0), min(length, size)) if size else b""

    def _size(self, key: str) -> int:
        info = self._call("info", self._at(key))
        if info["type"] != "file":
            raise IsADirectoryError(key)
        if info["size"] is None:  # an HTTP server need not tell
            raise OSError("the server does not tell the size of this object, which reading it needs")
        return int(info["size"])

    def _list_names(self, prefix: str) -> list[str]:
        folder = self._at(prefix)
        try:
            entries = self._call("ls", folder, detail=True)
        except ANY_DRIVER_ERROR as error:
            if self._is_missing(error):
                return []
            raise
        inside = f"{self._bare(folder)}/"
        names = (self._bare(entry["name"]) for entry in entries)
        return [name.removeprefix(inside) for name in names if name.startswith(inside)]

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        try:
            found = self._call("find", self._at(prefix), detail=True)
        except ANY_DRIVER_ERROR as error:
            if self._is_missing(error):
                return
            raise
        if not isinstance(found, dict):  # adlfs, where the prefix is an object
            return
        root = f"{self._bare(self._root)}/"
        below = f"{prefix}/" if prefix else ""
        for name, info in found.items():
            key = self._bare(name).removeprefix(root)
            if key.startswith(below) and info["type"] == "file":
                size = info["size"]  # None on pages of HTTP servers
                yield key, self._size(key) if size is None else int(size)

    def _delete(self, key: str) -> None:
        try:
            self._call("rm_file", self._at(key))
        except ANY_DRIVER_ERROR as error:
            if not self._is_missing(error):
                raise

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _bare(self, path: str) -> str:
        """Return a path of the filesystem in the form in which paths are compared."""
        return "/" + path.strip("/") if path.strip("/") else ""

    def _make_parent(self, path: str) -> None:
        self._call("makedirs", path.rpartition("/")[0], exist_ok=True)

    def _holds(self, key: str, data: bytes) -> bool:
        """Whether the object has the bytes that this caller wrote."""
        return self._get(key) == data


class HttpBackend(FsspecBackend):
    """Stores objects behind URLs, which servers decode: the key ``a%20b`` is at ``.../a%2520b``.

    The pages that list a folder hold such URLs, too.
    """

    def _at(self, key: str) -> str:
        return super()._at(quote(key))

    def _bare(self, path: str) -> str:
        return unquote(super()._bare(path))


class MemoryBackend(FsspecBackend):
    """Stores objects in this process's memory. Backends of the same ``memory://`` URL share them."""

    atomic_create = True

    _writing: ClassVar[threading.Lock] = threading.Lock()
    """fsspec checks and writes in two steps. There is one lock because there is one memory per process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_memory, (os.getpid(), self._address, self._options)

    def _list_names(self, prefix: str) -> list[str]:
        with self._writing:  # fsspec walks through its dictionary of files
            return super()._list_names(prefix)

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._writing:
            return iter(list(super()._list_keys(prefix)))

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


def checked_seconds(seconds: Any) -> float:
    """Return `seconds`, if it is a positive number. `ValueError` if it is not."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"operation_seconds must be a positive number, got {seconds!r}")
    return float(seconds)


def has_create_mode(fs: Any) -> bool:
    """Whether the filesystem has ``mode="create"``. Its signature tells, because drivers ignore unknown options."""
    method = getattr(fs, "_pipe_file", None) or fs.pipe_file
    return "mode" in inspect.signature(method).parameters


def _after_fork_in_child() -> None:
    """Keep the parent's connections for ever, unused, and replace all locks.

    A collected connection would be closed. That would remove the parent's sockets from the event queue that parent and
    child share, and the parent would wait for ever. Locks may be held by threads that the child does not have.
    """
    MemoryBackend._writing = threading.Lock()
    for backend in list(_ALIVE):
        _INHERITED.append(backend._connection)
        backend._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _reopen_memory(process: int, url: str, options: dict[str, Any]) -> MemoryBackend:
    if process != os.getpid():
        raise OpenError(
            f"can't open {url} here: its objects are in the memory of process {process}; use a folder instead"
        )
    return MemoryBackend(url, options)
