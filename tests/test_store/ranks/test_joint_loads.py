"""Loads of many ranks while one is slow, fails, is interrupted, or while the store changes under it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_store
from cnr_backends import StorageError
from cnr_store import RanksError, SaveError
from cnr_store.catalog import claims
from cnr_store.maintenance.folding.compact import fold
from cnr_store.training.distributed.pieces import LocalPiece
from cnr_store.training.saving import auto_maintenance
from tests.test_store.ranks.support.small_job import (
    SmallJob,
    assert_same,
    find_small_models,
    load_alone,
    watch_reads,
)
from tests.test_store.ranks.support.thread_job import Truth, this_rank
from tests.test_store.support.places import quick_folder

TIMEOUT_SECONDS = 1.5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    find_small_models(monkeypatch)


@pytest.fixture
def url() -> Iterator[str]:
    with quick_folder() as folder:
        yield folder


def save_two(url: str, **options: Any) -> Truth:
    """Save a baseline and a delta; what the model then holds."""
    with SmallJob(url, **options) as job:
        job.save(1)
        job.train(2)
        job.save(2)
        return job.truth


def once(act: Callable[[], object]) -> Callable[..., None]:
    """A function that acts when it is called first."""
    lock, done = threading.Lock(), list[bool]()

    def call(*_: object) -> None:
        with lock:
            if done:
                return
            done.append(True)
        act()

    return call


@pytest.mark.slow
def test_a_rank_that_reads_slowly_is_waited_for(url: str) -> None:
    truth, slept, lock = save_two(url), list[float](), threading.Lock()

    def be_slow(_: str) -> None:
        with lock:
            if sum(slept) < 3 * TIMEOUT_SECONDS:
                slept.append(0.3)
                time.sleep(slept[-1])

    with SmallJob(url, timeout_seconds=TIMEOUT_SECONDS) as job:
        watch_reads(job, 1, be_slow)
        job.load()
        assert sum(slept) >= 3 * TIMEOUT_SECONDS
        assert_same(job.found(), truth)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_read_that_fails_on_one_rank_fails_the_load_on_all_at_once(url: str, victim: int) -> None:
    truth = save_two(url)

    def fail() -> None:
        raise StorageError("injected")

    with SmallJob(url) as job:
        watch_reads(job, victim, once(fail))
        began = time.monotonic()
        found = job.attempt(lambda rank: job.checkpointers[rank].load())
        assert time.monotonic() - began < 10  # a rank that nobody hears of is waited for longer
        assert type(found[victim]) is StorageError
        other = found[1 - victim]
        assert isinstance(other, RanksError)
        assert "injected" in str(other)
        if victim == 1:
            assert "rank 1" in str(other)
        job.load()
        assert_same(job.found(), truth)
        job.save(3)
    assert_same(load_alone(url), truth)


@pytest.mark.slow
def test_a_hook_that_fails_on_one_rank_fails_the_load_on_all(url: str) -> None:
    truth = save_two(url)

    def fail(*_: object) -> None:
        raise ValueError("no cache")

    with SmallJob(url) as job:
        handle = job.models[1].register_load_state_dict_post_hook(fail)  # type: ignore[no-untyped-call]
        for error in job.attempt(lambda rank: job.checkpointers[rank].load()):
            assert isinstance(error, cnr_store.ModelMismatchError)
            assert "no cache" in str(error)
        handle.remove()
        job.load()
        assert_same(job.found(), truth)


@pytest.mark.slow
def test_ranks_wait_for_a_fold_that_takes_long(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fold_slowly(*arguments: Any) -> Any:
        time.sleep(3 * TIMEOUT_SECONDS)
        return fold(*arguments)

    with SmallJob(
        url,
        timeout_seconds=TIMEOUT_SECONDS,
        retention=cnr_store.Retention(max_chain=1),
    ) as job:
        job.save(1)
        job.train(2)
        monkeypatch.setattr(auto_maintenance, "fold", fold_slowly)
        job.save(2)
        job.load()
        job.check()
    assert cnr_store.verify(url, deep=True).problems == ()


@pytest.mark.slow
def test_a_version_that_is_removed_on_the_way_gives_way_to_a_newer_one(url: str) -> None:
    save_two(url, policy="full")
    newer: list[Truth] = []

    def go_on() -> None:
        with SmallJob(url, 1, policy="full") as other:
            other.load()
            other.truth = other.found()
            other.train(3)
            other.save(3)
            newer.append(other.truth)
        cnr_store.gc(url, keep_last=1)

    with SmallJob(url) as job:
        watch_reads(job, 1, once(go_on))
        assert [restored.step for restored in job.load()] == [3, 3]
        assert_same(job.found(), newer[0])


@pytest.mark.slow
def test_no_rank_builds_on_what_another_can_t(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a fold in the middle of a load: one rank has read the old chain, another the new one."""
    save_two(url)
    listed = claims.list_tombstoned

    def fail_on_one(backend: Any) -> Any:
        if this_rank() == 1:
            raise StorageError("injected")
        return listed(backend)

    monkeypatch.setattr(claims, "list_tombstoned", fail_on_one)
    with SmallJob(url) as job:
        job.load()
        job.truth = job.found()
        assert [each._saves.planner.lineage.past for each in job.checkpointers] == [None, None]
        job.train(3)
        job.save(3)
        assert cnr_store.versions(url)[-1].kind == "baseline"
        assert_same(load_alone(url), job.truth)


