"""A read-only Zarr store whose objects are made when they are read: what all views of a version have in common."""

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
Made = bytes | memoryview

_READERS = 8


class ComputedStore(Store):
    """Read-only Zarr store over three questions that a subclass answers: `nbytes`, `names` and `read`.

    They are asked from several threads at once. At most eight objects are being read at any time in one process,
    whatever the number of stores and callers.

    Parameters
    ----------
    read_only
        Must be True; it is there because Zarr passes it on.

    Raises
    ------
    OptionError
        If `read_only` is False.
    """

    def __init__(self, *, read_only: bool = True) -> None:
        if not read_only:
            raise OptionError("a version can't be opened for writing: versions never change")
        super().__init__(read_only=True)

    @abstractmethod
    def nbytes(self, key: str) -> int | None:
        """Size in bytes of the object at a key, or None if there is none. Nothing is read for it."""

    @abstractmethod
    def names(self, folder: str) -> Iterable[str]:
        """Names of the objects and folders immediately under a folder; "" is the root. Empty if there is none."""

    @abstractmethod
    def read(self, key: str, start: int, stop: int) -> Made:
        """Bytes start ... stop - 1 of an object that is there; 0 <= start <= stop <= its size."""

    def fingerprint(self, key: str) -> str:
        """A digest that is another one for another object, or for the same with other bytes."""
        return hashlib.blake2b(f"{self}\n{key}".encode(), digest_size=16).hexdigest()

    def keys_below(self, folder: str) -> Iterator[str]:
        """Keys of all objects below a folder, found as they are asked for."""
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
        return await in_reader(lambda: self.get_sync(key, prototype=prototype, byte_range=byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        return self.nbytes(key) is not None

    async def getsize(self, key: str) -> int:
        nbytes = self.nbytes(key)
        if nbytes is None:
            raise ObjectNotFoundError(
                f"no object {key!r} in {self}", operation="size", key=key, url=str(self)
            )
        return nbytes

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

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    @property
    def supports_listing(self) -> bool:
        return True

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


async def in_reader(call: Callable[[], T]) -> T:
    """Run what blocks on storage and decodes, in one of the readers' threads.

    asyncio's default executor would not do: synchronous zarr reads beneath would wait for threads that they
    themselves occupy.
    """
    return await asyncio.get_running_loop().run_in_executor(_readers, call)


def _new_readers() -> None:
    global _readers
    _readers = _make_readers()


def _make_readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, thread_name_prefix="cnr-reading")


_readers = _make_readers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_readers)  # threads don't survive a fork


def _bounds(byte_range: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    """First byte and the one after the last, inside the object: a range beyond its end gives what there is."""
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
