"""What the tests of several rooms need: a small store, and processes to stop, kill and wake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_store.support.processes import Jobs
from tests.test_store.support.tampering import make_store


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    found = Jobs(tmp_path_factory.mktemp("side"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a baseline and a delta over it. Tests copy it before they change anything."""
    folder = tmp_path_factory.mktemp("base") / "store"
    make_store(folder)
    return folder
