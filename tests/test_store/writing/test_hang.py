"""A storage operation that never ends, at every operation of a save: what was committed stays, the rest is unseen."""

from __future__ import annotations

import itertools
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store import Checkpointer, SaveError
from tests.nightly import NIGHT, TODAY
from tests.test_store.support.faults import forget
from tests.test_store.support.places import quick_folder
from tests.test_store.support.processes import Jobs
from tests.test_store.support.retention_process import digest
from tests.test_store.support.small_model import Ids, make_model

if TYPE_CHECKING:
    from tests.s3_proxy import SpoiledOptions
    from tests.s3_server import S3Server

pytestmark = pytest.mark.slow

WAIT_SECONDS = 60
STRIDE = 1 if NIGHT else 5
"""Between the operations at which a process is killed; each of the last ones is one."""
FIRST: Ids = {"users": [1, 2, 3], "items": [0, 264]}
SECOND: Ids = {"users": [2, 299], "tags": [5]}


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as name:
        yield Path(name)


def check_versions(url: object) -> list[str]:
    """Every version that is visible holds what its job had; their ids."""
    infos = cnr_store.versions(url)  # type: ignore[arg-type]
    for info in infos:
        assert digest(cnr_store.state_dict(url, info)) == info.metadata, info.id  # type: ignore[arg-type]
    return [info.id for info in infos]


def check_findings(store: Path, committed: set[str]) -> None:
    """Where a save was killed is no damage, and suspicious only if its data had all been put."""
    report = cnr_store.verify(store)
    assert report.ok
    attempts = [
        path for path in (store / "versions").iterdir() if path.is_dir() and path.name not in committed
    ]
    assert {left.place for left in report.leftovers} == {
        f"versions/{path.name}" for path in attempts if any(each.is_file() for each in path.rglob("*"))
    }
    assert {finding.version for finding in report.suspicious} == {
        path.name for path in attempts if (path / "manifest").exists()
    }


def test_killed_at_every_operation_of_a_load_and_a_save(jobs: Jobs, folder: Path) -> None:
    """The process dies in the operation; the next one goes on from the newest version."""
    prepared, store = folder / "prepared", folder / "store"
    assert jobs.run("train", str(prepared), saves=2)[1] is False
    before = check_versions(prepared)
    committed_at: set[int] = set()

    def dies_at(number: int) -> bool:
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(prepared, store)
        state = jobs.run("train", str(store), saves=1, seed=2, at=number, signal="SIGKILL")[1]
        there = check_versions(store)
        check_findings(store, {*there})
        assert there[: len(before)] == before
        assert len(there) <= len(before) + 1
        if state is False:
            return False
        assert state == "killed"
        if len(there) > len(before):
            committed_at.add(number)
        assert jobs.run("train", str(store), saves=1, seed=3)[1] is False
        assert check_versions(store)[: len(there)] == there
        return True

    beyond = next(number for number in itertools.count(TODAY % STRIDE, STRIDE) if not dies_at(number))
    end = next(number for number in itertools.count(beyond - STRIDE + 1) if not dies_at(number))
    # What comes after the commit closes the claim: it is looked at, and marked.
    assert committed_at <= {end - 2, end - 1}
    assert end > 30, "it had fewer operations than a load and a save take"


class Training:
    """A model that saves through storage of which one operation can hang."""

    def __init__(self, url: str) -> None:
        self.backend = open_backend(url)
        self.at: int | None = None
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.count = 0
        faulty = FaultyBackend(self.backend, self._fault, reads=True, hang=self._hang)
        self.model, optimizers = make_model("sgd", seed=1)
        self.optimizer = optimizers[0]
        self.checkpointer = Checkpointer(
            faulty, self.model, optimizers, policy="consecutive", bits=32, job=cnr_store.Job(rng=False)
        )

    def _fault(self, operation: str, key: str, index: int) -> Fault:
        number, self.count = self.count, self.count + 1
        return "hang" if number == self.at else None

    def _hang(self) -> None:
        self.reached.set()
        assert self.go_on.wait(WAIT_SECONDS)

    def hangs(self, pending: cnr_store.PendingSave) -> bool:
        """Whether an operation hangs, once that is settled."""
        pending.future.add_done_callback(lambda _: self.reached.set())
        assert self.reached.wait(WAIT_SECONDS)
        return not pending.done()

    def train(self, ids: Ids) -> None:
        self.model(ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int) -> cnr_store.PendingSave:
        self.count = 0
        arrays = {name: value.detach().numpy() for name, value in self.model.state_dict().items()}
        return self.checkpointer.save(step, metadata=digest(arrays))


def test_hanging_at_every_operation_of_a_save() -> None:
    """While it hangs nothing new is visible; when it is given up the save fails, and the next one has every row."""
    for number in itertools.count():
        url = f"memory://{uuid.uuid4().hex}"
        training = Training(url)
        training.train(FIRST)
        training.save(1).result(WAIT_SECONDS)
        training.train(SECOND)
        training.at = number
        pending = training.save(2)
        if not training.hangs(pending):
            pending.result(WAIT_SECONDS)
            training.go_on.set()  # the last one that hangs is that of close()
            training.checkpointer.close()
            forget(url)
            break
        assert len(check_versions(url)) == 1
        assert not pending.done()
        training.go_on.set()
        with pytest.raises(SaveError):
            pending.result(WAIT_SECONDS)
        training.at = None
        training.save(3).result(WAIT_SECONDS)
        assert len(check_versions(url)) == 2
        training.checkpointer.close()
        forget(url)
    assert number > 12


@pytest.mark.server
def test_a_put_that_s3_never_answers_fails_the_save_in_time(
    s3_server: S3Server, spoiled: SpoiledOptions
) -> None:
    hanging = threading.Event()
    with spoiled(lambda number, method: "hang" if method == "PUT" and hanging.is_set() else None) as options:
        backend = open_backend(s3_server.url(uuid.uuid4().hex), **options, operation_seconds=5)
        model, optimizers = make_model("sgd", seed=1)
        with Checkpointer(
            backend,
            model,
            optimizers,
            job=cnr_store.Job(rng=False),
            failures=cnr_store.Failures(retry_seconds=0),
        ) as checkpointer:
            first = checkpointer.save(1).result(WAIT_SECONDS)
            hanging.set()
            with pytest.raises(SaveError, match="took more than"):
                checkpointer.save(2).result(WAIT_SECONDS)
            hanging.clear()
            second = checkpointer.save(3).result(WAIT_SECONDS)
        assert [info.id for info in cnr_store.versions(backend)] == [first.id, second.id]
