"""The contract of every backend, and a backend that passes every operation on to another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Self, TypeVar

from zarr.abc.store import Store

from cnr_backends.backend_store import zarr_store
from cnr_backends.errors import (
    ArgumentError,
    Guarded,
    ObjectExistsError,
    ObjectTooShortError,
    StorageError,
    StorageFullError,
)
from cnr_backends.keys import check_key, check_prefix, is_key, is_name
from cnr_backends.pieces import BytesLike, Pieces, as_pieces

Result = TypeVar("Result")


class Room:
    """The part of every backend that holds room back for small objects, and minds folders and syncs.

    Here it does nothing, as on object stores.

    A backend that passes operations on to another one passes these on as well.
    """

    def hold_reserve(self) -> None:
        """Hold some room back, if the storage can fill up and has room. A failure is no error."""
        return

    def shrink_reserve(self) -> bool:
        """Give up a part of the room that is held back. Return whether there was any."""
        return False

    def prepare(self, key: str) -> None:
        """Make the folder of an object that will be put, which then takes less time. A failure is no error.

        Parameters
        ----------
        key
            Of the object.
        """
        return

    def sweep(self, prefix: str) -> None:
        """Remove what crashed writers left below ``prefix/`` that is no object: temporary files, empty folders.

        Parameters
        ----------
        prefix
            A folder that nobody writes to any more. Its objects are left as they are.
        """
        return

    def confirm(self, key: str) -> None:
        """Make an object durable that is there although its write has failed, as where only the last sync did.

        Parameters
        ----------
        key
            Of the object.

        Raises
        ------
        StorageError
            It may be lost in a crash.
        """
        return

    def with_reserve(self, write: Callable[[], Result]) -> Result:
        """Return ``write()``. While the storage is full, give up some of the reserve and try again.

        Parameters
        ----------
        write
            Writes a small object.

        Raises
        ------
        StorageFullError
            There is no room without the reserve either.
        """
        while True:
            try:
                return write()
            except StorageFullError:
                if not self.shrink_reserve():
                    raise


class Backend(Guarded, Room, ABC):
    """Stores whole objects under "/"-separated keys.

    The public methods check keys and arguments, and raise this distribution's errors for failures of the
    underlying system. A new kind of backend implements the methods that begin with an underscore. They get valid
    keys, and may raise what `_failures` names. `testing.BackendConformance` tests this contract.

    Every method MUST be safe to call from several threads at once.

    Attributes
    ----------
    url
        Where the objects are, without secrets. Messages show it.
    atomic_create
        Whether exactly one of several processes succeeds that `create` one key at the same time.
    """

    atomic_create: bool

    def put(self, key: str, data: BytesLike | Sequence[BytesLike]) -> None:
        """Store an object, and replace the one that was there.

        The object MUST be durable when this returns. A concurrent reader MUST see either the old object or the new
        one, whole. After an error either may be stored.

        Parameters
        ----------
        key
            Where to store it.
        data
            The object, or its pieces in order.

        Raises
        ------
        KeyNameError, StorageError, StorageFullError
        """
        check_key(key)
        pieces = as_pieces(data)
        with self._guard("put", key):
            self._put(key, pieces)

    def begin_put(self, key: str, data: BytesLike | Sequence[BytesLike]) -> Generator[None, None, None]:
        """Begin to `put` an object. What waits for the storage is done as the generator is exhausted, by any thread.

        A generator that is closed before its end MUST leave the key as it was.

        Parameters
        ----------
        key, data
            As for `put`. The pieces must not change before the end.

        Raises
        ------
        KeyNameError, StorageError, StorageFullError
            Here, or as the generator is exhausted.
        """
        check_key(key)

        def putting() -> Generator[None, None, None]:
            with self._guard("put", key):
                yield from self._begin_put(key, as_pieces(data))

        begun = putting()
        next(begun)
        return begun

    def create(self, key: str, data: bytes) -> None:
        """Store an object that MUST NOT exist yet, as durably and as whole as `put` does.

        Where `atomic_create` is true, exactly one of several concurrent callers MUST succeed. A backend whose
        answers can get lost decides by reading the object back. So put something unique into `data`, such as a
        random id: otherwise two callers with equal bytes may both succeed.

        Parameters
        ----------
        key
            Where to store it.
        data
            The object.

        Raises
        ------
        ObjectExistsError
            Another writer's object is stored under the key. It is left as it is.
        KeyNameError, StorageError, StorageFullError
        """
        check_key(key)
        with self._guard("create", key):
            created = self._create(key, bytes(data))
        if not created:
            raise ObjectExistsError(
                f"{key!r} exists already in {self.url}; another writer was first",
                operation="create",
                key=key,
                url=self.url,
            )

    def get(self, key: str) -> bytes:
        """Return a whole object.

        Parameters
        ----------
        key
            Where it is stored.

        Raises
        ------
        KeyNameError, ObjectNotFoundError, StorageError
        """
        check_key(key)
        with self._guard("get", key):
            return self._get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from byte `start` on.

        Parameters
        ----------
        key
            Where the object is stored.
        start, length
            The bytes, 0 or more each.

        Raises
        ------
        ObjectTooShortError
            The object ends before the last of these bytes.
        KeyNameError, ArgumentError, ObjectNotFoundError, StorageError
        """
        check_key(key)
        if start < 0 or length < 0:
            raise ArgumentError(
                f"can't read {length} bytes from byte {start} of {key!r}: both must be 0 or more"
            )
        with self._guard("get_range", key):
            data = self._get_range(key, start, length) if length else self._nothing(key)
        return self._exactly(data, length, "get_range", key, f"from byte {start}")

    def get_suffix(self, key: str, length: int) -> bytes:
        """Return exactly the last `length` bytes.

        Parameters
        ----------
        key
            Where the object is stored.
        length
            The number of bytes, 0 or more.

        Raises
        ------
        ObjectTooShortError
            The object has fewer bytes.
        KeyNameError, ArgumentError, ObjectNotFoundError, StorageError
        """
        check_key(key)
        if length < 0:
            raise ArgumentError(
                f"can't read the last {length} bytes of {key!r}: the length must be 0 or more"
            )
        with self._guard("get_suffix", key):
            data = self._get_suffix(key, length) if length else self._nothing(key)
        return self._exactly(data, length, "get_suffix", key, "at the end")

    def size(self, key: str) -> int:
        """Return an object's size in bytes.

        Parameters
        ----------
        key
            Where it is stored.

        Raises
        ------
        KeyNameError, ObjectNotFoundError, StorageError
        """
        check_key(key)
        with self._guard("size", key):
            return self._size(key)

    def list_names(self, prefix: str) -> list[str]:
        """Return the names of the objects and folders immediately below ``prefix/``, sorted; [] if there are none.

        The listing MUST have every object whose `put` or `create` has returned anywhere, because nothing is cached.
        It MUST have no deleted and no temporary ones. A folder is listed because objects are below it. Once its last
        object is deleted it SHOULD not be listed, though some S3 servers remove it later.

        Parameters
        ----------
        prefix
            The folder; "" is the root.

        Raises
        ------
        KeyNameError, StorageError
        """
        prefix = check_prefix(prefix)
        with self._guard("list_names", prefix):
            return sorted(set(filter(is_name, self._list_names(prefix))))

    def list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Iterate over (key, size in bytes) of every object below ``prefix/``, in any order.

        The listing is as consistent as that of `list_names`. Objects that are written or deleted meanwhile may appear
        or not.

        Parameters
        ----------
        prefix
            The folder; "" is the root.

        Raises
        ------
        KeyNameError, StorageError
        """
        return self._iterate_keys(check_prefix(prefix))

    def delete(self, key: str) -> None:
        """Delete an object, and the folders that it leaves empty. The object may be missing.

        Parameters
        ----------
        key
            Where it is stored.

        Raises
        ------
        KeyNameError, StorageError
        """
        check_key(key)
        with self._guard("delete", key):
            self._delete(key)

    def close(self) -> None:
        """Release connections. A backend may be closed twice, but must not be used afterwards."""
        return

    def zarr_store(self) -> Store:
        """Return a read-only Zarr store over this backend, as ``cnr_backends.zarr_store`` does."""
        return zarr_store(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def _put(self, key: str, pieces: Pieces) -> None:
        """Write the concatenated pieces."""

    def _begin_put(self, key: str, pieces: Pieces) -> Generator[None, None, None]:
        """Write the concatenated pieces; up to the one step, what takes the processor."""
        yield
        self._put(key, pieces)

    @abstractmethod
    def _create(self, key: str, data: bytes) -> bool:
        """Write `data` and return True, or return False if the key exists."""

    @abstractmethod
    def _get(self, key: str) -> bytes:
        """Return the whole object."""

    @abstractmethod
    def _get_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` > 0 bytes from `start` on, or fewer where the object ends."""

    @abstractmethod
    def _get_suffix(self, key: str, length: int) -> bytes:
        """Return the last `length` > 0 bytes, or all where the object has fewer."""

    @abstractmethod
    def _size(self, key: str) -> int:
        """Return the size in bytes."""

    @abstractmethod
    def _list_names(self, prefix: str) -> list[str]:
        """Return the names in a folder in any order; [] if there is no such folder."""

    @abstractmethod
    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, size in bytes) of the objects below a folder; nothing if there is no such folder."""

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Delete the object if it exists."""

    def _nothing(self, key: str) -> bytes:
        self._size(key)  # a missing object is an error, even if no bytes of it are wanted
        return b""

    def _exactly(self, data: bytes, length: int, operation: str, key: str, place: str) -> bytes:
        if len(data) == length:
            return data
        if len(data) > length:
            raise StorageError(
                f"{operation} of {key!r} failed in {self.url}: {length} bytes {place} were requested, and {len(data)} "
                "came, so the server ignores Range requests; use one that answers them, or copy the store to a folder",
                operation=operation,
                key=key,
                url=self.url,
            )
        raise ObjectTooShortError(
            f"{key!r} in {self.url} is too short: {length} bytes {place} were requested, there are {len(data)}; "
            "the object is damaged, or not the one that was written",
            operation=operation,
            key=key,
            url=self.url,
        )

    def _iterate_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._guard("list_keys", prefix):
            for key, size in self._list_keys(prefix):
                if is_key(key):
                    yield key, size


