"""A store in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cnr_backends import Backend, open_backend
from tests.test_store.support.places import memory_url


@pytest.fixture
def backend() -> Iterator[Backend]:
    with memory_url() as url:
        yield open_backend(url)
