"""Storage that stops taking writes in the middle of a save."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from cnr_backends import Backend, StorageError
from cnr_store.format.layout import VERSIONS, VersionId, record_key


class FailingBackend(Backend):
    """Another backend; no write succeeds from the second object on of the save that follows `after` commits.

    `version` names the save that was hit, once one was.
    """

    def __init__(self, inner: Backend, after: int) -> None:
        self.url = inner.url
        self.atomic_create = inner.atomic_create
        self.version: str | None = None
        self._inner = inner
        self._after = after
        self._begun: set[str] = set()
        self._committed: set[str] = set()

    def _put(self, key: str, pieces: list[memoryview]) -> None:
        self._check("put", key)
        self._inner.put(key, pieces)

    def _create(self, key: str, data: bytes) -> bool:
        self._check("create", key)
        self._inner.create(key, data)
        return True

    def _delete(self, key: str) -> None:
        self._check("delete", key)
        self._inner.delete(key)

    def _check(self, operation: str, key: str) -> None:
        version = key.split("/")[1] if key.startswith(f"{VERSIONS}/") else ""
        if self.version is None and VersionId.parse(version):
            if version in self._begun and len(self._committed) >= self._after:
                self.version = version
            self._begun.add(version)
            if key == record_key(version):
                self._committed.add(version)
        if self.version is not None:
            error = StorageError(
                f"{operation} of {key!r} failed in {self.url}: the demo lets its storage fail from here on",
                operation=operation,
                key=key,
                url=self.url,
            )
            error.errno = errno.EIO
            raise error

    def _get(self, key: str) -> bytes:
        return self._inner.get(key)

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._inner.get_range(key, start, length)

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._inner.get_suffix(key, length)

    def _size(self, key: str) -> int:
        return self._inner.size(key)

    def _list_names(self, prefix: str) -> list[str]:
        return self._inner.list_names(prefix)

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._inner.list_keys(prefix)
