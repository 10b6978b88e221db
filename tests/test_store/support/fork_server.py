"""A process that has imported everything and forks jobs on command: the side that asks, and the side that answers.

Each line on the process's standard input is a command in JSON, answered by one line of JSON on its standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.paths import ROOT


class ForkServer:
    """Starts a module as a script and talks with it."""

    def __init__(self, module: ModuleType) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(module.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path()},
        )
        assert self._answer() == "ready"

    def ask(self, command: object) -> Any:
        """Send a command, and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process, which must have come so far without an error."""
        self._process.communicate()
        assert self._process.returncode == 0


def _path() -> str:
    """The tree first, and whatever was on the path of this process."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def commands() -> Iterator[Any]:
    """In the process: say that it is ready, then every command."""
    answer("ready")
    for line in sys.stdin:
        yield json.loads(line)


def fork_jobs(run: Callable[[Any], None]) -> None:
    """In the process: fork a job that runs each command, answered by the job's process id.

    The command ``"reap"`` waits for the newest job's end, answered by ``{"signal", "status"}``; until then its process
    id names no other process. A job that fails writes why to the file ``failure`` in the folder ``side``, of which its
    command tells.
    """
    child = 0
    for command in commands():
        if command == "reap":
            _, status = os.waitpid(child, 0)
            answer({"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, "status": status})
            continue
        child = os.fork()
        if child == 0:
            _run_and_exit(run, command)
        answer(child)


def _run_and_exit(run: Callable[[Any], None], command: Any) -> None:
    status = 1
    try:
        run(command)
        status = 0
    except BaseException:  # noqa: BLE001 - a job that fails must say why, and never become the parent
        (Path(command["side"]) / "failure").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def answer(value: object) -> None:
    """In the process: answer the command."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
