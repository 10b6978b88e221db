"""Real processes for tests of retention, stopped, killed and woken at chosen storage operations."""

from __future__ import annotations

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
        """Fork a job; with `at` it sends itself `signal` at that storage operation. Its process id."""
        defaults = {"seed": 1, "saves": 3, "policy": "consecutive", "back": 0, "keep_last": None}
        defaults |= {"grace_seconds": 0.0, "at": None, "signal": "SIGSTOP"}
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

    def wake(self, process: int) -> Any:
        """Let a stopped job go on, and wait for it."""
        self.ask({"wake": process})
        return self.wait(process)