CHANGES = frozenset({"put", "create", "delete"})
"""The operations that change what is stored; the others read."""


class WrapperBackend(Backend):
    """Passes every operation on to another backend; a subclass says in `_pass` and `_place` what is done otherwise.

    Parameters
    ----------
    inner
        The backend that stores the objects.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.url = inner.url
        self.atomic_create = inner.atomic_create

    def close(self) -> None:
        self.inner.close()

    def hold_reserve(self) -> None:
        self.inner.hold_reserve()

    def shrink_reserve(self) -> bool:
        return self.inner.shrink_reserve()

    def prepare(self, key: str) -> None:
        self.inner.prepare(self._place("prepare", key))

    def sweep(self, prefix: str) -> None:
        self.inner.sweep(self._place("sweep", prefix))

    def confirm(self, key: str) -> None:
        self.inner.confirm(self._place("confirm", key))

    def _pass(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        """Do an operation: `call` passes it on. `operation` is the name of the public method."""
        return call()

    def _place(self, operation: str, key: str) -> str:
        """Return the key, or the prefix, that the other backend is given."""
        return key

    def _put(self, key: str, pieces: Pieces) -> None:
        self._pass("put", key, lambda: self.inner.put(self._place("put", key), pieces))

    def _create(self, key: str, data: bytes) -> bool:
        self._pass("create", key, lambda: self.inner.create(self._place("create", key), data))
        return True

    def _delete(self, key: str) -> None:
        self._pass("delete", key, lambda: self.inner.delete(self._place("delete", key)))

    def _get(self, key: str) -> bytes:
        return self._pass("get", key, lambda: self.inner.get(self._place("get", key)))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        at = self._place("get_range", key)
        return self._pass("get_range", key, lambda: self.inner.get_range(at, start, length))

    def _get_suffix(self, key: str, length: int) -> bytes:
        at = self._place("get_suffix", key)
        return self._pass("get_suffix", key, lambda: self.inner.get_suffix(at, length))

    def _size(self, key: str) -> int:
        return self._pass("size", key, lambda: self.inner.size(self._place("size", key)))

    def _list_names(self, prefix: str) -> list[str]:
        at = self._place("list_names", prefix)
        return self._pass("list_names", prefix, lambda: self.inner.list_names(at))

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        at = self._place("list_keys", prefix)
        found = self._pass("list_keys", prefix, lambda: self.inner.list_keys(at))
        return ((prefix + key[len(at) :], size) for key, size in found)
