"""Ranks whose one URL names different places, as a path on the local disks of several hosts does, commit nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import cnr_store
from cnr_backends import open_backend
from cnr_store import CheckpointError
from tests.test_store.ranks.support.small_job import SmallJob, find_small_models


@pytest.mark.parametrize("is_used", [False, True])
def test_places_apart_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_used: bool) -> None:
    find_small_models(monkeypatch)
    first, other = str(tmp_path / "first"), str(tmp_path / "other")
    if is_used:
        with SmallJob(other, 1) as older:
            older.save(1)
    places = [open_backend(first), open_backend(other)]
    places[1].url = places[0].url
    with SmallJob(places, timeout_seconds=5) as job:
        for error in job.attempt(lambda rank: job.checkpointers[rank].save(1).result()):
            assert isinstance(error, CheckpointError)
            assert "the URL of one store that all of them can reach" in str(error)
    assert cnr_store.versions(first) == []
    assert len(cnr_store.versions(other)) == is_used


@pytest.mark.parametrize("loser", [0, 1])
def test_a_mount_that_a_rank_loses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loser: int
) -> None:
    """What lies below the mount takes objects as well as the store does."""
    find_small_models(monkeypatch)
    store, mount = tmp_path / "store", tmp_path / "mount"
    store.mkdir()
    mount.symlink_to(store)
    places = [open_backend(str(mount if rank == loser else store)) for rank in range(2)]
    places[1].url = places[0].url
    with SmallJob(places, timeout_seconds=5) as job:
        job.save(1)
        mount.unlink()
        mount.mkdir()
        for error in job.attempt(lambda rank: job.checkpointers[rank].save(2).result()):
            assert isinstance(error, CheckpointError)
            assert loser == 0 or "still mounted here" in str(error)
        shutil.rmtree(mount)
        mount.symlink_to(store)
        if loser:
            job.save(3)
    assert [version.step for version in cnr_store.versions(str(store))] == [1, 3][: 1 + loser]
    assert cnr_store.verify(str(store), deep=True).ok
