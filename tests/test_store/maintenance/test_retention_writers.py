"""What retention removes of writers that ended, and what those notice of it that go on."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import cnr_store
from cnr_backends import Backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import BaseLostError, SupersededError
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.layout import VersionId, version_key
from cnr_store.format.record_document import decode_record, encode_record
from tests.test_store.support.retention_helpers import (
    Trainer,
    check_exact,
    contents,
    is_void,
    remains,
    save_many,
    visible,
)


def is_record(key: str) -> bool:
    return key.startswith("versions/0") and key.count("/") == 2 and key.endswith("/zarr.json")


def crash(backend: Backend) -> str:
    """The newest writer's process ends in the middle of an attempt. Returns its id."""
    newest = VersionId.parse(visible(backend)[-1])
    assert newest is not None
    attempt = str(VersionId(newest.claim, newest.attempt + 1))
    backend.put(version_key(attempt, "tables/users/weight/c/0/0"), b"some rows")
    backend.put(version_key(attempt, "manifest"), b"a manifest")
    return attempt


def test_leftovers_of_older_generations_are_voided_then_removed(backend: Backend) -> None:
    dead = Trainer(backend, policy="full")
    made = [dead.save(1), dead.save(2)]
    crashed = crash(backend)
    cnr_store.gc(backend)
    assert not is_void(backend, crashed)  # its writer may still be at it
    trainer = Trainer(backend)
    trainer.checkpointer.load()
    made.append(trainer.save(3))
    trainer.close()
    before = contents(backend)
    assert cnr_store.gc(backend, dry_run=True).leftovers == ()
    assert not is_void(backend, crashed)
    assert cnr_store.gc(backend).leftovers == ()
    assert is_void(backend, crashed)
    assert remains(backend, crashed)
    assert cnr_store.gc(backend, grace_seconds=0, dry_run=True).leftovers == (crashed,)
    report = cnr_store.gc(backend, grace_seconds=0)
    assert report.leftovers == (crashed,)
    assert not remains(backend, crashed)
    assert is_void(backend, crashed)  # for ever: its writer may be stopped right before its commit
    assert check_exact(backend, before) == made
    assert cnr_store.gc(backend, grace_seconds=0).leftovers == ()


def test_a_late_commit_of_a_stopped_writer_loses(backend: Backend) -> None:
    """It passed its last look, was stopped, and another run took over and removed what it leant on."""
    trainer = Trainer(backend)
    trainer.save(1)
    reached, go_on = threading.Event(), threading.Event()

    def hold(operation: str, key: str, _: int) -> Fault:
        if operation == "create" and is_record(key) and not reached.is_set():
            reached.set()
            assert go_on.wait(60)
        return None

    zombie = Trainer(FaultyBackend(backend, hold), seed=2)
    zombie.checkpointer.load()
    zombie.train()
    pending = zombie.checkpointer.save(2)
    assert reached.wait(60)
    newer = Trainer(backend, seed=3)
    newer.checkpointer.load()
    newest = newer.save(3, full=True)
    cnr_store.gc(backend, keep_last=1)
    assert visible(backend) == [newest]
    go_on.set()
    with pytest.raises(SupersededError):
        pending.result(60)
    assert check_exact(backend, contents(backend)) == [newest]
    for each in (trainer, newer):
        each.close()
    with pytest.raises(SupersededError):
        zombie.save(4)
    zombie.close()


def test_a_writer_finds_what_it_leans_on_doomed_and_goes_on_whole(backend: Backend) -> None:
    trainer = Trainer(backend)
    made = [trainer.save(1), trainer.save(2)]
    backend.put(version_key(made[0], "0", prefix="tombstones"), b"{}")
    trainer.train()
    with pytest.raises(BaseLostError, match=made[0]):
        trainer.checkpointer.save(3).result(60)
    fourth = trainer.save(4)
    assert Catalog(backend).record(fourth).kind == "baseline"
    trainer.close()
    before = contents(backend)
    cnr_store.gc(backend, keep_last=1)
    assert check_exact(backend, before) == [fourth]


def test_a_doomed_version_loads_and_nothing_leans_on_it(backend: Backend) -> None:
    made = save_many(backend, [1, 2])
    backend.put(version_key(made[0], "0", prefix="tombstones"), b"{}")
    trainer = Trainer(backend, seed=2)
    assert trainer.checkpointer.load().version.id == made[1]
    third = Catalog(backend).record(trainer.save(3))
    assert (third.kind, third.previous) == ("baseline", made[1])
    trainer.close()


