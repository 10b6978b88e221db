"""Runs that have loaded while upkeep removes what their first delta would build on: the first save is committed."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.record import Record
from tests.test_store.ranks.support.small_job import SmallJob, assert_same, find_small_models, load_alone
from tests.test_store.support.faults import to_strike
from tests.test_store.support.places import quick_folder
from tests.test_store.support.retention_helpers import Trainer, check_exact, contents, save_many, visible
from tests.test_store.support.same_arrays import assert_same_arrays

POLICIES = ("one-shot", "consecutive", "intermittent", "auto")


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return open_backend(tmp_path)


def fold_and_collect(backend: Backend) -> None:
    """What a cron job does every night."""
    cnr_store.compact(backend)
    cnr_store.gc(backend, keep_last=1, grace_seconds=0)


def resumed(backend: Backend, version: str | int = "latest", **options: Any) -> Trainer:
    """A job that has loaded and trained, and has not saved yet."""
    trainer = Trainer(backend, seed=7, **{"bits": 32, **options})
    trainer.checkpointer.load(version)
    trainer.train()
    return trainer


def state(trainer: Trainer) -> dict[str, Any]:
    found = {name: each.detach().numpy().copy() for name, each in trainer.model.state_dict().items()}
    for number, optimizer in enumerate(trainer.optimizers):
        for key, slots in optimizer.state_dict()["state"].items():
            found |= {
                f"{number}/{key}/{name}": torch.as_tensor(value).numpy().copy()
                for name, value in slots.items()
            }
    return found


def save_exactly(trainer: Trainer, backend: Backend, step: int) -> Record:
    """Save without training before it; what a new job loads is what this one has."""
    version = trainer.checkpointer.save(step).result(60).id
    fresh = Trainer(backend, seed=8, bits=32)
    fresh.checkpointer.load(version)
    assert_same_arrays(state(fresh), state(trainer))
    fresh.close()
    return Catalog(backend).record(version)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_save_builds_on_the_fold_that_took_the_place_of_its_base(
    backend: Backend, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = save_many(backend, [1, 2, 3], bits=32, policy=policy)
    trainer = resumed(backend, policy=policy)
    fold_and_collect(backend)
    assert visible(backend) == made[-1:]
    with caplog.at_level(logging.INFO, "cnr_store"):
        record = save_exactly(trainer, backend, 4)
    assert (record.kind, record.needs) == ("delta", (made[-1],))
    assert f"builds on the fold of version {made[-1]}" in caplog.text
    trainer.train()
    assert save_exactly(trainer, backend, 5).kind == "delta"
    trainer.close()
    before = contents(backend)
    cnr_store.gc(backend, keep_last=1, grace_seconds=0)
    check_exact(backend, before)
    assert cnr_store.verify(backend, deep=True).ok


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("full", [(), (3,)])
@pytest.mark.parametrize("is_new", [False, True])
def test_the_first_save_after_a_rollback_is_whole_if_its_base_was_removed(
    backend: Backend, policy: str, full: tuple[int, ...], is_new: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"bits": 32, "policy": policy}
    trainer = Trainer(backend, **options)
    made = [trainer.save(step, full=step in full) for step in (1, 2, 3, 4)]
    if is_new:
        trainer.close()
        trainer = Trainer(backend, seed=3, **options)
    trainer.checkpointer.load(made[1])
    trainer.train()
    cnr_store.compact(backend)
    cnr_store.gc(backend, keep_last=1, grace_seconds=0)
    is_lost = made[1] not in visible(backend)
    record = save_exactly(trainer, backend, 5)
    assert record.previous == made[1]
    if is_lost:
        assert record.kind == "baseline"
        assert "was removed since this job loaded; the save is whole" in caplog.text
        assert str(record.policy["reason"]).endswith(" was removed before this run's first save")
    trainer.train()
    again = save_exactly(trainer, backend, 6)
    assert again.kind == "delta"
    trainer.close()
    assert cnr_store.verify(backend, deep=True).ok


@pytest.mark.slow
def test_the_first_save_builds_on_the_fold_of_an_older_link(backend: Backend) -> None:
    made = save_many(backend, [1, 2, 3, 4], bits=32)
    trainer = resumed(backend)
    cnr_store.compact(backend, 3)
    cnr_store.gc(backend, keep_last=2, grace_seconds=0)
    assert visible(backend) == made[2:]
    record = save_exactly(trainer, backend, 5)
    assert (record.kind, record.needs) == ("delta", (made[3], made[2]))
    trainer.close()


@pytest.mark.slow
def test_rows_on_a_lattice_go_on_over_the_fold(backend: Backend) -> None:
    options: dict[str, Any] = {"codec": {"id": "cnr_lattice", "rms_step": 0.35}, "bits": "auto"}
    made = save_many(backend, [1, 2, 3], **options)
    trainer = resumed(backend, **options)
    fold_and_collect(backend)
    changed = []
    for step in (4, 5, 6):
        version = trainer.checkpointer.save(step).result(60)
        assert version.kind == "delta"
        changed.append(_changed_items(backend, version.id))
        trainer.train()
    assert visible(backend)[0] == made[-1]
    assert all(0 < rows <= 3 for rows in changed)
    trainer.close()
    assert cnr_store.verify(backend, deep=True).ok


def _changed_items(backend: Backend, version: str) -> int:
    """How many rows of a table differ from those of the version before."""
    after = Catalog(backend).record(version)
    assert after.previous is not None
    rows = [cnr_store.state_dict(backend, each)["items.weight"] for each in (after.previous, version)]
    return int((rows[0] != rows[1]).any(axis=1).sum())


class Upkeep:
    """Folds and collects before one operation of a job's storage, or notes them only."""

    def __init__(self, backend: Backend, at: int | None) -> None:
        self._backend, self._at = backend, at
        self.armed = False
        self.log: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def __call__(self, operation: str, key: str, index: int) -> Fault:
        with self._lock:
            lands = self.armed and len(self.log) == self._at
            self.log.extend([(operation, key)] if self.armed else [])
        if lands:
            cnr_store.compact(self._backend)
            cnr_store.gc(self._backend, keep_last=1, grace_seconds=0)
        return None


