"""A training process seen from outside: started, listened to, killed."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Self

from cnr_store.demo.config import Event, Failed, Finished, Saved, Started, Step, TrainConfig, parse_event
from cnr_store.demo.errors import DemoError

OnStep = Callable[[int], object]
_STDERR_LINES = 8


@dataclass
class RunLog:
    """What one training run reported. `steps[k]` holds the samples of step `started.step + 1 + k`."""

    started: Started | None = None
    steps: list[list[int]] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    finished: Finished | None = None
    failed: Failed | None = None

    @property
    def first_step(self) -> int:
        """The step it started from: how many steps earlier runs contribute."""
        return self.started.step if self.started else 0

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.steps)

    @property
    def result(self) -> Finished:
        """How it ended.

        Raises: DemoError if it did not come to its end.
        """
        if self.finished is None:
            raise DemoError(f"a training run stopped at step {self.last_step}, before its end")
        return self.finished

    def add(self, event: Event) -> None:
        """Take note of the next event.

        Raises: DemoError if steps are not numbered one after the other.
        """
        match event:
            case Started():
                self.started = event
            case Step():
                if event.step != self.last_step + 1:
                    raise DemoError(f"a training run reported step {event.step} after step {self.last_step}")
                self.steps.append(event.samples)
            case Saved():
                self.saved.append(event)
            case Finished():
                self.finished = event
            case Failed():
                self.failed = event


class TrainingProcess:
    """`python -m cnr_store.demo.train`. Leaving the context kills it if it still runs."""

    def __init__(self, config: TrainConfig, on_step: OnStep) -> None:
        self.log = RunLog()
        self._on_step = on_step
        self._killed = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # It lives as long as the process that writes to it.
        self._stderr: IO[str] = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            # -P: a file of the user's folder must not shadow a module.
            [sys.executable, "-P", "-m", "cnr_store.demo.train"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        # On standard input, because storage options may hold secrets and everyone can read a command line.
        with contextlib.suppress(BrokenPipeError), self._process.stdin or contextlib.nullcontext() as stdin:
            if stdin is not None:
                stdin.write(config.to_json() + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def running(self, wait_seconds: float = 0.0) -> bool:
        """Take note of what it has reported, waiting up to `wait_seconds` for more; False once it has ended.

        Raises: DemoError if it ended by itself before its work was done.
        """
        for line in self._reported(wait_seconds):
            if line is None:
                self._check_end()
                return False
            self._note(line)
        return True

    def kill(self) -> None:
        """SIGKILL: no handler, no clean-up, no farewell. Returns when the process is gone."""
        self._killed = True
        self._process.kill()
        self._process.wait()
        while self.running(wait_seconds=1.0):
            pass

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def _reported(self, wait_seconds: float) -> Iterator[str | None]:
        with contextlib.suppress(queue.Empty):
            yield self._lines.get(timeout=wait_seconds) if wait_seconds else self._lines.get_nowait()
            while True:
                yield self._lines.get_nowait()

    def _note(self, line: str) -> None:
        try:
            self.log.add(parse_event(line))
        except DemoError:
            if self._killed and not line.endswith("\n"):
                return  # cut in the middle by the kill
            raise
        self._on_step(self.log.last_step)

    def _check_end(self) -> None:
        status = self._process.wait()
        if self._killed or (status == 0 and self.log.finished):
            return
        if self.log.failed:
            raise DemoError(f"the training process failed: {self.log.failed.message}")
        self._stderr.seek(0)
        tail = "\n".join(self._stderr.read().splitlines()[-_STDERR_LINES:])
        raise DemoError(f"the training process ended with status {status} before its work was done:\n{tail}")