@pytest.mark.parametrize("when", ["before its tombstone", "before the second look"])
def test_a_run_that_starts_between_the_looks_keeps_its_base_or_leans_on_nothing(
    backend: Backend, when: str
) -> None:
    made = save_many(backend, [1, 2, 3], policy="full")
    runs: list[Trainer] = []
    looks: list[str] = []

    def start(operation: str, key: str, _: int) -> Fault:
        looks.extend([key] if (operation, key) == ("list_names", "writers") else [])
        before_tombstone = key.startswith(f"tombstones/{made[0]}")
        if not runs and (before_tombstone if when == "before its tombstone" else len(looks) == 2):
            runs.append(Trainer(backend, seed=2))
            runs[0].checkpointer.load(made[0])
            runs[0].save(10)
        return None

    report = cnr_store.gc(FaultyBackend(backend, start, reads=True), keep_last=1)
    newest = cnr_store.versions(backend)[-1]
    if when == "before its tombstone":
        assert (newest.kind, list(report.removed)) == ("delta", made[1:2])
        assert visible(backend) == [made[0], made[2], newest.id]
    else:
        assert (newest.kind, list(report.removed)) == ("baseline", made[:2])
        assert visible(backend) == [made[2], newest.id]
    before = contents(backend)
    runs[0].save(11)  # the tombstone was taken back: nothing is in the way
    check_exact(backend, {**contents(backend), **before})
    runs[0].close()


def test_what_a_run_started_from_stays_until_its_first_commit(backend: Backend) -> None:
    made = save_many(backend, [1, 2, 3], full=[1, 3])
    down = threading.Event()

    def fault(operation: str, key: str, _: int) -> Fault:
        return "before" if down.is_set() and key.endswith("/manifest") else None

    trainer = Trainer(FaultyBackend(backend, fault), seed=2)
    trainer.checkpointer.load(made[1])
    down.set()
    trainer.train()
    with pytest.raises(cnr_store.SaveError):
        trainer.checkpointer.save(10).result(60)
    down.clear()
    report = cnr_store.gc(backend, keep_last=1)
    assert list(report.kept) == made
    assert "goes on from it" in report.kept[made[1]]
    fourth = trainer.save(11, full=True)
    trainer.close()
    assert list(cnr_store.gc(backend, keep_last=1).kept) == [fourth]


def test_what_came_between_the_looks_stays_whole_although_no_rule_asks_for_it(backend: Backend) -> None:
    made = save_many(backend, [1, 2], policy="full")
    runs: list[str] = []

    def start(operation: str, key: str, _: int) -> Fault:
        if key.startswith("tombstones/") and not runs:
            over_first = Trainer(backend, seed=2)
            over_first.checkpointer.load(made[0])
            runs.append(over_first.save(10))
            over_first.close()
            runs.extend(save_many(backend, [20], policy="full", seed=3))
        return None

    report = cnr_store.gc(FaultyBackend(backend, start), keep_last=1)
    assert (report.removed, report.kept[runs[0]]) == ((), "came meanwhile")
    assert check_exact(backend, contents(backend)) == [*made, *runs]
    before = contents(backend)
    cnr_store.gc(backend, keep_last=1)
    assert check_exact(backend, before) == runs[1:]


def test_an_attempt_of_unknown_outcome_is_followed_by_a_new_claim(backend: Backend) -> None:
    """Its commit has landed, whole; retention must not take that one for what the next version leans on."""
    storm: list[str] = ["fine"]

    def fault(operation: str, key: str, _: int) -> Fault:
        if storm == ["lost"] and is_record(key):
            return "after"
        if storm == ["gc"] and is_record(key):  # the writer has had its last look, and is about to commit
            storm[:] = ["fine"]
            cnr_store.gc(backend, keep_last=1)
        return None

    trainer = Trainer(FaultyBackend(backend, fault, reads=True))
    made = [trainer.save(1), trainer.save(2)]
    storm[:] = ["lost"]
    trainer.train()
    with pytest.raises(cnr_store.SaveError):
        trainer.checkpointer.save(3, full=True).result(60)
    landed = visible(backend)[2]  # nobody has told the writer
    before = contents(backend)
    storm[:] = ["gc"]
    last = trainer.save(4)
    assert storm == ["fine"]
    assert Catalog(backend).record(last).needs
    assert check_exact(backend, {**contents(backend), **before}) == [*made, landed, last]
    trainer.close()


class Outrun(FaultyBackend):
    """Another writer, with the same claim, commits right before this one does."""

    def _create(self, key: str, data: bytes) -> bool:
        if is_record(key) and b'"cnr_void"' not in data:
            record = decode_record(data, key.split("/")[1])
            assert record is not None
            self.inner.create(key, encode_record(replace(record, nonce="0" * 32)))
        return super()._create(key, data)


def test_what_another_writer_committed_at_the_key_is_not_removed(backend: Backend) -> None:
    trainer = Trainer(Outrun(backend, lambda *_: None))
    with pytest.raises(cnr_store.SaveError, match="another writer committed version"):
        trainer.save(1)
    assert len(visible(backend)) == 1
    assert cnr_store.verify(backend, deep=True).ok
    trainer.close()


def test_a_writer_goes_on_under_a_new_claim_only_if_nobody_else_has_claimed(backend: Backend) -> None:
    trainer = Trainer(backend)
    made = [trainer.save(1), trainer.save(2)]
    backend.put(version_key(made[0], "0", prefix="tombstones"), b"{}")
    trainer.train()
    with pytest.raises(BaseLostError):
        trainer.checkpointer.save(3).result(60)
    newer = Trainer(backend, seed=2)
    newer.checkpointer.load()
    newer.save(4)
    trainer.train()
    with pytest.raises(SupersededError):
        trainer.checkpointer.save(5).result(60)
    newer.save(6)
    for each in (trainer, newer):
        each.close()
