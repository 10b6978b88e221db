"""`cnr demo` from its options to its verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cnr_backends import Backend
from cnr_store.demo import report
from cnr_store.demo.checks import Check, check_all
from cnr_store.demo.config import TrainConfig
from cnr_store.demo.data import Features, load_features
from cnr_store.demo.errors import DemoError
from cnr_store.demo.place import demo_place
from cnr_store.demo.process import OnStep, RunLog
from cnr_store.demo.show import print_tree
from cnr_store.demo.source import find_data
from cnr_store.demo.supervise import Story, train_killed, train_undisturbed
from cnr_store.reading.opening import versions, view

EVERY = 200
_KILL_AFTER = 4
_WIDTH = 110
"""Columns of output that goes to a file, where no line may be folded."""


@dataclass(frozen=True)
class DemoOptions:
    """What `cnr demo` was asked for.

    `url` None: a temporary folder, or ./demo-run with `keep`. `steps` None: each training sample once.
    """

    url: str | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    policy: str = "intermittent"
    bits: int | str = "auto"
    steps: int | None = None
    every: int = EVERY
    data: Path | None = None
    keep: bool = False


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Train, interrupt a save, resume, compare, and print what was measured. True if every check holds.

    Raises: DemoDataError, DemoError, and the errors of the store and its storage.
    """
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH)
    begun = time.perf_counter()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    folder = find_data(options.data, say)
    features = load_features(folder)
    with demo_place(options.url, options.storage_options, options.keep, say) as (url, backend):
        config = _config(options, folder, features, url)
        say(
            f"{features.train:,} ratings to train on; {config.steps:,} steps of {config.batch}, a save every "
            f"{config.every}; {len(features.rows)} tables with {sum(features.rows.values()):,} rows"
        )
        say(f"store: {backend.url}")
        story, undisturbed = _train(config, backend, console)
        checks = _conclude(config, url, story, undisturbed, backend, features.train, console)
    report.print_checks(console, checks)
    say(f"{time.perf_counter() - begun:.1f} s in all")
    if options.url is None and not options.keep:
        say("the temporary store is gone; --keep, or a URL, keeps it")
    return all(check.holds for check in checks)


def _config(options: DemoOptions, folder: Path, features: Features, url: str) -> TrainConfig:
    return TrainConfig(
        data=str(folder.absolute()),
        steps=options.steps or -(-features.train // TrainConfig.batch),
        every=options.every,
        url=url,
        storage_options=options.storage_options,
        policy=options.policy,
        bits=options.bits,
    )


def _train(config: TrainConfig, backend: Backend, console: Console) -> tuple[Story, RunLog]:
    """The run that is interrupted and resumed, and the one that is not."""
    plain = replace(config, url=None, storage_options={})
    after = _kill_after(config)
    with _progress(console, config.steps) as stage:
        if backend.url.startswith("memory:"):
            # A store in this process's memory: here alone the trainer, and torch with it, live in it too.
            from cnr_store.demo import inprocess

            story = inprocess.train_with_failed_save(config, backend, after, stage("interrupted and resumed"))
            return story, inprocess.train_undisturbed(plain, stage("uninterrupted"))
        story = train_killed(config, backend, after, stage("killed and resumed"))
        return story, train_undisturbed(plain, stage("uninterrupted"))


def _kill_after(config: TrainConfig) -> int:
    """Committed versions to wait for: a few, but with a save or two left to hit.

    Raises: DemoError if there are not two saves.
    """
    saves = -(-config.steps // config.every)
    if saves < 2:
        raise DemoError(
            f"{config.steps} steps with a save every {config.every} make {saves} save, and one that is "
            "interrupted needs one before it: ask for more --steps or a smaller --every"
        )
    return min(_KILL_AFTER, max(1, saves - 2))


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Callable[[str], OnStep]]:
    """Give a function that adds a bar and returns what moves it; nothing is drawn where nobody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def stage(name: str) -> OnStep:
            bar = progress.add_task(name, total=steps)
            return lambda step: progress.update(bar, completed=step)

        yield stage


def _conclude(
    config: TrainConfig,
    url: str,
    story: Story,
    undisturbed: RunLog,
    backend: Backend,
    samples: int,
    console: Console,
) -> Sequence[Check]:
    """Print what was measured, and return the checks."""
    committed = versions(url, **config.storage_options)
    resumed = story.logs[-1].result
    costs = report.Costs(
        written_bytes=sum(info.bytes for info in committed),
        full_bytes=resumed.full_bytes,
        versions=len(committed),
        stored_bytes=sum(size for _, size in backend.list_keys("")),
    )
    console.print(report.versions_table(committed, story, resumed))
    console.print(report.totals_table(costs, story))
    console.print(report.quality_table(resumed, undisturbed.result))
    print_tree(view(url, **config.storage_options), console)
    return check_all(config, story, committed, undisturbed, samples)
