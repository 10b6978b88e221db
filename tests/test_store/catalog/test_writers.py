"""Several writers of one store in real processes, some of them stopped and woken later, with retention on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import cnr_store
from cnr_backends import open_backend
from cnr_store import VersionNotFoundError
from cnr_store.policies.policy import POLICIES
from tests.nightly import at_night
from tests.test_store.support.places import quick_folder
from tests.test_store.support.processes import Jobs
from tests.test_store.support.retention_helpers import is_void, remains
from tests.test_store.support.retention_process import digest

pytestmark = pytest.mark.slow

RUNS = 20


@pytest.fixture
def url() -> Iterator[str]:
    with quick_folder() as folder:
        yield folder


class Watched:
    """Every version that is ever seen must be exact for as long as it is there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._backend = open_backend(url)
        self._seen: set[str] = set()

    def check(self) -> list[str]:
        infos = cnr_store.versions(self.url)
        there = [info.id for info in infos]
        for info in infos:
            assert digest(cnr_store.state_dict(self.url, info)) == info.metadata, info.id
        for version in self._seen - set(there):
            # Only retention takes a version away, and it leaves nothing, or a void record.
            with pytest.raises(VersionNotFoundError):
                cnr_store.state_dict(self.url, version)
            assert is_void(self._backend, version) or not remains(self._backend, version), version
        assert not self._seen or max(there) >= max(self._seen), "the newest version went"
        self._seen.update(there)
        return there


@pytest.mark.parametrize("seed", [*range(3), *map(at_night, range(3, RUNS))])
def test_stopped_writers_and_collectors_harm_nothing_when_they_wake(jobs: Jobs, url: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    watched = Watched(url)
    policy = POLICIES[1 + seed % 3]

    def train(**options: object) -> dict[str, object]:
        return {"seed": int(draw.integers(1 << 30)), "policy": policy, **options}

    jobs.run("train", url, **train(saves=3, keep_last=[None, 2][seed % 2]))
    watched.check()
    stopped = []
    # A save takes about forty operations, loading as many; a collection here fifty to a hundred.
    moments = (
        [("train", 200), ("collect", 90), ("train", 200)] if seed % 3 else [("train", 200), ("collect", 90)]
    )
    for job, most in moments:
        at = int(draw.integers(most))
        options = train(back=int(draw.integers(3)), keep_last=int(draw.integers(1, 3)), at=at)
        process, state = jobs.run(job, url, **options)
        if state is True:
            stopped.append(process)
        watched.check()
    jobs.run("train", url, **train(saves=2, keep_last=1, back=int(draw.integers(2))))
    watched.check()
    jobs.run("collect", url, keep_last=1)
    watched.check()
    for process in draw.permutation(stopped).tolist():
        assert jobs.wake(process) is False
        watched.check()
    jobs.run("train", url, **train(saves=1))
    jobs.run("collect", url, keep_last=1)
    there = watched.check()
    assert list(cnr_store.gc(url, keep_last=1, dry_run=True).kept) == there


@pytest.mark.parametrize("seed", [0, 1, at_night(2), at_night(3)])
def test_writers_and_collectors_at_the_same_time(jobs: Jobs, url: str, seed: int) -> None:
    """Nobody is stopped: two writers take the store from each other, a third process collects all the while."""
    watched = Watched(url)
    jobs.run("train", url, saves=2, seed=seed)
    watched.check()
    running = [jobs.start("train", url, saves=4, seed=100 * seed + n, keep_last=1 + n) for n in range(2)]
    for _ in range(4):
        jobs.run("collect", url, keep_last=2)
    for process in running:
        assert jobs.wait(process) is False
    watched.check()
    jobs.run("collect", url, keep_last=1)
    watched.check()
