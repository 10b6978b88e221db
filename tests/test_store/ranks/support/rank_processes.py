"""Ranks of a torch.distributed job as real processes, which a test stops, kills and wakes at named points.

The store that the ranks share lives in the test's process, so that a killed rank never takes it along.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, if its types do not say so

from tests.paths import ROOT

PRELOAD = (
    "torch.distributed",
    "cnr_codecs.plugins.zarr",  # zarr would import it in each rank
    "cnr_store.training.checkpointer",
    "tests.test_store.ranks.support.compiled_kernels",
    __name__,
)
_servers: dict[tuple[str, ...], ForkServer] = {}
"""By what they have imported: each is started once."""
_wanted: tuple[str, ...] = ()
_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
_pipe: connection.Connection | None = None
"""In a rank: to the test."""


@dataclass(frozen=True)
class Outcome:
    """What became of a rank.

    Attributes
    ----------
    value
        What its function returned.
    error
        The name of the class of what it raised.
    text
        The message of that.
    where
        The traceback of that.
    signal
        What killed it, or -1 where it ended otherwise without an answer.
    seconds
        How long its function ran.
    """

    value: Any = None
    error: str = ""
    text: str = ""
    where: str = ""
    signal: int = 0
    seconds: float = 0


def reach(point: str) -> None:
    """In a rank: tell the test that a point is reached, and go on when it has sent its signals. Else nothing."""
    if _pipe is not None:
        _pipe.send(point)
        _pipe.recv()


def preload(*modules: str) -> None:
    """Let ranks started from now on have these modules imported from the start, such as torchrec."""
    global _wanted
    _wanted = modules


def run_ranks(
    world: int,
    function: Callable[..., Any] | str,
    *arguments: Any,
    signals: Mapping[tuple[int, str], Sequence[tuple[int, int]]] | None = None,
    deadline_seconds: float = 60,
    wake: bool = False,
) -> list[Outcome]:
    """Run a function on each rank of a gloo job, and wait until all have ended.

    Parameters
    ----------
    world
        The number of ranks.
    function
        A function of a module, or ``"package.module:function"``.
    arguments
        Of the function, alike on all ranks. Its rank is ``dist.get_rank()``.
    signals
        For a rank that reaches a point (see `reach`), the ranks to send a signal, and which.
    deadline_seconds
        When to kill the ranks that still run.
    wake
        Whether a rank left stopped goes on when the others have ended. Else it is killed.
    """
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    pipes, processes = [], []
    with _starting, _server():
        for rank in range(world):
            ours, theirs = _context.Pipe()
            call = (theirs, function, rank, world, store.port, arguments)
            processes.append(_context.Process(target=_run, args=call, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
    try:
        return _watch(processes, pipes, dict(signals or {}), time.monotonic() + deadline_seconds, wake)
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


def _watch(
    processes: Sequence[Any],
    pipes: Sequence[connection.Connection],
    signals: dict[tuple[int, str], Sequence[tuple[int, int]]],
    deadline: float,
    wake: bool,
) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    stopped: set[int] = set()
    killed: set[int] = set()

    def send(rank: int, number: int) -> None:
        os.kill(processes[rank].pid, number)
        if number == signal.SIGSTOP:
            _await_stop(processes[rank].pid)
        (stopped.add if number == signal.SIGSTOP else stopped.discard)(rank)
        if number == signal.SIGKILL:
            killed.add(rank)

    while len(found) < len(processes) and time.monotonic() < deadline:
        running = [rank for rank in range(len(processes)) if rank not in found]
        if set(running) == stopped:
            for rank in running:
                send(rank, signal.SIGCONT if wake else signal.SIGKILL)
        ready = connection.wait([pipes[rank] for rank in running], timeout=0.1)
        for rank in running:
            if pipes[rank] not in ready:
                continue
            try:
                message = pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join()
                ended = processes[rank].exitcode
                # Python's server of forks may lose the status of a child, and says 255 then.
                is_lost = ended == 255 and rank in killed
                found[rank] = Outcome(signal=signal.SIGKILL if is_lost else -ended or -1)
                continue
            if isinstance(message, Outcome):
                found[rank] = message
                continue
            for other, number in signals.get((rank, message), ()):
                if other not in found:
                    send(other, number)
            try:
                pipes[rank].send("go")
            except (BrokenPipeError, ConnectionResetError):
                continue  # the rank was killed: its end is read next
    late = [rank for rank in range(len(processes)) if rank not in found]
    assert not late, f"ranks {late} did not end; the others: {found}"
    return [found[rank] for rank in range(len(processes))]


def _await_stop(process: int) -> None:
    """Wait until every thread of a process stands still: the signal alone lets some of them run on for a moment."""
    tasks = Path(f"/proc/{process}/task")
    if not tasks.exists():  # not Linux, or gone
        time.sleep(0.1)
        return
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        if set(states) <= {"T", "t"}:
            return
        time.sleep(0.001)
    raise AssertionError(f"process {process} did not stop")


@contextmanager
def _server() -> Iterator[None]:
    """Ranks are forked from the server that has imported what is wanted; it is started if it does not run."""
    server = _servers.setdefault(_wanted, ForkServer())
    server.set_forkserver_preload([*PRELOAD, *_wanted])
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    with (
        patch.dict(os.environ, environment),
        patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
    ):
        server.ensure_running()
        yield


def _found(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _run(
    pipe: connection.Connection,
    function: Callable[..., Any] | str,
    rank: int,
    world: int,
    port: int,
    arguments: Sequence[Any],
) -> None:
    global _pipe
    _pipe = pipe
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    start = time.monotonic()
    try:
        outcome = Outcome(_found(function)(*arguments), seconds=time.monotonic() - start)
    except BaseException as error:  # noqa: BLE001 - told to the test
        outcome = Outcome(
            error=type(error).__name__,
            text=str(error),
            where=traceback.format_exc(),
            seconds=time.monotonic() - start,
        )
    pipe.send(outcome)
    # A rank that ended would look like one that died to those that still run.
    pipe.poll(None)
