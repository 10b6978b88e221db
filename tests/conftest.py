"""A real S3 server for the tests that ask for one, and a proxy before it that spoils answers."""

from __future__ import annotations

import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import hypothesis
import pytest

from tests.nightly import TODAY, of_today, sample
from tests.paths import SHARED_MEMORY
from tests.s3_proxy import SpoiledOptions, spoiling
from tests.s3_server import NoServerError, S3Server, serving

ROOM_BYTES = 4 << 30
"""What the temporary files of a whole run have room in."""


def pytest_configure() -> None:
    """Keep temporary files in memory where there is room, since every object is synced.

    And let Ctrl-C interrupt, for the tests that send it: a shell has its background jobs ignore it. No property has a
    deadline: a busy machine is no fault.
    """
    hypothesis.settings.register_profile("default", hypothesis.settings.get_profile("default"), deadline=None)
    if not os.environ.get("CI"):
        hypothesis.settings.load_profile("default")
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_MEMORY))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"CNR_DAY={TODAY} chooses what sweeps try"


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of a test to the night: of one marked `some_by_day` and of a slow one.

    The cases of a slow test take turns, a case each day, unless each is a promise of its own.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("nightly"):
            cases[item.nodeid.split("[")[0]].append(item)
    for found in cases.values():
        some = found[0].get_closest_marker("some_by_day")
        by_day = sample(found, *some.args) if some else found
        slow = [item for item in by_day if item.get_closest_marker("slow")]
        if not found[0].get_closest_marker("each_by_day"):
            turn = of_today(slow, 1)
            by_day = [item for item in by_day if item in turn or item not in slow]
        for item in found:
            if item not in by_day:
                item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with an empty bucket, one per session; tests keep apart by their prefixes."""
    pytest.importorskip("s3fs")
    try:
        with serving(tmp_path_factory.mktemp("seaweedfs")) as server:
            yield server
    except NoServerError as error:
        pytest.skip(str(error))


@pytest.fixture
def spoiled(s3_server: S3Server) -> SpoiledOptions:
    """A context manager that yields storage options leading through a spoiling proxy."""
    return partial(spoiling, s3_server)
