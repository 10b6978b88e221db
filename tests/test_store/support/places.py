"""Places for stores that last as long as a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from tests.paths import SHARED_MEMORY
from tests.test_store.support.faults import forget


@contextmanager
def memory_url() -> Iterator[str]:
    """A new URL of fsspec's filesystem in memory. Its objects are removed at the end."""
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    forget(url)


def quick_folder() -> TemporaryDirectory[str]:
    """A temporary folder, in memory where possible: every object of a store is synced."""
    return TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