def first_save(version: str | int, at: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Save for the first time, with upkeep before one of the operations: the version's kind, and the operations."""
    with quick_folder() as folder:
        inner = open_backend(folder)
        save_many(inner, [1, 2, 3, 4], full=[3], bits=32)
        upkeep = Upkeep(inner, at)
        trainer = resumed(FaultyBackend(inner, upkeep, reads=True), version)
        upkeep.armed = True
        trainer.checkpointer.save(5).result(60)
        upkeep.armed = False
        assert at is None or at < len(upkeep.log)
        trainer.train()
        kind = Catalog(inner).record(visible(inner)[-1]).kind
        save_exactly(trainer, inner, 6)
        trainer.close()
        assert cnr_store.verify(inner, deep=True).ok
    return kind, upkeep.log


@pytest.mark.some_by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("version", ["latest", 2])
def test_upkeep_before_any_operation_of_the_first_save_fails_no_save(version: str | int) -> None:
    _, log = first_save(version)
    assert len(log) > 10
    kinds = {first_save(version, at)[0] for at in to_strike(log)}
    assert "delta" in kinds
    assert ("baseline" in kinds) == (version == 2)


@pytest.mark.slow
def test_only_the_first_save_after_a_load_looks_at_the_store_while_training_waits(backend: Backend) -> None:
    seen: list[str] = []

    def note(operation: str, key: str, index: int) -> Fault:
        if threading.current_thread() is threading.main_thread():
            seen.append(key)
        return None

    save_many(backend, [1, 2], bits=32)
    trainer = resumed(FaultyBackend(backend, note, reads=True))
    kinds: list[bool] = []
    for step in (3, 4, 5):
        seen.clear()
        trainer.checkpointer.save(step).result(60)
        kinds.append(bool(seen))
        trainer.train()
    assert kinds == [True, False, False]
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["before", "unanswered"])
def test_a_store_that_fails_the_look_once_costs_no_save(backend: Backend, fault: Fault) -> None:
    save_many(backend, [1, 2], bits=32)
    at, left, failed = 0, [-1], True

    def fail_once(operation: str, key: str, index: int) -> Fault:
        if threading.current_thread() is not threading.main_thread():
            return None
        left[0] -= 1
        return fault if left[0] == -1 else None

    while failed:
        left[0] = -1
        trainer = resumed(FaultyBackend(backend, fail_once, reads=True))
        left[0] = at
        version = trainer.checkpointer.save(3 + at).result(60)
        failed, at = left[0] < 0, at + 1
        assert version.kind == "delta"
        trainer.close()
    assert at > 5
    assert cnr_store.verify(backend, deep=True).ok


@pytest.mark.slow
def test_a_preempted_job_keeps_its_only_save_though_cron_ran_before_it(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    save_many(backend, [1, 2, 3], bits=32)
    trainer = resumed(backend)
    cnr_store.compact(str(tmp_path))
    cnr_store.gc(str(tmp_path), keep_last=1, grace_seconds=0)
    with trainer.checkpointer.preemption() as preempted:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preempted
        trainer.checkpointer.save(4)
    trainer.close()
    assert cnr_store.versions(backend)[-1].step == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "kind", "upkeep"),
    [
        ("latest", "delta", fold_and_collect),
        (1, "baseline", lambda backend: cnr_store.gc(backend, keep_last=1, grace_seconds=0)),
    ],
)
def test_all_ranks_plan_anew_alike(
    monkeypatch: pytest.MonkeyPatch, version: str | int, kind: str, upkeep: Callable[[Backend], object]
) -> None:
    find_small_models(monkeypatch)
    with quick_folder() as url:
        with SmallJob(url) as job:
            job.save(1)
            job.train(2)
            job.save(2)
            if version == 1:
                job.train(3)
                job.each(lambda rank: job.checkpointers[rank].save(3, full=True).result(60))
        with SmallJob(url) as job:
            job.load(version)
            job.truth = job.found()
            upkeep(open_backend(url))
            job.train(4)
            job.save(4)
            assert cnr_store.versions(url)[-1].kind == kind
            job.train(5)
            job.save(5)
            truth = job.truth
        assert_same(load_alone(url), truth)
        assert cnr_store.verify(url, deep=True).ok
