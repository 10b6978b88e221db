"""The process that forks the jobs of the storms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.test_store.storm import storm_process
from tests.test_store.support.fork_server import ForkServer


@pytest.fixture(scope="session")
def jobs() -> Iterator[ForkServer]:
    found = ForkServer(storm_process)
    yield found
    found.close()
