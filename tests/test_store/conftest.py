"""What the tests of several rooms need: places, small stores, and processes to stop, kill and wake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_store.support.lasting_store import lasting_store
from tests.test_store.support.places import memory_url, quick_folder
from tests.test_store.support.processes import Jobs
from tests.test_store.support.tampering import make_store


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a store in memory."""
    with memory_url() as found:
        yield found


@pytest.fixture(params=["memory", "local"])
def root(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where to make stores, each in a folder of its own."""
    with memory_url() if request.param == "memory" else quick_folder() as found:
        yield found


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Path]:
    """A store of `make_model()` that every test must leave as it is."""
    with lasting_store(tmp_path / "stored") as folder:
        yield folder


@pytest.fixture(scope="session")
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
