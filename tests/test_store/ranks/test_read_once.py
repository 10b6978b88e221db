"""What all ranks of a job need of a store's metadata is read once, whatever their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import cnr_store
from cnr_store import RanksError, SaveError
from cnr_store.training import resumption
from cnr_store.writing import writer
from cnr_store.writing.plan import Plan
from cnr_store.writing.stage import Staged
from tests.test_store.ranks.support.small_job import (
    SmallJob,
    Watched,
    assert_same,
    find_small_models,
    load_alone,
    watch_writes,
)
from tests.test_store.support.places import quick_folder

METADATA = ("zarr.json", "manifest", ".json")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    find_small_models(monkeypatch)


@pytest.fixture
def url() -> Iterator[str]:
    with quick_folder() as folder:
        yield folder


def save_three(url: str, world: int, **options: Any) -> None:
    with SmallJob(url, world, **options) as job:
        for step in (1, 2, 3):
            job.train(step)
            job.save(step)


def watch_metadata(job: SmallJob) -> list[Counter[str]]:
    """By rank, how often each object but pieces of arrays is read from here on by loads."""
    found = [Counter[str]() for _ in range(job.world)]

    def watch(rank: int) -> None:
        def count(operation: str, key: str) -> None:
            if operation == "get" and key.startswith(("versions/", "folds/")) and key.endswith(METADATA):
                found[rank][key] += 1

        backend = job.checkpointers[rank]._loader.backend
        backend.inner = Watched(backend.inner, count)  # type: ignore[assignment]

    for rank in range(job.world):
        watch(rank)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 4])
def test_no_rank_reads_the_record_that_the_first_one_has_made(url: str, bits: int) -> None:
    read: list[tuple[str, str]] = []
    with SmallJob(url, 3, bits=bits, policy="auto") as job:
        for rank in (1, 2):
            watch_writes(job, rank, lambda operation, key: read.append((operation, key)))
        for step in range(1, 6):
            job.train(step)
            metadata = {"loss": 0.1, "bound": float("inf"), "step": step}
            infos = job.each(
                lambda rank, step=step, metadata=metadata: (  # type: ignore[misc]
                    job.checkpointers[rank].save(step, metadata={**metadata, "rank": rank}).result()
                )
            )
            stored = cnr_store.versions(url)[-1]
            assert infos == [stored] * 3
            assert stored.metadata == {**metadata, "rank": 0}
        planners = [each._saves.planner for each in job.checkpointers]
        job.each(lambda rank: job.checkpointers[rank]._saves.finish_latest())
        assert len({planner.lineage.digest() for planner in planners}) == 1
        past = planners[0].lineage
        assert all(planner.lineage.past == past.past for planner in planners)
        assert past.past is not None
    assert {operation for operation, _ in read} <= {"put", "size", "get"}
    claims = [key for operation, key in read if operation == "get"]
    # Each looks whether it is the first rank's store: once at first, and at each save before it votes.
    assert claims == ["writers/000001"] * 2 * (1 + 5)


def test_the_first_rank_commits_in_six_requests(url: str) -> None:
    done: list[tuple[str, str]] = []
    with SmallJob(url, 3) as job:
        for step in (1, 2):
            job.train(step)
            if step == 2:
                watch_writes(job, 0, lambda operation, key: done.append((operation, key)))
            job.save(step)
        job.each(lambda rank: job.checkpointers[rank]._saves.finish_latest())
    keys = [key.split("/", 2)[-1] for _, key in done]
    first = keys.index("manifest")
    created = next(at for at, (operation, _) in enumerate(done) if operation == "create")
    assert first < created < first + 6
    assert keys.index("state/main.json") < first


def test_a_rank_that_puts_another_state_than_it_said_fails_the_save(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = writer.put_state_parts
    with SmallJob(url, 2) as job:
        job.save(1)

        def put_another(backend: Any, version: str, plan: Plan, staged: Staged) -> None:
            changes = 1 in plan.state_parts
            put(backend, version, replace(plan, state_parts={1: {"reader": 7}}) if changes else plan, staged)

        monkeypatch.setattr(writer, "put_state_parts", put_another)
        found = job.attempt(lambda rank: job.checkpointers[rank].save(2).result())
        assert all(isinstance(each, SaveError) for each in found), found
        assert all("rank 1 put another part of the state than it had" in str(each) for each in found)
        monkeypatch.undo()
        find_small_models(monkeypatch)
        job.save(3)
    assert [each.step for each in cnr_store.versions(url)] == [1, 3]
    assert cnr_store.verify(url, deep=True).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("version", ["latest", 3, 2])
def test_only_the_first_rank_reads_what_all_need(url: str, version: str | int) -> None:
    save_three(url, 3)
    with SmallJob(url, 3) as job:
        found = watch_metadata(job)
        job.load(version)
        assert_same(job.found(), load_alone(url, version))
    chain = [each.id for each in cnr_store.versions(url) if version == "latest" or each.step <= int(version)]
    newest = chain[-1]
    for rank in (1, 2):
        assert found[rank] == {f"versions/{newest}/state/ranks/{rank:06d}.json": 1}
    for each in chain:
        for name in ("zarr.json", "manifest"):
            assert found[0][f"versions/{each}/{name}"] == 1
    assert found[0][f"versions/{newest}/state/main.json"] == 1


@pytest.mark.slow
def test_a_part_of_another_number_of_ranks_is_read_once(url: str) -> None:
    save_three(url, 2)
    with SmallJob(url, 3) as job:
        found = watch_metadata(job)
        restored = job.load()
        assert_same(job.found(), load_alone(url))
    assert [len(each.readers) for each in restored] == [2, 2, 2]
    assert not found[1] + found[2]
    assert set(found[0].values()) == {1}
    assert sum("/state/ranks/" in key for key in found[0]) == 2


@pytest.mark.slow
def test_a_fold_is_read_once(url: str) -> None:
    save_three(url, 2)
    cnr_store.compact(url)
    with SmallJob(url, 2) as job:
        found = watch_metadata(job)
        job.load()
        assert_same(job.found(), load_alone(url))
        assert [*found[1]] == [f"versions/{cnr_store.versions(url)[-1].id}/state/ranks/000001.json"]
        assert any(key.startswith("folds/") for key in found[0])
        job.train(4)
        job.save(4)
        assert_same(load_alone(url), job.found())


@pytest.mark.slow
def test_bytes_that_change_on_the_way_fail_the_load_on_all(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_three(url, 2)
    monkeypatch.setattr(resumption, "PIECE_BYTES", 100)
    with SmallJob(url, 2) as job:
        group: Any = job.groups[1]
        broadcast = group.broadcast

        def spoil(data: bytes | None) -> bytes:
            arrived: bytes = broadcast(data)
            return arrived if len(arrived) != 100 else bytes(100)

        group.broadcast = spoil
        errors = job.attempt(lambda rank: job.checkpointers[rank].load())
        assert all(isinstance(each, RanksError) for each in errors)
        assert all("rank 1 got other bytes than rank 0 sent" in str(each) for each in errors)
        group.broadcast = broadcast
        job.load()
        assert_same(job.found(), load_alone(url))
