"""Which versions retention keeps, what it removes, and what writers and readers notice of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import Backend, StorageError, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import BaseLostError, Checkpointer, OptionError, SupersededError, VersionNotFoundError
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.layout import VersionId, record_key, version_key
from cnr_store.format.record_document import decode_record, encode_record
from tests.test_store.support.places import memory_url, quick_folder
from tests.test_store.support.retention_helpers import (
    Trainer,
    check_exact,
    content,
    contents,
    is_void,
    objects,
    remains,
    save_many,
    visible,
)
from tests.test_store.support.small_model import make_model
from tests.test_store.support.zarr_nodes import values_of


@pytest.fixture
def backend() -> Iterator[Backend]:
    with memory_url() as url:
        yield open_backend(url)


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


def steps(backend: Backend) -> list[int]:
    return [info.step for info in cnr_store.versions(backend)]


# Rules


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 3}, [5, 6, 7]),
        ({"keep_last": 100}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_every": 3}, [3, 6, 7]),
        ({"keep_every": 100}, [7]),
        ({"keep_last": 2, "keep_every": 2}, [2, 4, 6, 7]),
    ],
)
def test_rules_say_which_versions_stay(backend: Backend, rules: dict[str, Any], kept: list[int]) -> None:
    save_many(backend, range(1, 8), policy="full")
    before = contents(backend)
    planned = cnr_store.gc(backend, **rules, dry_run=True)
    assert steps(backend) == [1, 2, 3, 4, 5, 6, 7]
    report = cnr_store.gc(backend, **rules)
    assert steps(backend) == kept
    assert list(report.kept) == check_exact(backend, before)
    assert sorted([*report.kept, *report.removed]) == sorted(before)
    assert (planned.kept, planned.removed, planned.dry_run) == (report.kept, report.removed, True)
    assert (report.stopped, report.leftovers, report.dry_run) == (None, (), False)


def test_keep_every_takes_the_newest_at_or_before_each_multiple(backend: Backend) -> None:
    save_many(backend, [90, 190, 200, 250, 410, 650], policy="full")
    cnr_store.gc(backend, keep_every=200)
    assert steps(backend) == [200, 250, 410, 650]  # the last before 200, 400, 600 and 800


def test_keep_every_is_the_same_however_often_it_runs(backend: Backend) -> None:
    trainer = Trainer(backend, policy="full")
    for step in range(7, 300, 7):
        trainer.save(step)
        cnr_store.gc(backend, keep_every=50)
    trainer.close()
    assert steps(backend) == [49, 98, 147, 196, 245, 294]


def test_after_a_rollback_keep_every_takes_the_newer_branch(backend: Backend) -> None:
    first = save_many(backend, [10, 20, 30], policy="full")
    trainer = Trainer(backend, policy="full")
    trainer.checkpointer.load(first[0])
    second = [trainer.save(20), trainer.save(30)]
    trainer.close()
    cnr_store.gc(backend, keep_every=10)
    assert visible(backend) == [first[0], *second]


AUCS = (0.7, 0.9, float("nan"), 0.8, None, 0.9, 0.75)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_best": ("auc", "max", 1)}, [6, 7]),
        ({"keep_best": ("auc", "max", 2)}, [2, 6, 7]),
        ({"keep_best": ["auc", "max", 3]}, [2, 4, 6, 7]),
        ({"keep_best": ("auc", "min", 1)}, [1, 7]),
        ({"keep_best": ("auc", "max", 100)}, [1, 2, 4, 6, 7]),
        ({"keep_best": ("loss", "min", 2)}, [7]),
        ({"keep_best": ("auc", "max", 1), "keep_last": 3}, [5, 6, 7]),
    ],
)
def test_the_best_stay(backend: Backend, rules: dict[str, Any], kept: list[int]) -> None:
    with Checkpointer(backend, *make_model("sgd", 1), policy="full") as checkpointer:
        for step, auc in enumerate(AUCS, 1):
            checkpointer.save(step, metadata=None if auc is None else {"auc": auc, "name": "x"}).result()
    before = contents(backend)
    report = cnr_store.gc(backend, **rules)
    assert steps(backend) == kept
    check_exact(backend, before)
    if rules == {"keep_best": ("auc", "max", 2)}:
        assert list(report.kept.values()) == ["auc is 0.9", "auc is 0.9", "the newest"]


@pytest.mark.parametrize(
    "number", [np.float32, np.float64, np.int64, np.array, torch.tensor, lambda value: [value]]
)
def test_figures_of_any_library_count(backend: Backend, number: Callable[[int], object]) -> None:
    for step, auc in enumerate((90, 80, 70, 10)):
        trained = make_model("sgd", 1)
        with Checkpointer(backend, *trained, policy="full", keep_best=("auc", "max", 2)) as checkpointer:
            checkpointer.resume()
            checkpointer.save(step, metadata={"auc": number(auc), "too large": 10**400}).result()
    is_number = not isinstance(number(1), list)
    assert steps(backend) == ([0, 1, 3] if is_number else [3])


def test_versions_without_the_figure_are_told_of_once(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(backend, *make_model("sgd", 1), keep_best=("auc", "max", 2)) as checkpointer:
        checkpointer.save(1, metadata={"auc": 0.5}).result()
        assert not caplog.records
        checkpointer.save(2, metadata={"acu": 0.5}).result()
        checkpointer.save(3, metadata={"auc": float("nan")}).result()
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: its metadata has no finite number 'auc', so keep_best=('auc', 'max', 2) does not keep this version: "
        "give save(metadata={'auc': ...}) one number. This is told once"
    ]


def test_a_job_keeps_the_best_and_what_they_need(backend: Backend) -> None:
    trainer = Trainer(backend, policy="consecutive", keep_last=1, keep_best=("auc", "max", 1))
    checkpointer = trainer.checkpointer
    for step, auc in enumerate((0.1, 0.2, 0.9, 0.3, 0.4), 1):
        checkpointer.touch("users", [step])
        checkpointer.save(step, full=step == 4, metadata={"auc": auc}).result()
    trainer.close()
    assert steps(backend) == [1, 2, 3, 4, 5]  # 3 is a delta over 2 and 1, and 5 over 4
    check_exact(backend, contents(backend))


@pytest.mark.parametrize(
    "rules",
    [
        *({"keep_last": 0}, {"keep_every": -1}, {"keep_last": True}, {"keep_last": 1.5}),
        *({"keep_best": best} for best in ("auc", ("auc", "max"), ("auc", "best", 3), ("auc", "max", 0))),
        *({"keep_best": best} for best in (("", "max", 1), (3, "max", 1), ("auc", "max", True))),
    ],
)
def test_rules_out_of_range_are_refused(backend: Backend, rules: dict[str, Any]) -> None:
    name = next(iter(rules))
    with pytest.raises(OptionError, match=name):
        cnr_store.gc(backend, **rules)
    with pytest.raises(OptionError, match=name):
        Checkpointer(backend, *make_model("sgd", 1), **rules)
    with pytest.raises(OptionError, match="grace_seconds"):
        cnr_store.gc(backend, grace_seconds=-1)


def test_nothing_happens_where_no_store_is(backend: Backend) -> None:
    with pytest.raises(cnr_store.EmptyStoreError, match="check the URL"):
        cnr_store.gc(backend, keep_last=1)
    assert objects(backend) == {}
    assert cnr_store.pins(backend) == []


# Chains and folds


def test_what_a_kept_version_leans_on_stays(backend: Backend) -> None:
    made = save_many(backend, range(1, 8), full=[1, 4])
    before = contents(backend)
    report = cnr_store.gc(backend, keep_last=1)
    assert check_exact(backend, before) == made[3:]
    assert report.kept[made[3]] == f"needed by {made[4]}"
    assert report.kept[made[6]] == "the newest"
    assert not any(remains(backend, version) for version in made[:3])


def test_nothing_of_a_removed_version_is_left_in_the_end(backend: Backend) -> None:
    made = save_many(backend, range(1, 6), policy="full")
    report = cnr_store.gc(backend, keep_last=1, grace_seconds=0)
    assert report.removed == tuple(made[:4])
    keys = objects(backend).keys()
    assert not [key for key in keys if any(version in key for version in made[:4])]
    assert not [key for key in keys if key.startswith(("tombstones", "pins"))]


def test_the_record_of_a_removed_version_stays_taken_for_the_grace_time(backend: Backend) -> None:
    made = save_many(backend, [1, 2, 3], policy="full")
    record = backend.get(record_key(made[0]))
    cnr_store.gc(backend, keep_last=1)
    assert is_void(backend, made[0])
    with pytest.raises(FileExistsError):
        backend.create(record_key(made[0]), record)  # a create that the network delivers late
    assert visible(backend) == made[2:]


def test_freed_bytes_are_those_that_are_gone(backend: Backend) -> None:
    save_many(backend, [1, 2, 3], policy="full")
    before = sum(nbytes for _, nbytes in backend.list_keys("versions"))
    planned = cnr_store.gc(backend, keep_last=1, dry_run=True)
    report = cnr_store.gc(backend, keep_last=1)
    gone = before - sum(nbytes for _, nbytes in backend.list_keys("versions"))
    assert report.freed_bytes == gone
    assert gone <= planned.freed_bytes < gone + 1000


def test_beneath_a_fold_nothing_is_needed(backend: Backend) -> None:
    made = save_many(backend, range(1, 5), full=[1])
    trainer = Trainer(backend, seed=2)
    trainer.checkpointer.load(made[3])
    last = trainer.save(5, full=True)
    trainer.close()
    before = contents(backend)
    cnr_store.compact(backend, made[3])
    cnr_store.gc(backend, keep_last=2)
    assert check_exact(backend, before) == [made[3], last]
    cnr_store.gc(backend, keep_last=1, grace_seconds=0)
    assert check_exact(backend, before) == [last]
    assert not list(backend.list_keys("folds"))


def test_a_writer_that_has_not_heard_of_a_fold_keeps_its_chain(backend: Backend) -> None:
    trainer = Trainer(backend)
    made = [trainer.save(step, step == 1) for step in (1, 2, 3)]
    cnr_store.compact(backend, made[2])
    cnr_store.gc(backend, keep_last=1)
    assert visible(backend) == made
    fourth = trainer.save(4)
    assert Catalog(backend).record(fourth).needs
    cnr_store.gc(backend, keep_last=1)
    check_exact(backend, contents(backend))
    trainer.close()


def test_a_fold_that_was_removed_is_trusted_no_more(backend: Backend) -> None:
    """A job's retention has read it before; it was damaged, and its record was removed."""
    trainer = Trainer(backend, keep_last=2)
    made = [trainer.save(step, step == 1) for step in (1, 2, 3)]
    before = contents(backend)
    cnr_store.compact(backend, made[2])
    cnr_store.pin(backend, made[2])
    trainer.save(4)
    trainer.checkpointer._upkeep.wait()
    backend.delete(record_key(made[2], "folds"))
    for step in (5, 6, 7):
        trainer.save(step, full=True)
        trainer.checkpointer._upkeep.wait()
    assert visible(backend)[:3] == made
    check_exact(backend, {**contents(backend), **before})
    trainer.close()


