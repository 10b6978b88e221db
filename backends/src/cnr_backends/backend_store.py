"""A read-only Zarr ``Store`` over a backend, with which zarr-python opens what was written."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Never, Protocol, TypeVar

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from cnr_backends.errors import ArgumentError, ObjectNotFoundError, ObjectTooShortError, StorageError

Result = TypeVar("Result")

_READERS = 8


class ObjectReader(Protocol):
    """The methods of a backend that a store calls. `Backend` says what each one does."""

    @property
    def url(self) -> str: ...

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def get_suffix(self, key: str, length: int) -> bytes: ...

    def size(self, key: str) -> int: ...

    def list_names(self, prefix: str) -> list[str]: ...

    def list_keys(self, prefix: str) -> Iterator[tuple[str, int]]: ...


class BackendStore(Store):
    """A read-only Zarr store over a backend.

    Reads run in the store's own threads: in the event loop's default executor, nested reads would wait for threads
    that they occupy themselves. The store can be pickled if the backend can, and opens it again.

    Parameters
    ----------
    backend
        Where the objects are. It is not closed with the store.
    read_only
        Must be True. Zarr passes it on.

    Raises
    ------
    ArgumentError
        `read_only` is False.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, backend: ObjectReader, *, read_only: bool = True) -> None:
        if not read_only:
            raise ArgumentError(f"the Zarr store of {backend.url} is read-only; write through the backend")
        super().__init__(read_only=True)
        self.backend = backend
        self._readers: tuple[int, ThreadPoolExecutor] | None = None

    def __reduce__(self) -> tuple[type[BackendStore], tuple[ObjectReader]]:
        return type(self), (self.backend,)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BackendStore)
            and type(other.backend) is type(self.backend)
            and other.backend.url == self.backend.url
        )

    def __str__(self) -> str:
        return self.backend.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.backend!r})"

    def with_read_only(self, read_only: bool = False) -> BackendStore:
        return type(self)(self.backend, read_only=read_only)

    def close(self) -> None:
        super().close()
        if self._readers is not None:
            self._readers[1].shutdown(wait=False)
            self._readers = None

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        try:
            data = await self._in_thread(lambda: _read(self.backend, key, byte_range))
        except ObjectNotFoundError:
            return None
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))

    async def exists(self, key: str) -> bool:
        try:
            await self.getsize(key)
        except ObjectNotFoundError:
            return False
        return True

    async def getsize(self, key: str) -> int:
        return await self._in_thread(lambda: self.backend.size(key))

    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        folder = prefix.rpartition("/")[0]
        for key, _ in await self._in_thread(lambda: [*self.backend.list_keys(folder)]):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in await self._in_thread(lambda: self.backend.list_names(prefix)):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        self._refuse("set", key)

    async def delete(self, key: str) -> None:
        self._refuse("delete", key)

    def _refuse(self, operation: str, key: str) -> Never:
        raise StorageError(
            f"can't {operation} {key!r}: the Zarr store of {self.backend.url} is read-only; "
            "write through the backend",
            operation=operation,
            key=key,
            url=self.backend.url,
        )

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        process = os.getpid()
        if self._readers is None or self._readers[0] != process:  # threads don't survive a fork
            self._readers = process, ThreadPoolExecutor(_READERS, thread_name_prefix="cnr-store")
        return await asyncio.get_running_loop().run_in_executor(self._readers[1], call)


def zarr_store(backend: ObjectReader) -> Store:
    """Return a read-only Zarr ``Store`` over a backend.

    Parameters
    ----------
    backend
        Where the objects are. It is not closed with the store.
    """
    return BackendStore(backend)


def _read(backend: ObjectReader, key: str, byte_range: ByteRequest | None) -> bytes:
    """Read a byte range as Zarr defines it: one that reaches beyond the end returns the bytes that there are."""
    match byte_range:
        case None:
            return backend.get(key)
        case RangeByteRequest(start, end):
            try:
                return backend.get_range(key, start, end - start)
            except ObjectTooShortError:
                return _rest(backend, key, start)
        case OffsetByteRequest(offset):
            return _rest(backend, key, offset)
        case SuffixByteRequest(suffix):
            try:
                return backend.get_suffix(key, suffix)
            except ObjectTooShortError:
                return backend.get(key)
    raise ArgumentError(f"{byte_range!r} is not a byte range of Zarr")


def _rest(backend: ObjectReader, key: str, start: int) -> bytes:
    return backend.get_range(key, start, max(backend.size(key) - start, 0))
