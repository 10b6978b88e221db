"""Counting what readers ask of a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cnr_backends import Backend
from cnr_backends.testing import FaultyBackend

Result = TypeVar("Result")


class CountingBackend(FaultyBackend):
    """Another backend, whose reads are logged and whose bytes read are added up."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, lambda operation, key, index: None, reads=True)
        self.nbytes = 0

    def reset(self) -> None:
        """Begin counting again."""
        self.log.clear()
        self.nbytes = 0

    def _read(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        result = super()._read(operation, key, call)
        self.nbytes += len(result) if isinstance(result, bytes) else 0
        return result