# Pins


def test_a_pinned_version_stays_with_what_it_leans_on(backend: Backend) -> None:
    made = save_many(backend, range(1, 8), full=[1, 4, 7])
    before = contents(backend)
    assert cnr_store.pin(backend, 2) == made[1]
    assert cnr_store.pin(backend, made[1]) == made[1]
    assert cnr_store.pins(backend) == [made[1]]
    report = cnr_store.gc(backend, keep_last=1)
    assert report.kept[made[1]] == "pinned"
    assert check_exact(backend, before) == [made[0], made[1], made[6]]
    assert cnr_store.unpin(backend, 2) == made[1]
    assert cnr_store.pins(backend) == []
    cnr_store.gc(backend, keep_last=1)
    assert check_exact(backend, before) == [made[6]]


def test_an_empty_folder_is_no_pin_after_unpin() -> None:
    """A process that was killed in `unpin` may leave it."""
    with quick_folder() as folder:
        made = save_many(open_backend(folder), [1, 2], full=[1, 2])
        Path(folder, "pins", made[0]).mkdir(parents=True)
        cnr_store.unpin(folder, made[0])
        assert cnr_store.pins(folder) == []
        assert cnr_store.gc(folder, keep_last=1).removed == (made[0],)


def test_a_doomed_version_can_not_be_pinned(backend: Backend) -> None:
    made = save_many(backend, [1, 2], policy="full")
    backend.put(version_key(made[0], "0", prefix="tombstones"), b"{}")
    with pytest.raises(VersionNotFoundError, match=made[0]):
        cnr_store.pin(backend, made[0])
    assert not list(backend.list_keys("pins"))
    with pytest.raises(VersionNotFoundError):
        cnr_store.pin(backend, 17)


