"""What killed folds left of versions that stay: `gc` removes it, or says why it stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cnr_store
from cnr_backends import Backend, BackendError, open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store import SaveError
from tests.test_store.support.places import quick_folder
from tests.test_store.support.retention_helpers import check_exact, contents, objects, save_many


@pytest.fixture
def backend() -> Iterator[Backend]:
    with quick_folder() as folder:
        yield open_backend(folder)


def kill_folds(backend: Backend, count: int = 2) -> int:
    """End so many folds of the latest version right before their records. Bytes of what they left."""

    def fault(operation: str, key: str, _: int) -> Fault:
        return "before" if key.startswith("folds/") and operation in ("create", "delete") else None

    for _ in range(count):
        with pytest.raises(SaveError):
            cnr_store.compact(FaultyBackend(backend, fault))
    return fold_bytes(backend)


def fold_bytes(backend: Backend) -> int:
    return sum(nbytes for _, nbytes in backend.list_keys("folds"))


@pytest.mark.slow
def test_what_is_left_beside_a_fold_is_removed(backend: Backend) -> None:
    save_many(backend, [1, 2, 3])
    nbytes = kill_folds(backend)
    assert nbytes > 0

    def fault(operation: str, key: str, _: int) -> Fault:
        return "before" if operation == "delete" else None

    cnr_store.compact(FaultyBackend(backend, fault))  # which can't remove what the others left
    fold = fold_bytes(backend) - nbytes
    expected = contents(backend)
    planned = cnr_store.gc(backend, dry_run=True)
    report = cnr_store.gc(backend)
    assert (report.freed_bytes, planned.freed_bytes, fold_bytes(backend)) == (nbytes, nbytes, fold)
    assert (report.left, planned.left) == ({}, {})
    assert cnr_store.gc(backend, keep_last=1).removed
    check_exact(backend, expected)


def test_what_is_left_without_a_fold_is_counted(backend: Backend) -> None:
    """A fold that was stopped may go on, so nothing is removed."""
    made = save_many(backend, [1, 2, 3])
    nbytes = kill_folds(backend)
    before = objects(backend)
    for dry_run in (True, False):
        report = cnr_store.gc(backend, grace_seconds=0, dry_run=dry_run)
        assert list(report.left) == [made[-1]]
        assert "a fold of this version has not ended" in report.left[made[-1]]
        assert (report.left_bytes, report.freed_bytes) == (nbytes, 0)
    assert objects(backend) == before
    assert cnr_store.compact(backend).outcome == "folded"
    assert cnr_store.gc(backend, grace_seconds=0).left == {}


def test_a_fold_for_whose_record_there_is_no_room_leaves_nothing(backend: Backend) -> None:
    save_many(backend, [1, 2, 3])

    def fault(operation: str, key: str, _: int) -> Fault:
        return "full" if key.startswith("folds/") and operation == "create" else None

    with pytest.raises((SaveError, BackendError)):
        cnr_store.compact(FaultyBackend(backend, fault))
    assert fold_bytes(backend) == 0
