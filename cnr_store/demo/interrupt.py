"""Training runs that are interrupted in the middle of a save, and resumed.

A training process is killed. For a store in this process's memory, which would die with the trainer, storage fails
instead.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from cnr_backends import Backend, StorageError
from cnr_backends.backend import CHANGES, WrapperBackend
from cnr_store import SaveError
from cnr_store.catalog.catalog import Catalog
from cnr_store.demo.protocol import DemoError, OnStep, RunLog, TrainConfig, parse_event
from cnr_store.demo.train import train
from cnr_store.format.layout import NODE, record_key, version_key

Result = TypeVar("Result")

MAX_KILLS = 5
_POLL_SECONDS = 0.0005
_STDERR_LINES = 8


@dataclass(frozen=True)
class Interruption:
    """A run was ended while it wrote `version`, the save of `step`."""

    version: str
    step: int
    objects: int  # objects, nbytes: what the store held of the version then
    nbytes: int
    committed: bool  # whether the save had just been committed
    newest: str | None  # the newest committed version then


@dataclass(frozen=True)
class Watcher:
    """Sees a store as a process does that does not write to it."""

    backend: Backend
    committed: set[str] = field(default_factory=set)  # versions seen with a commit record
    abandoned: set[str] = field(default_factory=set)  # versions whose writer is gone

    def unfinished(self) -> str | None:
        """The newest version that has objects and no commit record, if there is one now."""
        newest = None
        for version in sorted({*Catalog(self.backend).ids()} - self.committed - self.abandoned):
            if NODE in self.backend.list_names(version_key(version)):
                self.committed.add(version)
            elif any(self.backend.list_keys(version_key(version))):
                newest = version
        return newest

    def target(self, after: int) -> str | None:
        """The version to interrupt now: an unfinished one, once `after` versions are committed."""
        version = self.unfinished()
        return version if len(self.committed) >= after else None

    def interruption(self, version: str, step: int) -> Interruption:
        """What is left of `version`, the save of `step`, now that its writer is gone."""
        self.unfinished()
        sizes = dict(self.backend.list_keys(version_key(version)))
        committed = record_key(version) in sizes
        (self.committed if committed else self.abandoned).add(version)
        newest = max(self.committed, default=None)
        return Interruption(version, step, len(sizes), sum(sizes.values()), committed, newest)


@dataclass
class Story:
    """One training: the logs of its runs, and what ended each run but the last."""

    logs: list[RunLog] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)

    @property
    def caught(self) -> Interruption | None:
        """The interruption that hit a save, if any did."""
        return next((each for each in self.interruptions if not each.committed), None)

    def interrupt(self, config: TrainConfig, watcher: Watcher, version: str) -> None:
        """Note that the newest run was ended while it wrote `version`."""
        number = int(version.rpartition(".")[2])  # a run's versions are numbered from 1
        step = config.save_step(self.logs[-1].first_step, number)
        self.interruptions.append(watcher.interruption(version, step))


def train_killed(config: TrainConfig, backend: Backend, after: int, on_step: OnStep) -> Story:
    """Train in a process, kill it while it writes a version, and start the same command again.

    The kill comes once `after` versions are committed. If the save was committed between the look at the store and
    the signal, the resumed process is killed in one of its saves, up to `MAX_KILLS` times.
    """
    story, watcher = Story(), Watcher(backend)
    while True:
        story.logs.append(RunLog(on_step))
        may_kill = story.caught is None and len(story.interruptions) < MAX_KILLS
        watch = partial(watcher.target, after) if may_kill else None
        version = train_in_process(config, story.logs[-1], watch)
        if version is None:
            return story
        story.interrupt(config, watcher, version)


def train_with_failed_save(config: TrainConfig, backend: Backend, after: int, on_step: OnStep) -> Story:
    """Train here until storage fails in the middle of a save; a new model loads the newest version and trains on."""
    story, failing = Story([RunLog(on_step)]), FailingBackend(backend, after)
    try:
        train(config, failing, story.logs[0].add)
    except SaveError:
        if failing.version is None:
            raise
    if failing.version is None:
        raise DemoError("no save was interrupted: ask for more --steps or a smaller --every")
    story.interrupt(config, failing.watcher, failing.version)
    story.logs.append(RunLog(on_step))
    train(config, backend, story.logs[1].add)
    return story


def train_in_process(
    config: TrainConfig, log: RunLog, watch: Callable[[], str | None] | None = None
) -> str | None:
    """Train in a process of its own; kill it as soon as `watch` names a version, and return that version."""
    # -P: a file in the user's folder must not shadow a module.
    command = [sys.executable, "-P", "-m", "cnr_store.demo.train"]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
        ThreadPoolExecutor(1) as pool,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8"
        ) as process,
    ):
        try:
            killed = pool.submit(_kill_when, process, watch) if watch is not None else None
            assert process.stdin is not None  # both are pipes
            assert process.stdout is not None
            # On standard input, because storage options may hold secrets and everyone can read a command line.
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(config.to_json() + "\n")
            for line in process.stdout:
                if line.endswith("\n"):  # the kill may cut the last one
                    log.add(parse_event(line))
            version = killed.result() if killed is not None else None
            status = process.wait()
        finally:
            process.kill()
        if version is None and (status != 0 or log.finished is None):
            stderr.seek(0)
            tail = "\n".join(stderr.read().splitlines()[-_STDERR_LINES:])
            raise DemoError(
                f"the training process ended with status {status} before its work was done:\n{tail}"
            )
        return version


def _kill_when(process: subprocess.Popen[str], watch: Callable[[], str | None]) -> str | None:
    try:
        while process.poll() is None:
            if version := watch():
                return version
            time.sleep(_POLL_SECONDS)
        return None
    finally:
        process.kill()  # SIGKILL: the process can't handle it, nor clean up


class FailingBackend(WrapperBackend):
    """Another backend, whose writes fail in the middle of a save and from then on.

    `inner`: where objects really are.
    `after`: committed versions to wait for.

    `version`: the version whose save failed, or None so far.
    """

    def __init__(self, inner: Backend, after: int) -> None:
        super().__init__(inner)
        self.version: str | None = None
        self.watcher = Watcher(inner)
        self._after = after

    def _pass(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        if operation not in CHANGES:
            return call()
        self.version = self.version or self.watcher.target(self._after)
        if self.version is not None:
            raise StorageError(
                f"{operation} of {key!r} failed in {self.url}: the demo lets its storage fail from here on",
                operation=operation,
                key=key,
                url=self.url,
            )
        return call()