def test_a_pin_whose_version_is_lost_is_shown(backend: Backend) -> None:
    made = save_many(backend, [1, 2, 3], policy="full")
    cnr_store.pin(backend, 1)
    cnr_store.pin(backend, 2)
    for key in [key for key in objects(backend) if key.startswith(f"versions/{made[0]}/")]:
        backend.delete(key)
    backend.delete(f"versions/{made[1]}/zarr.json")
    assert cnr_store.pins(backend) == made[:2]
    report = cnr_store.verify(backend)
    assert [each.version for each in report.problems] == [made[1]]
    assert [(each.version, "a pin keeps it" in str(each)) for each in report.suspicious] == [(made[0], True)]
    assert cnr_store.unpin(backend, made[0]) == made[0]
    assert cnr_store.pins(backend) == [made[1]]
    with pytest.raises(VersionNotFoundError):
        cnr_store.unpin(backend, made[0])


def test_a_pin_that_comes_between_the_looks_holds(backend: Backend) -> None:
    """The pin was granted before there was a tombstone, so retention must see it the second time."""
    made = save_many(backend, [1, 2, 3], policy="full")

    def grant(operation: str, key: str, _: int) -> Fault:
        if key.startswith(f"tombstones/{made[0]}") and not cnr_store.pins(backend):
            cnr_store.pin(backend, made[0])
        return None

    report = cnr_store.gc(FaultyBackend(backend, grant), keep_last=1)
    assert visible(backend) == [made[0], made[2]]
    assert report.removed == (made[1],)
    assert not [key for key in objects(backend) if key.startswith(f"tombstones/{made[0]}")]
    cnr_store.pin(backend, made[0])


