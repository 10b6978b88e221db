"""A fault at every storage operation of a save, and writers that meet on one store."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

import cnr_store
from cnr_backends import Backend, ObjectExistsError, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import Checkpointer, SupersededError
from tests.test_store.chains.test_relative import count_relative
from tests.test_store.support.faults import Spoil, forget, to_strike
from tests.test_store.support.places import memory_url
from tests.test_store.support.retention_helpers import objects
from tests.test_store.support.small_model import Ids, make_model, other_state, row_state
from tests.test_store.support.trainer_model import WAIT_SECONDS, Job, Setting

SETTING = Setting(policy="consecutive", bits=4)
FIRST: Ids = {"users": [1, 2, 3], "tags": [4], "items": [0, 264]}
SECOND: Ids = {"users": [2, 299], "items": [7, 8, 9]}
THIRD: Ids = {"users": [5], "tags": [4, 69]}
SAVES = ["first save", "delta", "first save after a load"]
KINDS: list[Fault] = ["before", "after", "full"]


@pytest.fixture
def memory() -> Iterator[str]:
    """Where stores are made, each in a folder of its own."""
    with memory_url() as url:
        yield url


@dataclass
class ReadSpoil(Spoil):
    """A fault that a save survives where it reads the parents of relative rows back: these are then not relative."""

    @property
    def fatal(self) -> bool:
        is_read_back = self.operation.startswith("get") and self.key.startswith("versions/")
        return super().fatal and not is_read_back


def prepared(root: str, save: str, reads: bool = False, workers: int = 1) -> Job:
    """A job in a new store whose next save, of few objects, is the one that is asked for; deltas are relative."""
    setting = replace(SETTING, workers=workers, bits="relative" if save == "delta" else SETTING.bits)
    job = Job(open_backend(f"{root}/{uuid.uuid4().hex}"), "sgd", setting, reads=reads)
    job.train(FIRST)
    if save != "first save":
        assert job.save()
        job.train(SECOND)
    if save == "first save after a load":
        assert job.save()
        job.reopen(setting)
        job.train(THIRD)
    return job


def operations(root: str, save: str, reads: bool = False) -> list[tuple[str, str]]:
    """Names and keys of the storage operations that such a save takes."""
    job = prepared(root, save, reads)
    before = len(job.operations)
    assert job.save()
    found = job.operations[before:]
    job.close()
    return found


def is_read(operation: tuple[str, str]) -> bool:
    return operation[0] not in ("put", "create")


def finish(job: Job) -> None:
    """What must hold after any fault: every version is as it was, and the next save forgets nothing."""
    job.train(THIRD)
    assert job.save()
    job.check_all()
    job.close()
    forget(job.backend.url)


@pytest.mark.some_by_day(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("save", "workers"), [("first save", 1), ("first save", 2), ("delta", 1)])
def test_fault_at_every_change(root: str, save: str, workers: int, kind: Fault) -> None:
    for number in to_strike(operations(root, save)):
        job = prepared(root, save, workers=workers)
        spoil = Spoil(number, kind)
        info = job.save(spoil=spoil)
        assert spoil.struck
        assert (info is not None) == spoil.committed
        finish(job)


@pytest.mark.some_by_day(2)
@pytest.mark.slow
@pytest.mark.parametrize("then", ["before", "after"])
@pytest.mark.parametrize("save", SAVES)
def test_storage_is_down_from_a_change_on(memory: str, save: str, then: Fault) -> None:
    """The failed attempt's id can't be burnt, or its writer never learns that it was; then storage comes back."""
    for number in to_strike(operations(memory, save)):
        job = prepared(memory, save)
        spoil = Spoil(number, then, then=then)
        assert job.save(spoil=spoil) is None
        assert spoil.struck
        finish(job)


@pytest.mark.some_by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fault_at_every_read(memory: str, kind: Fault) -> None:
    log = operations(memory, "first save after a load", reads=True)
    reads = [number for number in to_strike(log) if is_read(log[number])]
    assert reads
    for number in reads:
        job = prepared(memory, "first save after a load", reads=True)
        spoil = Spoil(number, kind)
        # What the save could not ask before it was planned is asked again where it is written.
        assert (job.save(spoil=spoil) is not None) == spoil.asked_early
        finish(job)


@pytest.mark.slow
@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("kind", KINDS)
def test_fault_at_every_read_of_a_relative_delta(memory: str, kind: Fault) -> None:
    log = operations(memory, "delta", reads=True)
    survived = 0
    for number in (number for number in range(len(log)) if is_read(log[number])):
        job = prepared(memory, "delta", reads=True)
        spoil = ReadSpoil(number, kind)
        info = job.save(spoil=spoil)
        assert (info is None) == spoil.fatal
        if info:
            survived += 1
            assert count_relative(job.backend.url, info.id) == 0
        finish(job)
    assert survived > 3


@pytest.mark.slow
def test_lost_answer_to_the_commit_is_a_success(root: str) -> None:
    job = prepared(root, "delta")
    info = job.save(spoil=Spoil("record", "after"))
    assert info is not None
    assert [each.id for each in cnr_store.versions(job.backend)] == list(job.expected.versions)
    finish(job)


@pytest.mark.slow
def test_commit_that_arrives_late_loses(root: str) -> None:
    """The request was given up, the rows went into the next version; then storage carries it out after all."""
    job = prepared(root, "delta")
    sent: dict[str, bytes] = {}

    class Slow(FaultyBackend):
        def _create(self, key: str, data: bytes) -> bool:
            sent.setdefault(key, data)
            return super()._create(key, data)

    job.reopen(SETTING, Slow)
    job.train(SECOND)
    spoil = Spoil("record", "before")
    assert job.save(spoil=spoil) is None
    with pytest.raises(ObjectExistsError):
        job.backend.create(spoil.key, sent[spoil.key])
    job.check_listed()
    finish(job)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_fault_while_rows_are_still_in_the_model(memory: str, workers: int) -> None:
    """Without room for a copy, rows are read from the model while `save` waits; a fault must not leave it waiting."""
    setting = Setting(policy="one-shot", bits=2, workers=workers, snapshot_bytes=0)
    job = Job(open_backend(memory), "sparse-adam", setting)
    job.train(FIRST)
    for kind in KINDS:
        assert job.save(spoil=Spoil("tables/", kind)) is None
    assert job.save()
    job.train(SECOND)
    assert job.save(spoil=Spoil("tables/users", "full", then="full")) is None
    finish(job)


def test_older_writer_is_superseded_and_changes_nothing(root: str) -> None:
    job = prepared(root, "delta")
    newer = Writer(job.backend)
    newer.save(10)
    before = objects(job.backend)
    listed = cnr_store.versions(job.backend)
    for step in (11, 12):
        with pytest.raises(SupersededError, match="superseded by"):
            job.checkpointer.save(step).result(WAIT_SECONDS)
        assert cnr_store.versions(job.backend) == listed
    after = objects(job.backend)
    assert {key: after.get(key) for key in before} == before
    newer.save(13)
    newer.check()
    # The older job may go on from the newest version, under a claim of its own.
    job.checkpointer.load()
    job.checkpointer.save(14).result(WAIT_SECONDS)
    with pytest.raises(SupersededError):
        newer.checkpointer.save(15).result(WAIT_SECONDS)
    assert [info.step for info in cnr_store.versions(job.backend)] == [1, 10, 13, 14]
    newer.checkpointer.close()
    job.close()


@pytest.mark.slow
def test_commit_between_the_look_and_the_newer_claim_is_whole(root: str) -> None:
    """A writer that was held up on its last step commits a complete version of its own; the newer stays latest."""
    job = prepared(root, "delta")
    reached, go_on = threading.Event(), threading.Event()

    def hold_commit(operation: str, key: str) -> Fault:
        if operation == "create" and key.startswith("versions/"):
            reached.set()
            assert go_on.wait(WAIT_SECONDS)
        return None

    job.weather.change(hold_commit)
    rows, other = row_state(job.model, job.optimizers), other_state(job.model, job.optimizers)
    attempt = job.expected.attempt(2, rows, other, job.setting.policy, job.setting.bits, False)
    pending = job.checkpointer.save(2)
    assert reached.wait(WAIT_SECONDS)
    newer = Writer(job.backend)
    newest = newer.save(10)
    go_on.set()
    slipped = pending.result(WAIT_SECONDS)
    content = attempt.made({"full": False, "since": "previous"})
    job.expected.committed(slipped.id, content, slipped.bytes)
    job.check(slipped.id)
    assert cnr_store.versions(job.backend)[-1].id == newest
    with pytest.raises(SupersededError):
        job.checkpointer.save(3).result(WAIT_SECONDS)
    newer.check()
    newer.checkpointer.close()
    job.close()


class Writer:
    """Another process's job, which goes on from the newest version of a store."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.model, self.optimizers = make_model("sgd", seed=9)
        self.checkpointer = Checkpointer(
            backend, self.model, self.optimizers, bits=32, job=cnr_store.Job(rng=False)
        )
        self.checkpointer.load()

    def save(self, step: int) -> str:
        self.model(FIRST).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return self.checkpointer.save(step).result(WAIT_SECONDS).id

    def check(self) -> None:
        """The latest version is what the model was when it was saved."""
        model, optimizers = make_model("sgd", seed=0)
        with Checkpointer(self.backend, model, optimizers, job=cnr_store.Job(rng=False)) as checkpointer:
            checkpointer.load()
        here, there = row_state(self.model, self.optimizers), row_state(model, optimizers)
        assert {path: rows.tobytes() for path, rows in here.items()} == {
            path: rows.tobytes() for path, rows in there.items()
        }
        assert other_state(self.model, self.optimizers) == other_state(model, optimizers)
