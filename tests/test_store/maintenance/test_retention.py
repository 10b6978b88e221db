"""What retention keeps beneath versions, what it removes, how a job runs it, and what readers notice of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch

import cnr_store
from cnr_backends import Backend, StorageError
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import VersionNotFoundError
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.layout import record_key
from tests.test_store.support.retention_helpers import (
    Trainer,
    check_exact,
    content,
    contents,
    is_void,
    objects,
    remains,
    save_many,
    steps,
    visible,
)
from tests.test_store.support.small_model import make_model
from tests.test_store.support.zarr_nodes import values_of

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


# A job's own retention


@pytest.mark.slow
def test_a_job_keeps_so_many_versions(backend: Backend) -> None:
    with_rules = Trainer(backend, keep_last=2, retention=cnr_store.Retention(keep_every=4))
    expected = {}
    for step in range(1, 12):
        version = with_rules.save(step, full=step % 3 == 0)
        expected[version] = content(backend, version)
    with_rules.close()
    assert steps(backend) == [3, 4, 6, 7, 8, 9, 10, 11]
    check_exact(backend, expected)
    model, optimizers = make_model("adagrad", seed=0)
    assert cnr_store.load(backend, model, optimizers, job=cnr_store.Job(rng=False)).step == 11
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
        "load": lambda there: cnr_store.load(
            there, *make_model("adagrad", 0), version=1, job=cnr_store.Job(rng=False)
        ),
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
