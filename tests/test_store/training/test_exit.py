"""What becomes of a save that is still being written when its process ends: committed whole, or not there at all."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from tests.test_store.support import ending_process
from tests.test_store.support.fork_server import ForkServer

pytestmark = pytest.mark.slow

# Storage that stands still until the interpreter begins to end, so that it surely does so during the save.
_PROGRAM = """
import os, signal, sys, threading
import torch
import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend

ends = threading.Event()

def stands_still(operation, key, index):
    if not ends.is_set() and index > 2:
        standing.set()
        ends.wait(60)

standing = threading.Event()
backend = FaultyBackend(open_backend(sys.argv[1]), stands_still)
checkpointer = cnr_store.Checkpointer(backend, torch.nn.EmbeddingBag(2000, 8), bits=4)
holds = threading.Event()  # then storage stands still for longer
threading._register_atexit(lambda: holds.is_set() or ends.set())  # after the checkpointer's own, so it runs before
"""

# Ctrl-C, so many times, while the interpreter waits for the save; each once the one before was noticed.
_INTERRUPTS = """
import logging
from cnr_store.training.process import process_exit

class Noticed(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        noticed.set()

def interrupt():
    while not process_exit.is_exiting():
        noticed.wait(0.001)
    for _ in range({times}):
        noticed.wait(0.1)
        noticed.clear()
        os.kill(os.getpid(), signal.SIGINT)
        noticed.wait(60)
    if {times} == 1:
        ends.set()

noticed = threading.Event()
logging.getLogger("cnr_store").addHandler(Noticed())
holds.set()
threading.Thread(target=interrupt, daemon=True).start()
"""

_ENDINGS = {
    "falls off its end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an error": ("raise KeyError('mine')", 1),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); threading.Event().wait(60)", -signal.SIGINT),
    "Ctrl-C while it waits": (
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start(); pending.result()",
        -signal.SIGINT,
    ),
    "Ctrl-C at the end": (_INTERRUPTS.format(times=1), 0),
    "daemon threads": ("threading.Thread(target=threading.Event().wait, daemon=True).start()", 0),
    "an error in the block": (
        "threading.Timer(0.2, ends.set).start()\nwith checkpointer: raise KeyError('mine')",
        1,
    ),
}


class Ended(NamedTuple):
    """How a process ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Endings(ForkServer):
    """The process that forks those that end."""

    def __init__(self, side: Path) -> None:
        self._side = side
        super().__init__(ending_process)

    def run(self, place: Path, ending: str) -> Ended:
        """Run the program over a store, and this when its save stands still."""
        return self.execute(
            f"{_PROGRAM}\npending = checkpointer.save(7)\nstanding.wait(60)\n{ending}\n", place
        )

    def execute(self, program: str, place: Path) -> Ended:
        """Run any program over a store."""
        status = self.ask({"program": program, "arguments": [str(place)], "side": str(self._side)})
        return Ended(status, *((self._side / name).read_text() for name in ("stdout", "stderr")))


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endings]:
    found = Endings(tmp_path_factory.mktemp("side"))
    yield found
    found.close()


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("how", _ENDINGS)
def test_a_process_that_ends_finishes_its_save(endings: Endings, tmp_path: Path, how: str) -> None:
    ending, status = _ENDINGS[how]
    done = endings.run(tmp_path, ending)
    assert done.returncode == status, done.stderr
    assert "failed" not in done.stderr
    assert [info.step for info in cnr_store.versions(tmp_path)] == [7]
    assert cnr_store.verify(tmp_path).ok


def test_a_second_interrupt_at_the_end_drops_the_save_and_says_so(endings: Endings, tmp_path: Path) -> None:
    done = endings.run(tmp_path, f"print('trained')\n{_INTERRUPTS.format(times=2)}")
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stdout == "trained\n"
    assert "a save is still being written, and the process ends after it" in done.stderr
    assert "interrupted: the process ends without waiting for its save" in done.stderr
    assert cnr_store.versions(tmp_path) == []


def test_a_process_that_leaves_at_once_shows_nothing(endings: Endings, tmp_path: Path) -> None:
    done = endings.run(tmp_path, "os._exit(5)")
    assert done.returncode == 5, done.stderr
    assert list(tmp_path.rglob("*"))
    assert cnr_store.versions(tmp_path) == []


def test_a_script_that_ends_without_close_keeps_its_last_save(endings: Endings, tmp_path: Path) -> None:
    program = """
import sys, torch, cnr_store
model = torch.nn.EmbeddingBag(200_000, 16)
checkpointer = cnr_store.Checkpointer(sys.argv[1], model, bits=4)
checkpointer.save(7)
"""
    done = endings.execute(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    assert [info.step for info in cnr_store.versions(tmp_path)] == [7]


def test_a_save_at_exit_is_one_clear_error(endings: Endings, tmp_path: Path) -> None:
    program = """
import atexit, sys, torch, cnr_store
checkpointer = cnr_store.Checkpointer(sys.argv[1], torch.nn.EmbeddingBag(100, 4))
def late():
    try:
        checkpointer.save(1)
    except cnr_store.ClosedError as error:
        print("refused:", error)
    checkpointer.close()
atexit.register(late)
"""
    done = endings.execute(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "refused: the save of step 1 can't begin" in done.stdout


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_ends_while_its_parent_is_still_saving(tmp_path: Path) -> None:
    """As a data loader's workers do, which end with each epoch."""
    standing, goes_on = threading.Event(), threading.Event()

    def stands_still(operation: str, key: str, index: int) -> None:
        standing.set()
        goes_on.wait(120)

    backend = FaultyBackend(open_backend(str(tmp_path)), stands_still)
    with cnr_store.Checkpointer(backend, torch.nn.EmbeddingBag(2000, 8), bits=4) as checkpointer:
        pending = checkpointer.save(7)
        assert standing.wait(60)
        child = multiprocessing.get_context("fork").Process(target=int)
        asking = multiprocessing.get_context("fork").Process(target=told_where_to_ask, args=(pending,))
        for process in (child, asking):
            process.start()
            process.join(60)
        ended, saving = (child.exitcode, asking.exitcode), not pending.done()
        child.kill()
        asking.kill()
        goes_on.set()
    assert ended == (0, 0)
    assert saving
    assert [info.step for info in cnr_store.versions(tmp_path)] == [7]


def told_where_to_ask(pending: cnr_store.PendingSave) -> None:
    """What a fork learns of its parent's save; it would wait for it without end."""
    for ask in (pending.result, pending.exception):
        with pytest.raises(cnr_store.ClosedError, match=r"save of step 7 is written by process \d+: ask for"):
            ask()
