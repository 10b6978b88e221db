"""With one worker, the thread that encodes writes, too, and others wait for the storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cnr_backends import StorageError, Transfer
from cnr_backends.local import LocalBackend
from cnr_codecs import LosslessRows
from cnr_store.ranks.protocol import Team
from cnr_store.writing.patience import Patience, PatientBackend
from cnr_store.writing.plan import Plan, RowsWrite
from cnr_store.writing.stage import stage

VERSION, ROWS, TABLES = "000001-00000000.00000001", 300, 6


class Values:
    """Takes some time to read rows, which counts as encoding, and fails where it is told to."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def block(self, begin: int, end: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        time.sleep(0.01)
        if self._fails:
            raise ValueError("unreadable")
        return np.ones((end - begin, 4), np.float32)


class Noting(LocalBackend):
    """Notes which threads begin and which end the puts of rows. Beginning may take long, or fail."""

    def __init__(self, root: Path, seconds: float = 0, failures: int = 0) -> None:
        super().__init__(root)
        self.began: list[str] = []
        self.ended: list[str] = []
        self.prepared: list[str] = []
        self._seconds, self._faults = seconds, failures

    def prepare(self, key: str) -> None:
        self.prepared.append(key)
        super().prepare(key)

    def _begin_put(self, key: str, pieces: list[memoryview]) -> Generator[None, None, None]:
        self.began.append(threading.current_thread().name)
        time.sleep(self._seconds)
        if self._faults:
            self._faults -= 1
            raise ConnectionResetError("gone")
        yield from super()._begin_put(key, pieces)
        self.ended.append(threading.current_thread().name)


def plan(*, is_live: bool = False, fails: bool = False) -> Plan:
    rows = [
        RowsWrite(
            *(f"tables/t{number}/weight", (ROWS, 4), "float32", None, None),
            *(Values(fails and number == TABLES - 1), LosslessRows()),
            is_live=is_live,
        )
        for number in range(TABLES)
    ]
    return Plan(step=0, previous=None, rows=rows, dense=[], state=None, policy={})


def put(backend: Noting, what: Plan, workers: int = 1) -> None:
    patient = PatientBackend(backend, Patience(retry_seconds=10, sleep=lambda seconds: None))
    with Transfer(workers, 2 * workers) as transfer:
        stage(patient, VERSION, what, transfer, Team.alone())


def objects(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that encodes writes, however long that takes: a busy machine would hand puts over."""
    monkeypatch.setattr("cnr_store.writing.stage._MOST_BEGINNING", 100)


@pytest.mark.usefixtures("patient")
def test_one_worker_writes_and_others_wait_for_the_disk(tmp_path: Path) -> None:
    backend, here = Noting(tmp_path / "one"), threading.current_thread().name
    put(backend, plan())
    assert backend.began == [here] * TABLES
    assert len(backend.ended) == TABLES
    assert here not in backend.ended
    other = Noting(tmp_path / "two")
    put(other, plan(), workers=2)
    assert other.began == []
    assert objects(tmp_path / "one") == objects(tmp_path / "two") != set()


def test_folders_are_made_while_rows_are_encoded(tmp_path: Path) -> None:
    backend = Noting(tmp_path)
    rows = RowsWrite(
        "tables/t/weight", (1 << 19, 4), "float32", None, None, Values(fails=False), LosslessRows()
    )
    put(backend, replace(plan(), rows=[rows]))
    assert backend.prepared == ["versions/000001-00000000.00000001/tables/t/weight/c/0/0"]
    small = Noting(tmp_path / "small")
    put(small, plan())
    assert small.prepared == []


def test_other_threads_write_while_rows_are_in_the_model(tmp_path: Path) -> None:
    backend = Noting(tmp_path)
    put(backend, plan(is_live=True))
    assert backend.began == []


def test_other_threads_write_where_that_takes_long(tmp_path: Path) -> None:
    backend = Noting(tmp_path, seconds=0.1)
    put(backend, plan())
    assert len(backend.began) == 1
    assert len(objects(tmp_path)) == TABLES


@pytest.mark.usefixtures("patient")
def test_what_the_network_fails_is_written_again(tmp_path: Path) -> None:
    backend = Noting(tmp_path, failures=1)
    put(backend, plan())
    assert len(backend.ended) == TABLES - 1
    assert len(objects(tmp_path)) == TABLES


@pytest.mark.usefixtures("patient")
def test_a_failure_leaves_no_file_that_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.writing.stage.PUTS_IN_FLIGHT", 1)
    backend, gate = Noting(tmp_path), threading.Event()

    def finish(folders: list[Path]) -> None:
        gate.wait(0.2)  # until the others were begun and the rows of the last table could not be read
        raise StorageError("no answer", operation="put", key="", url=backend.url)

    monkeypatch.setattr(backend, "_sync_parents", finish)
    with pytest.raises((ValueError, StorageError)):
        put(backend, plan(fails=True))
    assert len(backend.began) > 1
    assert objects(tmp_path) == set()
