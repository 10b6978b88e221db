"""The same story in one process, for a store that dies with it: storage fails instead of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cnr_backends import Backend
from cnr_store.demo.config import Event, TrainConfig
from cnr_store.demo.errors import DemoError
from cnr_store.demo.outage import FailingBackend
from cnr_store.demo.process import OnStep, RunLog
from cnr_store.demo.supervise import Story, Watcher
from cnr_store.demo.train import TrainingRun
from cnr_store.errors import SaveError


def train_with_failed_save(config: TrainConfig, backend: Backend, after: int, on_step: OnStep) -> Story:
    """Train until storage fails in the middle of a save; a new model loads what was committed and goes on.

    Raises: DemoError if no save failed.
    """
    story, watcher, failing = Story(), Watcher(backend), FailingBackend(backend, after)
    try:
        _train(config, failing, _new_log(story), on_step)
    except SaveError:
        if failing.version is None:
            raise
    if failing.version is None:
        raise DemoError("no save came to be interrupted: ask for more --steps or a smaller --every")
    step = config.saved_step(story.logs[-1].last_step)
    story.interruptions.append(watcher.interruption(failing.version, step))
    _train(config, backend, _new_log(story), on_step)
    return story


def train_undisturbed(config: TrainConfig, on_step: OnStep) -> RunLog:
    """Train from start to end."""
    log = RunLog()
    _train(config, None, log, on_step)
    return log


def _new_log(story: Story) -> RunLog:
    story.logs.append(RunLog())
    return story.logs[-1]


def _train(config: TrainConfig, store: Backend | None, log: RunLog, on_step: OnStep) -> None:
    def note(event: Event) -> None:
        log.add(event)
        on_step(log.last_step)

    with _one_thread():
        TrainingRun(config, note).run(store)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a training process of its own: one thread sums in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