# Leftovers


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
    with pytest.raises(cnr_store.SaveError):
        pending.result(60)
    assert check_exact(backend, contents(backend)) == [newest]
    for each in (trainer, newer):
        each.close()
    with pytest.raises(SupersededError):
        zombie.save(4)
    zombie.close()


# Writers


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


# A job's own retention


def test_a_job_keeps_so_many_versions(backend: Backend) -> None:
    with_rules = Trainer(backend, keep_last=2, keep_every=4)
    expected = {}
    for step in range(1, 12):
        version = with_rules.save(step, full=step % 3 == 0)
        expected[version] = content(backend, version)
    with_rules.close()
    assert steps(backend) == [3, 4, 6, 7, 8, 9, 10, 11]
    check_exact(backend, expected)
    model, optimizers = make_model("adagrad", seed=0)
    assert cnr_store.load(backend, model, optimizers, rng=False).step == 11
    for here, there in zip(model.parameters(), with_rules.model.parameters(), strict=True):
        assert here.shape == there.shape
        assert torch.isfinite(here).all()


def test_failing_retention_fails_no_save(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    def fault(operation: str, key: str, _: int) -> Fault:
        return "before" if key.startswith("tombstones") else None

    trainer = Trainer(FaultyBackend(backend, fault), policy="full", keep_last=1)
    with caplog.at_level(logging.WARNING, "cnr_store"):
        for step in (1, 2, 3):
            trainer.save(step)
        trainer.close()
    assert steps(backend) == [1, 2, 3]
    assert "upkeep after version" in caplog.text


def test_retention_of_a_superseded_job_touches_nothing(backend: Backend) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold(operation: str, key: str, _: int) -> Fault:
        if key == "pins" and not go_on.is_set():
            held.set()
            assert go_on.wait(60)
        return None

    older = Trainer(FaultyBackend(backend, hold, reads=True), policy="full", keep_last=1)
    first = older.save(1)
    assert held.wait(60)
    newer = Trainer(backend, seed=2, policy="full")
    newer.checkpointer.load()
    made = [first, newer.save(2), newer.save(3)]
    before = objects(backend)
    go_on.set()
    older.close()
    newer.close()
    after = objects(backend)
    assert {key: after[key] for key in after if not key.endswith(".closed")} == before
    assert visible(backend) == made


# Readers


@pytest.mark.parametrize("how", ["open", "state_dict", "load"])
def test_a_version_that_goes_while_it_is_read_is_said_to_be_gone(backend: Backend, how: str) -> None:
    save_many(backend, [1, 2], policy="full")
    removed: list[int] = []

    def remove(operation: str, key: str, _: int) -> Fault:
        if "/c/" in key and not removed:
            removed.append(1)
            cnr_store.gc(backend, keep_last=1)
        return None

    reads: dict[str, Callable[[Backend], object]] = {
        "open": lambda there: values_of(cnr_store.open(there, 1), "tables/items/weight"),
        "state_dict": lambda there: cnr_store.state_dict(there, 1),
        "load": lambda there: cnr_store.load(there, *make_model("adagrad", 0), version=1, rng=False),
    }
    with pytest.raises(VersionNotFoundError, match="removed while it was read"):
        reads[how](FaultyBackend(backend, remove, reads=True))


def test_a_base_that_is_lost_is_still_damage(backend: Backend) -> None:
    made = save_many(backend, [1, 2])
    for key, _ in list(backend.list_keys(f"versions/{made[0]}")):
        backend.delete(key)
    with pytest.raises(cnr_store.CorruptionError, match=made[0]):
        cnr_store.state_dict(backend, made[1])


def test_a_record_that_can_not_be_read_stops_retention(backend: Backend) -> None:
    made = save_many(backend, [1, 2, 3], policy="full")
    backend.put(record_key(made[1]), b"{}")
    before = objects(backend)
    with pytest.raises(cnr_store.CorruptionError, match=made[1]):
        cnr_store.gc(backend, keep_last=1)
    assert objects(backend) == before


def test_storage_that_fails_is_its_own_error(backend: Backend) -> None:
    save_many(backend, [1, 2, 3], policy="full")
    with pytest.raises(StorageError):
        cnr_store.gc(FaultyBackend(backend, lambda *_: "before"), keep_last=1)


def test_a_step_saved_twice_with_one_figure_takes_one_place_among_the_best() -> None:
    with memory_url() as url, Checkpointer(url, *make_model("sgd", 1), policy="full") as checkpointer:
        made = [
            checkpointer.save(step, metadata={"auc": auc}).result().id
            for step, auc in ((1, 0.7), (2, 0.8), (3, 0.9), (3, 0.9), (3, 0.6), (4, 0.1))
        ]
        report = cnr_store.gc(url, keep_best=("auc", "max", 3))
        assert sorted(report.kept) == [made[at] for at in (0, 1, 3, 5)]
