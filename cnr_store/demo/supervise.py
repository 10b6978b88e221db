"""Interrupts a training run in the middle of a save, from outside, and lets it resume."""

from __future__ import annotations

from dataclasses import dataclass, field

from cnr_backends import Backend
from cnr_store.demo.config import TrainConfig
from cnr_store.demo.process import OnStep, RunLog, TrainingProcess
from cnr_store.format.layout import NODE, VERSIONS, VersionId, record_key, version_key

MOST_KILLS = 5
_POLL_SECONDS = 0.0005
_LISTEN_SECONDS = 0.1


@dataclass(frozen=True)
class Interruption:
    """A run was ended while `version` was being written.

    `objects`, `nbytes`: what lay in the store of it at that moment. `committed`: the save was faster after
    all. `newest`: the newest version that had been committed.
    """

    version: str
    step: int
    objects: int
    nbytes: int
    committed: bool
    newest: str | None


@dataclass
class Story:
    """One training told by the logs of the runs it took, and by what ended each of them but the last."""

    logs: list[RunLog] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)

    @property
    def caught(self) -> Interruption | None:
        """The interruption that hit a save, if any did."""
        return next((one for one in self.interruptions if not one.committed), None)


class Watcher:
    """What another process sees of a store while it is written."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._abandoned: set[str] = set()
        self.committed: set[str] = set()

    def unfinished(self) -> str | None:
        """The newest version that has objects and no commit record, if there is one right now."""
        newest = None
        for version in sorted(self._backend.list_names(VERSIONS)):
            if version in self.committed or version in self._abandoned or VersionId.parse(version) is None:
                continue
            names = self._backend.list_names(version_key(version))
            if NODE in names:
                self.committed.add(version)
            elif names and any(True for _ in self._backend.list_keys(version_key(version))):
                newest = version
        return newest

    def interruption(self, version: str, step: int) -> Interruption:
        """What is left of `version`, now that its writer is gone."""
        self.unfinished()
        found = dict(self._backend.list_keys(version_key(version)))
        committed = record_key(version) in found
        (self.committed if committed else self._abandoned).add(version)
        newest = max(self.committed, default=None)
        return Interruption(version, step, len(found), sum(found.values()), committed, newest)


def train_undisturbed(config: TrainConfig, on_step: OnStep) -> RunLog:
    """One training process from start to end.

    Raises: DemoError if it fails.
    """
    with TrainingProcess(config, on_step) as process:
        while process.running(_LISTEN_SECONDS):
            pass
        return process.log


def train_killed(config: TrainConfig, backend: Backend, after: int, on_step: OnStep) -> Story:
    """Train in a process, kill it while it writes a version, and start the same command again.

    The kill comes once `after` versions are committed. A save may commit between the look at the store and
    the signal: then the resumed process is killed in one of its saves, up to `MOST_KILLS` times.

    Raises: DemoError if a process fails by itself.
    """
    story = Story()
    watcher = Watcher(backend)
    while True:
        with TrainingProcess(config, on_step) as process:
            story.logs.append(process.log)
            may_kill = story.caught is None and len(story.interruptions) < MOST_KILLS
            version = _watch(process, watcher, after if may_kill else None)
        if version is None:
            return story
        story.interruptions.append(watcher.interruption(version, config.saved_step(process.log.last_step)))


def _watch(process: TrainingProcess, watcher: Watcher, after: int | None) -> str | None:
    """Kill the process at the first sight of a half-written version; None if it ended by itself."""
    while process.running(_LISTEN_SECONDS if after is None else _POLL_SECONDS):
        if after is None:
            continue
        version = watcher.unfinished()
        if version is not None and len(watcher.committed) >= after:
            process.kill()
            return version
    return None
