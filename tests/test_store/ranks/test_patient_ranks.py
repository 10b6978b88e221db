"""A rank that asks the storage again makes progress: no other rank gives it up, however short the timeout."""

from __future__ import annotations

import random

import pytest

from cnr_backends import StorageError
from cnr_store.writing import patience
from tests.test_store.ranks.support.small_job import (
    SmallJob,
    assert_same,
    find_small_models,
    load_alone,
    watch_writes,
)
from tests.test_store.support.places import quick_folder

TIMEOUT_SECONDS = 1.5
PAUSE_SECONDS = 4.0


@pytest.mark.parametrize(("victim", "operation", "part"), [(0, "create", "zarr.json"), (1, "put", "/c/")])
def test_ranks_wait_while_one_asks_again(
    victim: int, operation: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_small_models(monkeypatch)
    monkeypatch.setattr(patience, "_FIRST_PAUSE_SECONDS", PAUSE_SECONDS)
    monkeypatch.setattr(random, "uniform", lambda *_: 1.0)
    failed = list[str]()

    def fail_once(found: str, key: str) -> None:
        if found == operation and part in key and not failed:
            failed.append(key)
            error = StorageError("injected")
            error.transient = True
            raise error

    with quick_folder() as url, SmallJob(url, timeout_seconds=TIMEOUT_SECONDS, retry_seconds=60) as job:
        job.save(1)
        watch_writes(job, victim, fail_once)
        job.train(2)
        job.save(2)
        assert failed
        assert_same(load_alone(url, 2), job.truth)
