"""A backend on any Zarr ``Store``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import TypeVar
from urllib.parse import quote, unquote

from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, ObjectStore

from cnr_backends.backend import Backend
from cnr_backends.pieces import Pieces
from cnr_backends.remote import OPERATION_SECONDS, SENT_BYTES_PER_SECOND

Result = TypeVar("Result")

_CONCURRENT_SIZES = 16


class ZarrBackend(Backend):
    """Stores objects in a Zarr store.

    `put` is as atomic and as durable as the store's ``set``. `create` checks whether the object exists, calls
    ``set_if_not_exists``, and reads the object back. Zarr's contract does not make that atomic, so `atomic_create` is
    False. It is True for an ``ObjectStore``, because obstore creates atomically or raises. An operation is cancelled
    after 300 seconds, and one more second for each MiB that it sends. A store may give up earlier.

    `store`: the store, which may be read-only. It is not closed with the backend.
    """

    # Stores raise errors of any kind. Those of obstore derive from Exception directly, so nothing narrower would do.
    _failures = (Exception,)

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = str(store)
        self.atomic_create = isinstance(store, ObjectStore)
        is_url = isinstance(store, FsspecStore) and store.path.startswith(("http://", "https://"))
        # fsspec joins keys to such a path as they are, but servers decode URLs, as in HttpBackend
        self._at: Callable[[str], str] = quote if is_url else str
        self._bare: Callable[[str], str] = unquote if is_url else str

    def __reduce__(self) -> tuple[type[ZarrBackend], tuple[Store]]:
        return type(self), (self.store,)

    def _put(self, key: str, pieces: Pieces) -> None:
        data = b"".join(pieces)
        _run(self.store.set(self._at(key), _buffer(data)), len(data))

    def _create(self, key: str, data: bytes) -> bool:
        if _run(self.store.exists(self._at(key))):
            return False
        _run(self.store.set_if_not_exists(self._at(key), _buffer(data)), len(data))
        return self._get(key) == data

    def _get(self, key: str) -> bytes:
        return self._read(key, None)

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        try:
            return self._read(key, RangeByteRequest(start, start + length))
        except self._failures as error:
            # Some stores raise for a range that begins beyond the end, each an error of its own.
            if not self._is_missing(error) and start >= self._size(key):
                return b""
            raise

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._read(key, SuffixByteRequest(length))

    def _size(self, key: str) -> int:
        # FsspecStore says that a folder has 0 bytes. Only reading tells it from an empty object.
        return _run(self.store.getsize(self._at(key))) or len(self._get(key))

    def _list_names(self, prefix: str) -> list[str]:
        found = _run(_collected(self.store.list_dir, self._at(prefix)))
        names = [self._bare(name).removesuffix("/") for name in found]
        if names == [prefix] and next(self._list_keys(prefix), None) is None:
            return []  # FsspecStore lists an object as if it were below itself
        return names

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        below = f"{prefix}/" if prefix else ""
        found = map(self._bare, _run(_collected(self.store.list_prefix, self._at(below))))
        keys = [key for key in found if key.startswith(below)]
        for key, size in zip(keys, _run(self._sizes(keys)), strict=True):
            if size is not None:
                yield key, size

    def _delete(self, key: str) -> None:
        if not isinstance(self.store, FsspecStore) or self.store.read_only:
            _run(self.store.delete(self._at(key)))
            return
        with suppress(FileNotFoundError):  # the store's `delete` takes a key with a "*" as a pattern
            _run(self.store.fs._rm_file(f"{self.store.path.rstrip('/')}/{self._at(key)}"))

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes:
        buffer = _run(self.store.get(self._at(key), default_buffer_prototype(), byte_range))
        if buffer is None:
            raise FileNotFoundError(key)
        return buffer.to_bytes()

    async def _sizes(self, keys: list[str]) -> list[int | None]:
        """The size of each object, None where it was deleted since it was listed."""
        gate = asyncio.Semaphore(_CONCURRENT_SIZES)

        async def size(key: str) -> int | None:
            async with gate:
                try:
                    return await self.store.getsize(self._at(key))
                except self._failures as error:
                    if self._is_missing(error):
                        return None
                    raise

        return await asyncio.gather(*map(size, keys))


def _run(work: Coroutine[object, object, Result], sent_bytes: int = 0) -> Result:
    """Run a store's coroutine on Zarr's event loop, which its connections belong to, within the time limit."""
    return sync(work, timeout=OPERATION_SECONDS + sent_bytes / SENT_BYTES_PER_SECOND)


async def _collected(listing: Callable[[str], AsyncIterator[str]], prefix: str) -> list[str]:
    """Call `listing` inside a running event loop, which some stores need."""
    return [item async for item in listing(prefix)]


def _buffer(data: bytes) -> Buffer:
    return default_buffer_prototype().buffer.from_bytes(data)
