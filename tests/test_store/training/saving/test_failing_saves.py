"""Saves that can't succeed: the store keeps what it had, and what changed is part of the next save."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adam

import cnr_store
from cnr_backends import ObjectExistsError, StorageFullError, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import Checkpointer, ClosedError, SaveError, SupersededError
from tests.test_store.support.lasting_store import ROWS, assert_newest, change, make_model


def test_closed_checkpointer(stored: Path) -> None:
    checkpointer = Checkpointer(stored, make_model())
    checkpointer.close()
    checkpointer.close()
    calls: list[Callable[[], Any]] = [
        lambda: checkpointer.save(1),
        checkpointer.load,
        lambda: checkpointer.touch("t", [1]),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match=r"was closed; make a new one"):
            call()


def test_superseded_writer(tmp_path: Path) -> None:
    old_model, new_model = make_model(), make_model(1)
    with (
        Checkpointer(tmp_path, old_model, bits=32) as old,
        Checkpointer(tmp_path, new_model, bits=32) as new,
    ):
        first = old.save(1).result()
        new.load()
        second = new.save(2).result()
        change(old, old_model, [1])
        with pytest.raises(
            SupersededError,
            match=r"was superseded by .*; stop this job, or stop the other one",
        ):
            old.save(3).result()
        assert [info.id for info in cnr_store.versions(tmp_path)] == [first.id, second.id]
        assert old.load().version == second
        change(old, old_model, [2])
        third = old.save(4).result()
    assert (third.previous, third.rows) == (second.id, 1)
    assert_newest(tmp_path, old_model)


@contextlib.contextmanager
def _small_disk(folder: Path, nbytes: int) -> Iterator[None]:
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    model = make_model(rows=40_000)
    with _small_disk(disk, 3 << 20):
        (disk / "ballast").write_bytes(bytes(1 << 20))
        with Checkpointer(disk / "store", model, bits=32, policy="consecutive") as checkpointer:
            first = checkpointer.save(1).result()
            change(checkpointer, model, list(range(30_000)))
            with pytest.raises(
                SaveError,
                match=r"No space left on device.*; free some space, then.*the next save has its rows",
            ) as caught:
                checkpointer.save(2).result()
            assert isinstance(caught.value.__cause__, StorageFullError)
            assert cnr_store.versions(disk / "store") == [first]
            cnr_store.load(disk / "store", make_model(1, rows=40_000))
            (disk / "ballast").unlink()
            change(checkpointer, model, [35_000])
            second = checkpointer.save(3).result()
            assert (second.rows, second.previous) == (30_001, first.id)
        assert_newest(disk / "store", model)


def test_full_storage_at_every_write(tmp_path: Path) -> None:
    full_from: list[int] = [10**9]

    def fault(operation: str, key: str, index: int) -> Fault:
        return "full" if index >= full_from[0] else None

    backend = FaultyBackend(open_backend(tmp_path), fault)
    model = make_model()
    with Checkpointer(backend, model, bits=32, policy="consecutive") as checkpointer:
        committed = [checkpointer.save(0).result()]
        changed = 0
        for writes in range(100):
            change(checkpointer, model, [changed])
            changed += 1
            full_from[0] = len(backend.log) + writes
            pending = checkpointer.save(writes + 1)
            with contextlib.suppress(SaveError):
                committed.append(pending.result())
                break
            full_from[0] = 10**9
            assert cnr_store.versions(tmp_path) == committed
    assert writes > 8
    assert committed[1].rows == changed
    assert cnr_store.versions(tmp_path) == committed
    assert_newest(tmp_path, model)


def test_optimizer_that_moves_untouched_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Adam moves rows by their momentum: those that moved are found by comparing all, which is said once."""
    model = make_model()
    table = model.get_submodule("t")
    optimizer = Adam(model.parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING, "cnr_store"),
        Checkpointer(tmp_path, model, optimizer, bits=32, policy="consecutive") as checkpointer,
    ):
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([step])).sum().backward()
            optimizer.step()
            info = checkpointer.save(step).result()
            assert info.rows == (step + 1 if step else ROWS)
            assert_newest(tmp_path, model)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "table 't' is compared with what is stored: Adam" in said[0]


def test_a_claim_that_lands_late_does_not_supersede_its_own_writer(tmp_path: Path) -> None:
    late: list[str] = []

    def fault(operation: str, key: str, index: int) -> Fault | None:
        if operation == "create" and key.startswith("writers/") and not late:
            late.append(key)
            return "before"
        return None

    place = open_backend(str(tmp_path))
    model = torch.nn.Embedding(100, 4)
    with cnr_store.Checkpointer(FaultyBackend(place, fault), model, bits=32) as checkpointer:
        with pytest.raises(cnr_store.SaveError):
            checkpointer.save(1).result()
        second = checkpointer.save(2).result()
        with pytest.raises(ObjectExistsError):  # it is the number that the second try took
            place.create(late[0], place.get(f"writers/{second.id.partition('-')[0]}"))
        for step in (3, 4):
            checkpointer.save(step).result()
    assert [info.step for info in cnr_store.versions(tmp_path)] == [2, 3, 4]
