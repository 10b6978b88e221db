"""A process that has imported everything and forks jobs on command: the side that asks, and the side that answers.

Each line on the process's standard input is a command in JSON, answered by one line of JSON on its standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
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


def answer(value: object) -> None:
    """In the process: answer the command."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