@pytest.mark.slow
def test_after_an_interrupt_on_one_rank_all_save_whole(url: str) -> None:
    with SmallJob(url) as job:
        job.save(1)
        job.train(2)
        job.save(2)
        planner: Any = job.checkpointers[1]._saves.planner
        continue_from = planner.continue_from

        def interrupt(lineage: Any, since_whole: Any) -> None:
            if lineage.past is None:  # as the load begins
                continue_from(lineage, since_whole)
                return
            planner.continue_from = continue_from
            raise KeyboardInterrupt

        job.each(lambda rank: job.checkpointers[rank]._saves.finish_latest())
        planner.continue_from = interrupt
        found = job.attempt(lambda rank: job.checkpointers[rank].load().step)
        assert isinstance(found[0], RanksError)
        assert "rank 1 does not take part: KeyboardInterrupt" in str(found[0])
        assert isinstance(found[1], KeyboardInterrupt)
        job.check()
        kinds = []
        for step in (3, 4):
            job.train(step)
            job.save(step)
            kinds.append(cnr_store.versions(url)[-1].kind)
            assert_same(load_alone(url, step), job.truth)
        assert kinds == ["baseline", "delta"]


def test_a_save_that_fails_where_rows_moved_leaves_the_places_of_all_rows(url: str) -> None:
    with SmallJob(url) as job:
        job.save(1)
        table = job.models[1].sharded.tables[1]
        piece = table.pieces[0]
        table.pieces[0] = LocalPiece(piece.first_row, 0, piece.tensor[:-1])
        found = job.attempt(lambda rank: job.checkpointers[rank].save(2).result())
        assert all(isinstance(each, SaveError | cnr_store.UnsupportedModelError) for each in found), found
        table.pieces[0] = piece
        for step in (3, 4):
            job.train(step)
            job.save(step)
            assert_same(load_alone(url, step), job.truth)


@pytest.mark.slow
def test_every_rank_is_told_of_all_rows_that_were_salvaged(url: str) -> None:
    save_two(url)
    version = cnr_store.versions(url)[-1].id
    shards = sorted(path for path in Path(url).rglob(f"{version}/**/weight/c/*/*") if path.is_file())
    for path in (shards[0], shards[-1]):
        data = bytearray(path.read_bytes())
        data[5] ^= 0xFF
        path.chmod(0o644)
        path.write_bytes(data)
    with SmallJob(url, 1) as alone, SmallJob(url) as job:
        expected = alone.load(salvage=True)[0].salvaged
        assert sum(len(rows.by_version) for rows in expected.values()) >= 2
        for restored in job.load(salvage=True):
            assert restored.salvaged.keys() == expected.keys()
            for name, rows in expected.items():
                assert [*restored.salvaged[name].by_version] == [*rows.by_version]
                for one, ids in rows.by_version.items():
                    np.testing.assert_array_equal(restored.salvaged[name].by_version[one], ids)
        assert_same(job.found(), alone.found())


def test_each_rank_gets_what_it_saved_under_names_that_meet(url: str) -> None:
    def reader_of(rank: int) -> dict[str, Any]:
        return {name: np.arange(3000) * factor + rank for name, factor in (("A", 1), ("a", 2), ("nul", 3))}

    with SmallJob(url) as job:
        for step in (1, 2):
            job.each(
                lambda rank, step=step: (  # type: ignore[misc]
                    job.checkpointers[rank].save(step, reader_of(rank)).result()
                )
            )
        for rank, restored in enumerate(job.load()):
            for name, values in reader_of(rank).items():
                np.testing.assert_array_equal(restored.reader[name], values)
    assert cnr_store.verify(url, deep=True).problems == ()
