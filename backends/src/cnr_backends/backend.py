"""The contract that every place for bytes fulfils."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar, Self, TypeAlias

from zarr.abc.store import Store

from cnr_backends.backend_store import zarr_store
from cnr_backends.errors import (
    ArgumentError,
    BackendError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StorageError,
    StorageFullError,
)
from cnr_backends.keys import check_key, check_prefix, is_key, is_name

BytesLike: TypeAlias = bytes | bytearray | memoryview
Pieces: TypeAlias = list[memoryview]

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class Backend(ABC):
    """Whole objects under "/"-separated keys.

    The public methods check keys and arguments and turn the failures of the underlying system into this
    distribution's errors. A new kind of backend implements the methods that begin with an underscore; they
    receive proper keys and may raise whatever `_failures` names. `testing.BackendConformance` checks all that
    is demanded here.

    Every method MUST be safe to call from several threads at once.

    Attributes
    ----------
    url : str
        Where the bytes are, for messages: no secrets.
    atomic_create : bool
        Whether, of several processes that `create` one key at the same time, exactly one succeeds.
    """

    url: str
    atomic_create: bool

    _failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """What the hooks raise when the underlying system fails."""

    def put(self, key: str, data: BytesLike | Sequence[BytesLike]) -> None:
        """Store an object, replacing what was there.

        It MUST be durable when this returns, and a concurrent reader MUST see the old object or the new one,
        whole. After an error either may be there.

        Parameters
        ----------
        key : str
        data : bytes-like, or a sequence of bytes-likes
            The object, or its pieces in order.

        Raises
        ------
        KeyNameError, StorageError, StorageFullError
        """
        check_key(key)
        pieces = _pieces(data)
        with self._guard("put", key):
            self._put(key, pieces)

    def create(self, key: str, data: bytes) -> None:
        """Store an object that MUST NOT exist yet. As durable and as whole as `put`.

        Where `atomic_create` is true exactly one of several concurrent callers MUST succeed. A backend whose
        answers can get lost decides by reading the object back: give `data` something unique (a random id),
        or two callers with equal bytes may both be told that they succeeded.

        Raises
        ------
        ObjectExistsError
            The key holds an object that is not ours. It is left as it is.
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

        Raises
        ------
        KeyNameError, ObjectNotFoundError, StorageError
        """
        check_key(key)
        with self._guard("get", key):
            return self._get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes beginning at byte `start`.

        Raises
        ------
        ObjectTooShortError
            The object ends before that.
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

        Raises
        ------
        ObjectTooShortError
            The object is smaller.
        KeyNameError, ArgumentError, ObjectNotFoundError, StorageError
        """
        check_key(key)
        if length < 0:
            raise ArgumentError(f"can't read the last {length} bytes of {key!r}: it must be 0 or more")
        with self._guard("get_suffix", key):
            data = self._get_suffix(key, length) if length else self._nothing(key)
        return self._exactly(data, length, "get_suffix", key, "at the end")

    def size(self, key: str) -> int:
        """Return an object's size in bytes.

        Raises
        ------
        KeyNameError, ObjectNotFoundError, StorageError
        """
        check_key(key)
        with self._guard("size", key):
            return self._size(key)

    def list_names(self, prefix: str) -> list[str]:
        """Return the names of the objects and folders immediately under ``prefix/``, sorted.

        "" is the root. It MUST show every object whose `put` or `create` has returned anywhere (nothing is
        cached), no deleted ones and no temporary ones. Folders are there because objects lie below them; one
        whose last object is gone SHOULD be gone too, though some S3 servers tidy up later. [] if there is none.

        Raises
        ------
        KeyNameError, StorageError
        """
        prefix = check_prefix(prefix)
        with self._guard("list_names", prefix):
            return sorted(set(filter(is_name, self._list_names(prefix))))

    def list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Iterate over (key, size in bytes) of every object below ``prefix/``, in any order.

        As consistent as `list_names`; what is written or deleted meanwhile may or may not appear.

        Raises
        ------
        KeyNameError, StorageError
        """
        return self._iterate_keys(check_prefix(prefix))

    def delete(self, key: str) -> None:
        """Remove an object, and the folders that it leaves empty. A missing object is fine.

        Raises
        ------
        KeyNameError, StorageError
        """
        check_key(key)
        with self._guard("delete", key):
            self._delete(key)

    def close(self) -> None:
        """Let go of connections. Closing twice is fine; using a closed backend is not."""
        return

    def zarr_store(self) -> Store:
        """Return ``cnr_backends.zarr_store(self)``."""
        return zarr_store(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def _put(self, key: str, pieces: Pieces) -> None:
        """Write the concatenated pieces."""

    @abstractmethod
    def _create(self, key: str, data: bytes) -> bool:
        """Write `data` and return True, or return False if the key exists."""

    @abstractmethod
    def _get(self, key: str) -> bytes:
        """Return the whole object."""

    @abstractmethod
    def _get_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` > 0 bytes from `start`, or fewer where the object ends."""

    @abstractmethod
    def _get_suffix(self, key: str, length: int) -> bytes:
        """Return the last `length` > 0 bytes, or all where the object is smaller."""

    @abstractmethod
    def _size(self, key: str) -> int:
        """Return the size in bytes."""

    @abstractmethod
    def _list_names(self, prefix: str) -> list[str]:
        """Return the child names in any order; [] if there is no such folder."""

    @abstractmethod
    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, size in bytes) below the folder; nothing if there is none."""

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Remove the object if it exists."""

    def _is_missing(self, error: Exception) -> bool:
        """Whether a failed read means that the object isn't there. A folder is not an object."""
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)

    def _advice(self, error: Exception) -> str:
        """What to do about `error`, as the end of a message."""
        return "check the storage and its permissions, then try again"

    def _nothing(self, key: str) -> bytes:
        self._size(key)  # a missing object is an error, even if nothing of it is wanted
        return b""

    def _exactly(self, data: bytes, length: int, operation: str, key: str, place: str) -> bytes:
        if len(data) == length:
            return data
        raise ObjectTooShortError(
            f"{key!r} in {self.url} is shorter than it should be: wanted {length} bytes {place}, there are "
            f"{len(data)}; the object is damaged or not the one that was written",
            operation=operation,
            key=key,
            url=self.url,
        )

    def _iterate_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._guard("list_keys", prefix):
            for key, size in self._list_keys(prefix):
                if is_key(key):
                    yield key, size

    @contextmanager
    def _guard(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except BackendError:
            raise
        except self._failures as error:
            raise self._translated(error, operation, key) from error

    def _translated(self, error: Exception, operation: str, key: str) -> BackendError:
        if operation in _READS and self._is_missing(error):
            return ObjectNotFoundError(
                f"no object {key!r} in {self.url}", operation=operation, key=key, url=self.url
            )
        kind = StorageError
        advice = self._advice(error)
        if getattr(error, "errno", None) in _NO_SPACE:
            kind, advice = StorageFullError, "free some space, then try again"
        reason = f"{type(error).__name__}: {error}"
        failure = kind(
            f"{operation} of {key!r} failed in {self.url} ({reason}); {advice}",
            operation=operation,
            key=key,
            url=self.url,
        )
        failure.errno = getattr(error, "errno", None)
        return failure


_READS = frozenset({"get", "get_range", "get_suffix", "size"})


def _pieces(data: BytesLike | Sequence[BytesLike]) -> Pieces:
    parts = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    views = [memoryview(part) for part in parts]
    return [view.cast("B") for view in views if view.nbytes]
