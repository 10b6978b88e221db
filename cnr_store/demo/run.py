"""`cnr demo` from its options to its verdict."""

from __future__ import annotations

import itertools
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cnr_backends import Backend, open_backend
from cnr_store import versions, view
from cnr_store.demo import report
from cnr_store.demo.data import find_data, load_features
from cnr_store.demo.interrupt import Story, train_killed, train_with_failed_save
from cnr_store.demo.protocol import DemoError, OnStep, RunLog, TrainConfig
from cnr_store.demo.train import train
from cnr_store.policies.policy import PolicyName

_KEPT_FOLDER = "demo-run"
_KILL_AFTER = 4
ROWS = {"id": "cnr_lattice", "rms_step": 0.35, "relative": True}
STATE = "m3"
"""Codecs of rows and of optimizer state, where no width is asked for. 0.35 is good for one restore, as the demo has."""

_WIDTH = 110
"""Columns of output to a file, where no line may be folded."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of `cnr demo`."""

    # url, storage_options: where checkpoints go. With None, a temporary folder, or ./demo-run with `keep`.
    url: str | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    policy: PolicyName = "intermittent"  # that of `cnr_store.Checkpointer`
    # Width of rows, with lossless optimizer state. With None, `ROWS` and `STATE`.
    bits: int | str | None = None
    # steps, every: training steps, None for each training sample once; and steps between two saves
    steps: int | None = None
    every: int = 200
    data: Path | None = None  # folder of the data set, see `data.find_data`
    keep: bool = False  # whether the store is kept without a URL


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Train, interrupt a save, resume, compare, and print the figures. True if every check holds."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH)
    begun = time.perf_counter()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    folder = find_data(options.data, say)
    features = load_features(folder)
    steps = options.steps or -(-features.train // TrainConfig.batch)
    with demo_place(options.url, options.storage_options, options.keep, say) as (url, backend):
        config = TrainConfig(
            str(folder.absolute()),
            steps,
            options.every,
            url=url,
            storage_options=options.storage_options,
            policy=options.policy,
            **_codecs(options.bits),
        )
        say(
            f"{features.train:,} ratings to train on; {steps:,} steps of {config.batch}, a save every "
            f"{config.every}; {len(features.rows)} tables with {sum(features.rows.values()):,} rows"
        )
        say(f"store: {backend.url}")
        story, uninterrupted = _train(config, backend, console)
        committed = versions(url, **config.storage_options)
        volume = report.measure(backend, story.logs[-1].result.full_bytes)
        console.print(report.versions_table(committed, story))
        console.print(report.totals_table(volume, story))
        console.print(report.quality_table(story.logs[-1].result, uninterrupted.result))
        say("another seed moves the AUC by more than 0.003, see docs/design-notes/optimizer-state.md")
        report.print_tree(view(url, **config.storage_options), console)
    checks = report.check_all(config, story, committed, uninterrupted, features.train)
    report.print_checks(console, checks)
    say(f"{time.perf_counter() - begun:.1f} s in all")
    _say_what_next(options, backend.url, max(features.rows, key=features.rows.__getitem__), say)
    return all(check.holds for check in checks)


def _codecs(bits: int | str | None) -> dict[str, Any]:
    return {"codec": ROWS, "state_bits": STATE} if bits is None else {"bits": bits}


def _say_what_next(options: DemoOptions, url: str, table: str, say: Callable[[str], object]) -> None:
    """Commands to try on the store of the demo, or on the one that the demo would keep."""
    kept = (options.url is not None or options.keep) and not url.startswith("memory:")
    if not kept:
        url = _KEPT_FOLDER
        say(f"this store is deleted; `cnr demo --keep` leaves one in ./{url}, for:")
    else:
        say("try next" + (", with the same --storage-options:" if options.storage_options else ":"))
    store = shlex.quote(url.removeprefix("file://"))
    say(f"  cnr ls {store}")
    say(f"  cnr report {store} -o report.html")
    say(f"  cnr cat {store} embed.{table} --rows 5:10")


@contextmanager
def demo_place(
    url: str | None, storage_options: dict[str, Any], keep: bool, say: Callable[[str], object]
) -> Iterator[tuple[str, Backend]]:
    """An empty place and its URL: `url`, or ./demo-run to keep, or a temporary folder that is deleted in the end.

    A place in use stays as it is: the first free one of its sub-folders run-2, run-3 ... is taken instead.
    """
    with ExitStack() as stack:
        if url is None and not keep:
            url = stack.enter_context(tempfile.TemporaryDirectory(prefix="cnr-demo-"))
        asked = (url or _KEPT_FOLDER).rstrip("/")
        for place in itertools.chain([asked], (f"{asked}/run-{number}" for number in itertools.count(2))):
            backend = stack.enter_context(open_backend(place, **storage_options))
            if not backend.list_names(""):
                break
            say(f"{place} is in use and stays as it is")
        yield place, backend


def _train(config: TrainConfig, backend: Backend, console: Console) -> tuple[Story, RunLog]:
    """The training that is interrupted and resumed, and the log of the one that is not."""
    saves = -(-config.steps // config.every)
    if saves < 2:
        raise DemoError(
            f"{config.steps} steps with a save every {config.every} make {saves} save, and the demo needs one before "
            "the one that it interrupts: ask for more --steps or a smaller --every"
        )
    # A few versions before the interruption, but with a save or two left to hit.
    after = min(_KILL_AFTER, max(1, saves - 2))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Nothing is drawn unless somebody watches.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        if backend.url.startswith("memory:"):
            # Only this process sees a store in its memory, so it trains here.
            on_step = _bar(progress, "interrupted and resumed", config.steps)
            story = train_with_failed_save(config, backend, after, on_step)
        else:
            story = train_killed(config, backend, after, _bar(progress, "killed and resumed", config.steps))
        uninterrupted = RunLog(_bar(progress, "uninterrupted", config.steps))
        train(config, None, uninterrupted.add)
    return story, uninterrupted


def _bar(progress: Progress, name: str, steps: int) -> OnStep:
    """Add a bar, and return what moves it."""
    bar = progress.add_task(name, total=steps)
    return lambda step: progress.update(bar, completed=step)
