"""A read-only Zarr store whose objects are computed when they are read: the base of all views of a version."""

from __future__ import annotations

import asyncio
import hashlib
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Never, TypeVar

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from cnr_backends import ObjectNotFoundError
from cnr_store.errors import OptionError, ReadOnlyError

T = TypeVar("T")
BytesLike = bytes | memoryview

_READ_THREADS = 8


class VirtualStore(Store):
    """Read-only Zarr store over three methods of a subclass: `nbytes`, `names` and `read`.

    Several threads call them at once. In one process at most eight objects are being read at any time, whatever the
    number of stores and callers.

    `read_only`: must be True; Zarr passes it.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, *, read_only: bool = True) -> None:
        if not read_only:
            raise OptionError("a version can't be opened for writing: versions never change")
        super().__init__(read_only=True)

    @abstractmethod
    def nbytes(self, key: str) -> int | None:
        """Size in bytes of the object at a key, or None if there is none. Reads no data."""

    @abstractmethod
    def names(self, folder: str) -> Iterable[str]:
        """Names of the objects and folders immediately under a folder; "" is the root. Empty if there is none."""

    @abstractmethod
    def read(self, key: str, start: int, stop: int) -> BytesLike:
        """Bytes start ... stop - 1 of an object that exists; 0 <= start <= stop <= its size."""

    def require(self, key: str, operation: str) -> int:
        """Size in bytes of the object at a key."""
        nbytes = self.nbytes(key)
        if nbytes is None:
            raise ObjectNotFoundError(
                f"no object {key!r} in {self}", operation=operation, key=key, url=str(self)
            )
        return nbytes

    def fingerprint(self, key: str) -> str:
        """A digest of an object's key and content."""
        return hashlib.blake2b(f"{self}\n{key}".encode(), digest_size=16).hexdigest()

    def keys_below(self, folder: str) -> Iterator[str]:
        """Keys of all objects below a folder, found one by one."""
        for name in self.names(folder):
            key = f"{folder}/{name}" if folder else name
            if self.nbytes(key) is None:
                yield from self.keys_below(key)
            else:
                yield key

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        nbytes = self.nbytes(key)
        if nbytes is None:
            return None
        data = self.read(key, *_bounds(byte_range, nbytes))
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await in_read_thread(lambda: self.get_sync(key, prototype=prototype, byte_range=byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        return self.nbytes(key) is not None

    async def getsize(self, key: str) -> int:
        return self.require(key, "size")

    async def list(self) -> AsyncIterator[str]:
        for key in self.keys_below(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in self.keys_below(prefix.rpartition("/")[0]):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in self.names(prefix.strip("/")):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        self._refuse(key)

    async def delete(self, key: str) -> None:
        self._refuse(key)

    def _refuse(self, key: str) -> Never:
        # Zarr's own words first: programs look for them.
        raise ReadOnlyError(
            f"{key}: store was opened in read-only mode and does not support writing; versions never change, save "
            "a new one instead"
        )


async def in_read_thread(call: Callable[[], T]) -> T:
    """Run a call that waits for storage and decodes, in one of the threads that read.

    asyncio's default executor would deadlock: the synchronous zarr reads in it wait for threads that they occupy.
    """
    return await asyncio.get_running_loop().run_in_executor(_read_threads, call)


def _start_read_threads() -> None:
    global _read_threads
    _read_threads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="cnr-reading")


_read_threads: ThreadPoolExecutor
_start_read_threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_read_threads)  # threads don't survive a fork


def _bounds(byte_range: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    """First byte and the one after the last. A range beyond the object's end is cut to what there is."""
    match byte_range:
        case None:
            start, stop = 0, nbytes
        case RangeByteRequest(start, stop):
            pass
        case OffsetByteRequest(start):
            stop = nbytes
        case SuffixByteRequest(suffix):
            start, stop = nbytes - suffix, nbytes
        case _:
            raise OptionError(f"Unexpected byte_range, got {byte_range!r}; give one of Zarr's byte requests")
    start = min(max(start, 0), nbytes)
    return start, min(max(stop, start), nbytes)
