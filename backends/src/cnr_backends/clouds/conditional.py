"""What backends share whose filesystem writes on the condition that a key is free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cnr_backends.remote import ANY_DRIVER_ERROR, FsspecBackend


class ConditionalBackend(FsspecBackend):
    """Stores objects on a server that decides which of several exclusive creates succeeds.

    A driver repeats a request whose answer it misses. If the first one arrived, the repeated one is refused, and the
    object's bytes tell whose it is.
    """

    atomic_create = True

    _CREATE: ClassVar[Mapping[str, Any]]
    """What makes the filesystem's ``pipe_file`` send the condition, and raise FileExistsError where it fails."""

    def _probe(self) -> None:
        if not self._root.strip("/"):
            raise ValueError("there is no bucket or container in the URL")
        super()._probe()

    def _create(self, key: str, data: bytes) -> bool:
        try:
            self._call("pipe_file", self._at(key), data, sent_bytes=len(data), **self._CREATE)
        except FileExistsError:
            return self._holds(key, data)
        return True

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        try:
            return super()._get_range(key, start, length)
        except ANY_DRIVER_ERROR:
            if start < self._size(key):
                raise
            return b""  # drivers tell of a range beyond the end in different ways

    def _make_parent(self, path: str) -> None:
        """Do nothing: there are no folders, and to make one could make the bucket."""
