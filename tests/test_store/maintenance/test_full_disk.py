"""A disk without a free block: a failed save gives its room back, and `gc` makes more, in a new process too."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import cnr_store
from cnr_backends import Backend, StorageFullError, open_backend
from cnr_backends.backend import CHANGES
from cnr_backends.local import RESERVE, RESERVE_BYTES
from cnr_backends.testing.faulty import Fault, FaultyBackend, Result
from cnr_store import SaveError
from cnr_store.format.layout import VersionId, version_key
from tests.small_disks import KINDS, fill, free_bytes, small_disk
from tests.test_store.support.processes import Jobs
from tests.test_store.support.retention_helpers import (
    Trainer,
    check_exact,
    contents,
    is_void,
    objects,
    remains,
    save_many,
    visible,
)

BLOCK_BYTES = 4096
LEFTOVER_BYTES = 400_000
UNLIMITED = 1 << 40


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with small_disk(request.param, tmp_path) as place:
        yield place


class FullFolder(FaultyBackend):
    """A folder on a disk whose last block is taken whenever `full` is set, but for those that a delete gives back."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.capacity = folder, UNLIMITED
        self._one = threading.Lock()
        super().__init__(open_backend(folder), self._fault)

    def _pass(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        # No other thread takes the block that this one found.
        with self._one if operation in CHANGES else nullcontext():
            return super()._pass(operation, key, call)

    def _fault(self, operation: str, key: str, _: int) -> Fault:
        if operation not in ("put", "create") or self.capacity == UNLIMITED:
            return None
        return "full" if self.blocks() >= self.capacity else None

    def blocks(self) -> int:
        sizes = (0 if path.is_dir() else path.stat().st_size for path in self.folder.rglob("*"))
        return sum(max(1, -(-size // BLOCK_BYTES)) for size in sizes)

    def fill(self, but_blocks: int = 0) -> None:
        self.capacity = self.blocks() + but_blocks

    def hold_reserve(self) -> None:
        if self.blocks() + RESERVE_BYTES // BLOCK_BYTES < self.capacity:
            super().hold_reserve()


def shape(folder: Path) -> list[str]:
    """What lies in a folder, empty folders and temporary files too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def leave(backend: Backend, claim_of: str, number: int = 99) -> str:
    """What a process leaves that is killed in the middle of a save: objects, and a file that was being written."""
    version = VersionId.parse(claim_of)
    assert version is not None
    attempt = str(VersionId(version.claim, number))
    backend.put(version_key(attempt, "tables/users/weight/c/0/0"), bytes(LEFTOVER_BYTES))
    folder = Path(backend.url.removeprefix("file://"), version_key(attempt, "tables/users/weight/c/1"))
    folder.mkdir()
    (folder / ".tmp-0123456789abcdef").write_bytes(bytes(LEFTOVER_BYTES))
    return attempt


def killed_in_a_save(jobs: Jobs, store: Path) -> str:
    """A process goes on from the newest version, and dies while it saves; the attempt's id."""
    options = {"saves": 1, "seed": 7, "stop": "manifest", "signal": "SIGKILL"}
    assert jobs.run("train", str(store), **options)[1] == "killed"
    attempts = {path.name for path in (store / "versions").iterdir() if path.is_dir()}
    (not_committed,) = attempts - {*visible(open_backend(store))}
    return not_committed


def gc_in_a_new_process(store: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "cnr_store.cli", "gc", str(store), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


# Failed saves


def check_failed_saves(trainer: Trainer, folder: Path) -> None:
    """Saves that find no room leave nothing, and change nothing."""
    before, there = contents(open_backend(folder)), shape(folder / "versions")
    for step in (10, 11):
        with pytest.raises(SaveError) as caught:
            trainer.save(step)
        assert isinstance(caught.value.__cause__, StorageFullError)
        assert shape(folder / "versions") == there
        assert check_exact(open_backend(folder), before) == list(before)


def check_no_row_was_forgotten(trainer: Trainer, folder: Path) -> None:
    trainer.save(12)
    expected = trainer.weights()
    reader = Trainer(open_backend(folder), seed=5)
    assert reader.checkpointer.load().step == 12
    assert reader.weights() == expected
    reader.close()
    trainer.close()


@pytest.mark.slow
def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    for but_blocks in range(0, 12, 2):
        folder = tmp_path / str(but_blocks)
        disk = FullFolder(folder)
        trainer = Trainer(disk, bits=32)
        trainer.save(1)
        trainer.save(2)
        disk.fill(but_blocks)
        check_failed_saves(trainer, folder)
        disk.capacity = UNLIMITED
        check_no_row_was_forgotten(trainer, folder)


def import_weights(disk: Backend, folder: Path) -> None:
    torch.save({"users.weight": torch.ones(300, 16)}, folder / "weights.pt")
    cnr_store.import_file(folder / "weights.pt", disk, step=9)


def test_a_failed_save_names_the_one_version_that_can_go(tmp_path: Path) -> None:
    disk = FullFolder(tmp_path / "store")
    trainer = Trainer(disk, policy="full")
    first, _ = (trainer.save(step) for step in (1, 2))
    disk.fill()
    with pytest.raises(SaveError, match=f"it removes 1 of 2 versions, {first}; with --dry-run"):
        trainer.save(3)


@pytest.mark.slow
@pytest.mark.parametrize("imports", [False, True])
def test_the_command_that_a_failed_save_names_makes_room(tmp_path: Path, imports: bool) -> None:
    disk = FullFolder(tmp_path / "a store")
    trainer = Trainer(disk, policy="full")
    made = [trainer.save(step) for step in range(1, 8)]
    if imports:
        trainer.close()
    disk.fill()
    with pytest.raises(SaveError) as caught:
        import_weights(disk, tmp_path) if imports else trainer.save(8)
    said = re.search(
        r"`cnr gc (.*) --keep-last (\d+)` frees ([\d,]+) bytes: it removes (.*);", str(caught.value)
    )
    assert said is not None
    url, keep, nbytes, removed = said.groups()
    assert (shlex.split(url), keep) == ([disk.url], "3")
    done = cnr_store.gc(disk, keep_last=3)
    assert f"{done.freed_bytes:,}" == nbytes
    assert done.removed == tuple(made[:4])
    assert removed == f"4 of 7 versions, from {made[0]} to {made[3]}"
    disk.capacity += 8  # of new folders, for which this disk gives back nothing
    import_weights(disk, tmp_path) if imports else trainer.save(8)
    trainer.close()


def test_where_gc_frees_nothing_a_failed_save_says_so(tmp_path: Path) -> None:
    disk = FullFolder(tmp_path)
    trainer = Trainer(disk)
    for step in range(1, 4):  # each leans on the one before
        trainer.save(step)
    disk.fill()
    with pytest.raises(
        SaveError, match=r"has its rows\. Nothing of this store can be removed: make room"
    ) as caught:
        trainer.save(4)
    assert "cnr gc" not in str(caught.value)
    assert cnr_store.gc(disk, keep_last=1, dry_run=True).freed_bytes == 0
    disk.capacity = UNLIMITED
    trainer.close()


def test_a_commit_that_finds_no_room_is_voided_from_the_reserve(tmp_path: Path) -> None:
    state = {"full": False}

    class Disk(FullFolder):
        def _fault(self, operation: str, key: str, index: int) -> Fault:
            if state["full"] and key.endswith(".00000002/zarr.json"):
                self.fill()
                state["full"] = False
            return super()._fault(operation, key, index)

    disk = Disk(tmp_path)
    trainer = Trainer(disk, bits=32)
    first = trainer.save(1)
    state["full"] = True
    with pytest.raises(SaveError):
        trainer.save(2)
    attempt = f"{first[:16]}00000002"
    assert is_void(disk, attempt)
    assert not remains(disk, attempt)
    assert 0 < disk.size(RESERVE) < RESERVE_BYTES
    disk.capacity = UNLIMITED
    check_no_row_was_forgotten(trainer, tmp_path)
    assert disk.size(RESERVE) == RESERVE_BYTES


def test_a_commit_of_unknown_outcome_removes_nothing(tmp_path: Path) -> None:
    state = {"down": False}

    def fault(operation: str, key: str, _: int) -> Fault:
        return "after" if state["down"] and key.endswith(".00000002/zarr.json") else None

    backend = FaultyBackend(open_backend(tmp_path), fault)
    trainer = Trainer(backend, bits=32)
    first = trainer.save(1)
    state["down"] = True
    with pytest.raises(
        SaveError
    ):  # the commit has landed, but neither its answer nor the void record's came back
        trainer.save(2)
    state["down"] = False
    assert visible(backend) == [first, f"{first[:16]}00000002"]
    assert contents(backend).keys() == {*visible(backend)}
    check_no_row_was_forgotten(trainer, tmp_path)


@pytest.mark.slow
@pytest.mark.mounts
def test_a_failed_save_gives_its_room_back(disk: Path) -> None:
    store = disk / "store"
    trainer = Trainer(open_backend(store), bits=32)
    trainer.save(1)
    trainer.save(2)
    filler = fill(disk)
    check_failed_saves(trainer, store)
    with filler.open("ab") as file:
        file.truncate(filler.stat().st_size - 5 * BLOCK_BYTES)  # room for a part of the save
    before = free_bytes(disk)
    check_failed_saves(trainer, store)
    assert free_bytes(disk) >= before
    filler.unlink()
    check_no_row_was_forgotten(trainer, store)


@pytest.mark.slow
@pytest.mark.mounts
def test_a_new_run_can_claim_on_a_full_disk(disk: Path) -> None:
    store = disk / "store"
    save_many(open_backend(store), [1, 2])
    for seed in range(3):
        filler = fill(disk)
        trainer = Trainer(open_backend(store), seed=seed)
        assert trainer.checkpointer.load().step == 2
        with pytest.raises(SaveError, match="free some space"):
            trainer.save(3)
        trainer.close()
    assert len([path for path in (store / "writers").iterdir() if path.suffix != ".closed"]) == 4
    filler.unlink()
    save_many(open_backend(store), [4])
    assert (store / RESERVE).stat().st_size == RESERVE_BYTES


# Collecting


@pytest.mark.slow
def test_gc_frees_a_full_folder(tmp_path: Path) -> None:
    disk = FullFolder(tmp_path)
    made = save_many(disk, [1, 2], policy="full")
    crashed = [
        leave(disk, made[0], number) for number in range(40, 140)
    ]  # more than the reserve can void at once
    for attempt in crashed[1:]:
        disk.put(version_key(attempt, "manifest"), bytes(100))
    trainer = Trainer(disk, seed=2)
    trainer.checkpointer.load()
    made.append(trainer.save(3))
    trainer.close()
    before = contents(disk)
    disk.fill()
    report = cnr_store.gc(disk, grace_seconds=0)
    assert list(report.leftovers) == crashed
    assert (report.left, report.left_bytes) == ({}, 0)
    assert not [attempt for attempt in crashed if remains(disk, attempt)]
    assert not list(tmp_path.rglob(".tmp-*"))
    assert check_exact(disk, before) == made


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [5, 10, 64])
def test_retention_makes_room_in_rounds(tmp_path: Path, blocks: int) -> None:
    disk = FullFolder(tmp_path)
    made = save_many(disk, range(1, 13), policy="full")
    before = contents(disk)
    (tmp_path / RESERVE).unlink()
    disk.fill(blocks)
    report = cnr_store.gc(disk, keep_last=1, grace_seconds=0)
    assert report.removed == tuple(made[:-1])
    assert list(report.kept) == check_exact(disk, before) == made[-1:]
    assert not [key for key in objects(disk) if key.startswith("tombstones/")]


def test_without_any_room_gc_says_so(tmp_path: Path) -> None:
    disk = FullFolder(tmp_path)
    made = save_many(disk, [1, 2], policy="full")
    (tmp_path / RESERVE).unlink()
    disk.fill()
    with pytest.raises(StorageFullError, match="free 100 kB and a few files by hand"):
        cnr_store.gc(disk, keep_last=1)
    assert visible(disk) == made


@pytest.mark.some_by_day(1)
@pytest.mark.slow
@pytest.mark.mounts
def test_gc_frees_a_full_disk_in_a_new_process(disk: Path, jobs: Jobs) -> None:
    store = disk / "store"
    backend = open_backend(store)
    save_many(backend, [1, 2], policy="full")
    killed = killed_in_a_save(jobs, store)
    leave(backend, killed)  # what it could have put, had it been larger
    made = visible(backend)
    before = contents(backend)
    fill(disk)
    assert free_bytes(disk) == 0

    status, told = gc_in_a_new_process(store, "--grace-seconds", "0")
    assert status == 1, told
    assert "the newest, may still be at work" in told
    assert "bytes of unfinished saves could not be removed, for the reasons above" in told

    trainer = Trainer(backend, seed=3)
    trainer.checkpointer.load()
    with pytest.raises(SaveError, match="free some space"):
        trainer.save(9)
    fill(disk)
    assert free_bytes(disk) == 0
    status, told = gc_in_a_new_process(store, "--grace-seconds", "0")
    assert (status, "left" in told.replace("left by", "")) == (0, False), told
    assert free_bytes(disk) > 2 * LEFTOVER_BYTES  # the temporary file's, too
    assert check_exact(backend, before) == made
    trainer.save(10)
    trainer.close()
    before = contents(backend)

    fill(disk)
    status, told = gc_in_a_new_process(store, "--keep-last", "1", "--grace-seconds", "0", "--json")
    assert status == 0, told
    report = json.loads(told)
    assert report["removed"]
    assert check_exact(backend, before) == list(report["kept"])
    assert free_bytes(disk) > 0


# What it tells


@pytest.mark.slow
def test_a_dry_run_counts_what_a_run_frees(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    made = save_many(backend, range(1, 8), policy="full")
    leave(backend, made[0])
    trainer = Trainer(backend, seed=2)
    trainer.checkpointer.load()
    trainer.save(8)
    trainer.close()
    for grace_seconds in (3600, 0):
        planned = cnr_store.gc(backend, keep_last=3, grace_seconds=grace_seconds, dry_run=True)
        report = cnr_store.gc(backend, keep_last=3, grace_seconds=grace_seconds)
        assert report.freed_bytes == planned.freed_bytes > LEFTOVER_BYTES / 10
        assert (report.removed, report.leftovers) == (planned.removed, planned.leftovers)
        assert (report.left_bytes, report.left.keys()) == (planned.left_bytes, planned.left.keys())


@pytest.mark.slow
def test_gc_says_what_it_leaves(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    made = save_many(backend, [1])
    older = leave(backend, made[0])
    made += save_many(backend, [2])
    newest = leave(backend, made[1])
    (tmp_path / "writers" / "000002.closed").unlink()  # as of a run that was killed
    for dry_run in (True, False):
        report = cnr_store.gc(backend, dry_run=dry_run)
        assert report.left.keys() == {older, newest}
        assert report.left_bytes == 2 * LEFTOVER_BYTES
        assert "grace" in report.left[older]
        assert made[1][:15] in report.left[newest]
    status, told = gc_in_a_new_process(tmp_path)
    assert status == 0
    assert f"left: {older}" in told
    assert f"{2 * LEFTOVER_BYTES:,} bytes left" in told
    status, told = gc_in_a_new_process(tmp_path, "--grace-seconds", "0")
    assert status == 1
    assert f"removed: {older}" in told
    assert f"left: {newest}" in told


def test_a_run_that_finds_no_room_to_be_ended_says_how_much_it_needs(tmp_path: Path) -> None:
    disk = FullFolder(tmp_path)
    Trainer(disk, bits=32).save(1)
    (tmp_path / RESERVE).unlink()
    disk.fill()
    with pytest.raises(StorageFullError, match=r"no run can be ended .*free 100 kB"):
        cnr_store.gc(disk, end_run=True)


@pytest.mark.slow
def test_the_reserve_is_nobodys_damage(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    made = save_many(backend, [1, 2])
    assert backend.size(RESERVE) == RESERVE_BYTES
    report = cnr_store.verify(backend, deep=True)
    assert (report.ok, report.suspicious, report.leftovers) == (True, (), ())
    assert visible(backend) == made
