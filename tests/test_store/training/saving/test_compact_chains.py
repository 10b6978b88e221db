"""`max_chain`: chains that are folded behind a training job, with retention beside it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store import Checkpointer, OptionError
from cnr_store.catalog.catalog import Catalog
from cnr_store.format import layout

WAIT_SECONDS = 60


class Job:
    """Saves a table of which a few rows change each time."""

    def __init__(self, backend: Backend, **options: Any) -> None:
        self.table = nn.Embedding(500, 8, sparse=True)
        self.backend = backend
        self.checkpointer = Checkpointer(
            backend,
            self.table,
            None,
            **{"policy": "consecutive", "bits": {"weight": 4}, "job": cnr_store.Job(rng=False), **options},
        )
        self.step = 0
        self.expected: dict[str, bytes] = {}

    def start(self) -> cnr_store.PendingSave:
        self.step += 1
        rows = [self.step, 3 * self.step + 7]
        with torch.no_grad():
            self.table.weight[rows] = torch.randn(2, 8)
        self.checkpointer.touch("weight", rows)
        return self.checkpointer.save(self.step)

    def save(self) -> cnr_store.VersionInfo:
        info = self.start().result(WAIT_SECONDS)
        self.expected[info.id] = cnr_store.state_dict(self.backend, info)["weight"].tobytes()
        return info

    def upkeep(self) -> None:
        """Wait for what goes on behind the saves, of which nothing public tells."""
        self.checkpointer._upkeep.wait()

    def check(self) -> None:
        """Every version that is there reads as it did when it was saved."""
        for info in cnr_store.versions(self.backend):
            assert cnr_store.state_dict(self.backend, info)["weight"].tobytes() == self.expected[info.id]


def folds(backend: Backend) -> list[str]:
    return backend.list_names(layout.FOLDS)


def touched(backend: Backend) -> list[int]:
    """How many versions reading each version touches, as its record says."""
    catalog = Catalog(backend)
    return [1 + len(catalog.record(info.id).needs) for info in cnr_store.versions(backend)]


def test_chains_stay_short_and_saves_stay_small(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    job = Job(backend, retention=cnr_store.Retention(max_chain=3))
    for _ in range(10):
        job.save()
        job.upkeep()
    job.checkpointer.close()
    assert touched(backend) == [1, 2, 3, 4, 2, 3, 4, 2, 3, 4]
    infos = cnr_store.versions(backend)
    assert folds(backend) == [infos[number].id for number in (3, 6, 9)]
    assert [info.kind for info in infos] == ["baseline"] + 9 * ["delta"]
    job.check()


def test_without_it_nothing_is_folded(tmp_path: Path) -> None:
    job = Job(open_backend(tmp_path), retention=cnr_store.Retention(max_chain=None))
    for _ in range(5):
        job.save()
    job.checkpointer.close()
    assert folds(job.backend) == []


@pytest.mark.slow
def test_folds_let_retention_remove_what_they_stand_for(tmp_path: Path) -> None:
    """Consecutive deltas alone would keep every version for ever."""
    job = Job(open_backend(tmp_path), retention=cnr_store.Retention(max_chain=2), keep_last=1)
    for _ in range(12):
        job.save()
        job.upkeep()
    job.checkpointer.close()
    infos = cnr_store.versions(job.backend)
    assert len(infos) <= 4
    assert infos[-1].step == 12
    assert all(info.kind == "delta" for info in infos)
    job.check()


@pytest.mark.slow
def test_a_save_planned_before_the_fold_keeps_what_it_leans_on(tmp_path: Path) -> None:
    """The fold of one version ends while the next save is under way, and retention runs behind both."""
    reached, go_on = threading.Event(), threading.Event()
    held: list[str] = []

    def hold(operation: str, key: str, index: int) -> Fault:
        if operation == "create" and key.startswith(layout.FOLDS) and not held:
            held.append(key)
            reached.set()
            assert go_on.wait(WAIT_SECONDS)
        return None

    inner = open_backend(tmp_path)
    job = Job(FaultyBackend(inner, hold), retention=cnr_store.Retention(max_chain=2), keep_last=1)
    for _ in range(3):
        job.save()
    assert reached.wait(WAIT_SECONDS)
    pending = job.start()  # leans on the whole chain
    go_on.set()
    info = pending.result(WAIT_SECONDS)
    job.expected[info.id] = cnr_store.state_dict(inner, info)["weight"].tobytes()
    for _ in range(6):
        job.upkeep()
        assert job.save().kind == "delta"
    job.checkpointer.close()
    job.check()
    assert len(cnr_store.versions(inner)) <= 4


@pytest.mark.slow
def test_folds_slower_than_saves_do_not_keep_retention_from_its_work(tmp_path: Path) -> None:
    """Each fold ends only once the next save is under way, so that some fold always waits to be taken up."""
    turn, commits, until = threading.Condition(), 0, 0

    def hold(operation: str, key: str, index: int) -> Fault:
        nonlocal until
        if operation == "create" and key.startswith(layout.FOLDS):
            with turn:
                until = commits + 1
                turn.notify_all()
                assert turn.wait_for(lambda: commits >= until, WAIT_SECONDS)
        return None

    def wake(_: object = None) -> None:
        with turn:
            turn.notify_all()

    def settled() -> bool:
        upkeep = job.checkpointer._upkeep._latest
        return until > commits or (upkeep is not None and upkeep.done())

    job = Job(
        FaultyBackend(open_backend(tmp_path), hold), retention=cnr_store.Retention(max_chain=2), keep_last=1
    )
    kept = []
    for _ in range(16):
        job.save()
        upkeep = job.checkpointer._upkeep._latest
        assert upkeep is not None
        with turn:
            commits += 1
            turn.notify_all()
        upkeep.add_done_callback(wake)
        with turn:
            assert turn.wait_for(settled, WAIT_SECONDS)
        kept.append(len(cnr_store.versions(job.backend)))
    with turn:
        commits += 1
        turn.notify_all()
    job.checkpointer.close()
    job.check()
    assert max(kept) <= 6


def test_a_fold_that_fails_harms_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fault(operation: str, key: str, index: int) -> Fault:
        return "full" if operation == "put" and key.startswith(layout.FOLDS) else None

    inner = open_backend(tmp_path)
    with caplog.at_level(logging.WARNING, "cnr_store"):
        job = Job(FaultyBackend(inner, fault), retention=cnr_store.Retention(max_chain=1))
        for _ in range(4):
            job.save()
            job.upkeep()
        job.checkpointer.close()
    assert "upkeep after version" in caplog.text
    assert "was not folded" in caplog.text
    assert list(inner.list_keys(layout.FOLDS)) == []
    assert touched(inner) == [1, 2, 3, 4]
    job.check()


def test_policies_change_over_a_fold(tmp_path: Path) -> None:
    """Rows that changed since the folded version are known exactly, also to a policy that counts from the baseline."""
    backend = open_backend(tmp_path)
    job = Job(backend, retention=cnr_store.Retention(max_chain=3))
    for _ in range(4):
        job.save()
    job.upkeep()
    version = cnr_store.versions(backend)[-1].id
    # Only `auto` mixes the two kinds of delta in one run, and not when a test wants it to.
    job.checkpointer._saves.planner._policy = "one-shot"
    job.save()
    job.save()
    job.checkpointer.close()
    catalog = Catalog(backend)
    for info, rows in zip(cnr_store.versions(backend)[-2:], (2, 4), strict=True):
        (entry,) = catalog.record(info.id).arrays.values()
        assert (entry.base, entry.rows) == (version, rows)
    job.check()


@pytest.mark.parametrize("max_chain", [0, -1, True, 1.5, "3"])
def test_numbers_that_are_none(tmp_path: Path, max_chain: Any) -> None:
    with pytest.raises(OptionError, match="max_chain"):
        Job(open_backend(tmp_path), retention=cnr_store.Retention(max_chain=max_chain))


def test_a_loaded_job_leans_on_the_fold(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    job = Job(backend, retention=cnr_store.Retention(max_chain=3))
    for _ in range(4):
        job.save()
    job.checkpointer.close()
    other = Job(backend, retention=cnr_store.Retention(max_chain=3))
    other.checkpointer.load()
    assert np.array_equal(other.table.weight.detach().numpy(), cnr_store.state_dict(backend)["weight"])
    other.expected = job.expected
    other.step = 100
    other.save()
    other.checkpointer.close()
    assert touched(backend)[-1] == 2
    other.check()
