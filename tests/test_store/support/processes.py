"""Real processes for tests of retention, stopped, killed and woken at chosen storage operations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.test_store.support import retention_process
from tests.test_store.support.fork_server import ForkServer


class Jobs(ForkServer):
    """The process that forks writers and collectors over stores in one folder."""

    def __init__(self, side: Path) -> None:
        self.side = side
        super().__init__(retention_process)

    def start(self, job: str, url: str, **options: Any) -> int:
        """Fork a job; with `at` or `stop` it sends itself `signal` there. Its process id."""
        defaults = {"seed": 1, "saves": 3, "policy": "consecutive", "back": 0, "keep_last": None}
        defaults |= {"grace_seconds": 0.0, "at": None, "signal": "SIGSTOP", "stop": None, "skew": 0}
        return int(self.ask({"job": job, "url": url, "side": str(self.side), **defaults, **options}))

    def wait(self, process: int) -> Any:
        """Wait until a job stops (True) or ends by itself (False) or is killed ("killed")."""
        ended = self.ask({"wait": process})
        if ended["stopped"]:
            return True
        if ended["signal"]:
            return "killed"
        if ended["status"]:
            raise AssertionError((self.side / f"failure-{process}").read_text())
        return False

    def run(self, job: str, url: str, **options: Any) -> tuple[int, Any]:
        process = self.start(job, url, **options)
        return process, self.wait(process)

    def outcome(self, process: int) -> list[str]:
        """What became of a job's saves: ids of versions, then why it was superseded if it was."""
        file = self.side / f"outcome-{process}"
        return file.read_text().splitlines() if file.exists() else []

    def wake_all(self, processes: Sequence[int]) -> None:
        """Let stopped jobs go on at the same moment, and wait for all of them."""
        for process in processes:
            self.ask({"wake": process})
        for process in processes:
            assert self.wait(process) is False

    def wake(self, process: int) -> Any:
        """Let a stopped job go on, and wait for it."""
        self.ask({"wake": process})
        return self.wait(process)
