"""`cnr demo`: a training that is killed in the middle of a save and resumed, and what its checkpoints cost.

The training runs as `python demo.py --train`, which reads what to do from standard input and reports on standard
output. It does not know of the kill: it loads the newest version if there is one, and trains to the last step. For a
store in this process's memory, which would die with the trainer, storage fails instead.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
import xarray as xr
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch.nn.functional import binary_cross_entropy_with_logits

from cnr_backends import Backend, BackendError, StorageError, open_backend
from cnr_backends.backend import CHANGES, WrapperBackend
from cnr_codecs import CodecError
from cnr_store import Checkpointer, CheckpointError, EmptyStoreError, SaveError, VersionInfo, versions, view
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.layout import NODE, VERSIONS, version_key
from movielens import (
    TimeOrderedReader,
    auc,
    find_data,
    load_features,
    log_loss,
    new_training,
    predict,
    select,
)

BATCH, SEED, MAX_KILLS = 32, 20_220_404, 5
CODECS = {"codec": {"id": "cnr_lattice", "rms_step": 0.35, "relative": True}, "state_bits": "m3"}
"""Of rows and of optimizer state, where no width is asked for. 0.35 is good for one restore, as the demo has."""


class DemoError(CheckpointError, RuntimeError):
    """A training run of the demo failed, or the demo's options do not fit together."""


@dataclass(frozen=True)
class Training:
    """What a run is told; a resumed one is told the same."""

    data: str  # folder with the three files of MovieLens
    steps: int
    every: int  # steps between two saves; the last step is saved too
    url: str | None = None  # of the store
    storage_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # others of the `Checkpointer`


def train(training: Training, store: str | Backend | None, emit: Callable[..., object]) -> None:
    """Train to the last step, with checkpoints in `store` unless it is None. `emit` is called with each event."""
    features = load_features(Path(training.data))
    model, optimizer = new_training(features.rows, SEED)
    reader = TimeOrderedReader(features.train, BATCH)
    # One thread sums in one order, so two runs of the same steps end with the same bits.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        checkpointer, first, version, begun = None, 0, None, time.perf_counter()
        if store is not None:
            opened = None if isinstance(store, Backend) else training.storage_options
            checkpointer = Checkpointer(store, model, optimizer, storage_options=opened, **training.options)
            stack.enter_context(checkpointer)
            with suppress(EmptyStoreError):  # the first run
                restored = checkpointer.load()
                reader.load_state_dict(restored.reader)
                first, version = restored.step, restored.version.id
        emit("started", first, version, time.perf_counter() - begun)
        for step in range(first + 1, training.steps + 1):
            samples = next(reader)
            columns, labels = select(features, samples)
            loss = binary_cross_entropy_with_logits(model(columns), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            emit("step", step, samples.tolist())
            if checkpointer and (step % training.every == 0 or step == training.steps):
                pending = checkpointer.save(step, reader=reader, metadata={"run": "cnr demo"})
                emit("saved", step, pending.stall_seconds)
        held_out = np.arange(features.train, len(features))
        scores, truth = predict(model, features, held_out), features.labels[held_out]
    # All saves are written here.
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, full := io.BytesIO())
    emit("finished", [auc(truth, scores), log_loss(truth, scores)], full.tell())


@dataclass
class Run:
    """What one training run reported."""

    show: Callable[[int], object] = lambda _: None  # called with the newest step after each event
    first: int = 0  # the run started after this step, restored from `version` in `restore_seconds`
    version: str | None = None
    restore_seconds: float = 0.0
    batches: list[list[int]] = field(default_factory=list)  # the samples of step ``first + 1``, and so on
    stalls: dict[int, float] = field(default_factory=dict)  # seconds, by the step that was saved
    quality: list[float] | None = (
        None  # AUC and log loss on held-out ratings, once all steps are made and saved
    )
    full_bytes: int = 0  # what `torch.save` writes of model and optimizer

    def add(self, *event: Any) -> None:
        """Note the next event. `DemoError` if a step is missing, or the run failed."""
        last = self.first + len(self.batches)
        match event:
            case "started", first, version, seconds:
                self.first, self.version, self.restore_seconds = first, version, seconds
            case "step", step, samples if step == last + 1:
                self.batches.append(samples)
                self.show(step)
            case "saved", step, seconds:
                self.stalls[step] = seconds
            case "finished", quality, nbytes:
                self.quality, self.full_bytes = quality, nbytes
            case "failed", message:
                raise DemoError(f"the training process failed: {message}")
            case _:
                raise DemoError(f"a training run reported {str(event)[:200]} after step {last}")


class Interruption(NamedTuple):
    """A run was ended while it wrote `version`, the save of `step`."""

    version: str
    step: int
    objects: int  # objects, nbytes: what the store held of the version then
    nbytes: int
    committed: bool  # whether the save had just been committed
    newest: str | None  # the newest committed version then


@dataclass
class Story:
    """A training that is interrupted: its runs, what ended each but the last, and its store as others see it."""

    training: Training
    backend: Backend
    after: int  # versions that are committed before the first interruption
    runs: list[Run] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    committed: set[str] = field(default_factory=set)  # versions seen with a commit record

    @property
    def caught(self) -> Interruption | None:
        """The interruption that hit a save, if any did."""
        return next((each for each in self.interruptions if not each.committed), None)

    def unfinished(self) -> str | None:
        """The newest version with objects and no commit record, once enough are committed."""
        newest, ended = None, {each.version for each in self.interruptions}
        for version in sorted({*Catalog(self.backend).ids()} - self.committed - ended):
            if NODE in self.backend.list_names(version_key(version)):
                self.committed.add(version)
            elif any(self.backend.list_keys(version_key(version))):
                newest = version
        return newest if len(self.committed) >= self.after else None

    def interrupt(self, version: str) -> None:
        """Note that the newest run was ended while it wrote `version`; a run's versions are numbered from 1."""
        self.unfinished()
        sizes = [size for _, size in self.backend.list_keys(version_key(version))]
        every, steps = self.training.every, self.training.steps
        save = self.runs[-1].first // every + int(version.rpartition(".")[2])
        found = (min(save * every, steps), len(sizes), sum(sizes), version in self.committed)
        self.interruptions.append(Interruption(version, *found, max(self.committed, default=None)))

    def kept_batches(self) -> list[list[int]]:
        """Samples of each step in the final model: a resumed run drops the steps after its version."""
        batches: list[list[int]] = []
        for run in self.runs:
            batches = batches[: run.first] + run.batches
        return batches


def train_killed(story: Story, show: Callable[[int], object]) -> None:
    """Train in a process, kill it while it writes a version, and start the same command again.

    If the save was committed between the look at the store and the signal, the resumed process is killed in one of
    its saves, up to `MAX_KILLS` times.
    """
    version: str | None = ""
    while version is not None:
        story.runs.append(Run(show))
        may_kill = story.caught is None and len(story.interruptions) < MAX_KILLS
        watch = story.unfinished if may_kill else lambda: None
        version = train_in_process(story.training, story.runs[-1], watch)
        if version is not None:
            story.interrupt(version)


def train_in_process(training: Training, run: Run, watch: Callable[[], str | None]) -> str | None:
    """Train in a process of its own; kill it as soon as `watch` names a version, and return that version."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
        ThreadPoolExecutor(1) as pool,
        subprocess.Popen([sys.executable, __file__, "--train"], stderr=stderr, **pipes) as process,
    ):
        try:
            killed = pool.submit(_kill_when, process, watch)
            stdin, stdout = cast(IO[str], process.stdin), cast(IO[str], process.stdout)  # both are pipes
            # On standard input, because storage options may hold secrets and everyone can read a command line.
            with suppress(BrokenPipeError), stdin:
                stdin.write(json.dumps(asdict(training)) + "\n")
            for line in stdout:
                if line.endswith("\n"):  # the kill may cut the last one
                    run.add(*json.loads(line))
            version, status = killed.result(), process.wait()
        finally:
            process.kill()
        if version is None and (status != 0 or run.quality is None):
            stderr.seek(0)
            tail = "\n".join(stderr.read().splitlines()[-8:])
            raise DemoError(f"the training process ended with status {status} before its end:\n{tail}")
        return version


def _kill_when(process: subprocess.Popen[str], watch: Callable[[], str | None]) -> str | None:
    try:
        while process.poll() is None:
            if version := watch():
                return version
            time.sleep(0.0005)
        return None
    finally:
        process.kill()  # SIGKILL: the process can't handle it, nor clean up


def train_with_failed_save(story: Story, show: Callable[[int], object]) -> None:
    """Train here until storage fails in the middle of a save; a new model loads the newest version and trains on."""
    failing = FailingBackend(story)
    story.runs.append(Run(show))
    with suppress(SaveError):
        train(story.training, failing, story.runs[0].add)
    if failing.version is None:
        raise DemoError("no save was interrupted: ask for more --steps or a smaller --every")
    story.interrupt(failing.version)
    story.runs.append(Run(show))
    train(story.training, story.backend, story.runs[1].add)


class FailingBackend(WrapperBackend):
    """The backend of a story, whose writes fail from the middle of a save on, that of `version`."""

    def __init__(self, story: Story) -> None:
        super().__init__(story.backend)
        self.version: str | None = None
        self._story = story

    def _pass(self, operation: str, key: str, call: Callable[[], Any]) -> Any:
        if operation in CHANGES:
            self.version = self.version or self._story.unfinished()
            if self.version is not None:
                told = f"{operation} of {key!r} failed in {self.url}: the demo lets its storage fail from here on"
                raise StorageError(told, operation=operation, key=key, url=self.url)
        return call()


def _print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for name in columns:
        left = name in ("id", "kind", "what", "run")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_versions(console: Console, story: Story, committed: Sequence[VersionInfo], table_rows: int) -> None:
    """One line for each committed version, and one for each interrupted save."""
    # A repeated step was saved again. The last run's save is the committed one.
    stalls = {step: f"{seconds * 1000:.1f}" for run in story.runs for step, seconds in run.stalls.items()}
    full = story.runs[-1].full_bytes
    lines: dict[str, list[Any]] = {}
    for info in committed:
        rows = f"{info.rows:,} ({info.rows / table_rows:.0%})"
        beside = (f"{info.bytes / full:.1%}", f"{full / info.bytes:.1f}x", stalls.get(info.step, "-"))
        lines[info.id] = [str(info.step), info.kind, rows, decimal(info.bytes), *beside]
    for each in story.interruptions:
        if not each.committed:
            kind = Text("interrupted", style="red")
            lines[each.version] = [str(each.step), kind, _objects(each), decimal(each.nbytes), *"---"]
    columns = ("id", "step", "kind", "rows", "bytes", "of full", "reduction", "stall ms")
    _print_table(console, "versions", columns, [(version, *lines[version]) for version in sorted(lines)])


def _objects(interrupted: Interruption) -> str:
    return f"{interrupted.objects} object{'' if interrupted.objects == 1 else 's'}"


def measure(backend: Backend) -> tuple[int, int]:
    """Bytes written, all objects counted; and kept for the version that needs the most, with all that it needs."""
    sizes: dict[str, int] = {}
    for key, size in backend.list_keys(VERSIONS):
        sizes[key.split("/")[1]] = sizes.get(key.split("/")[1], 0) + size
    records = Catalog(backend).oldest_first()
    kept = max(sum(sizes[each] for each in (record.id, *record.needs)) for record in records)
    # Nothing was deleted, and what an interrupted save left is among them.
    return sum(size for _, size in backend.list_keys("")), kept


def print_totals(console: Console, story: Story, number: int) -> None:
    """What all versions cost together, beside what the paper reports of its models, and what resuming cost."""
    full, (written, kept) = story.runs[-1].full_bytes, measure(story.backend)
    stalls = [seconds for run in story.runs for seconds in run.stalls.values()]
    rows = [
        ("tables, optimizer and dense in full, by torch.save", decimal(full), ""),
        (f"{number} of these", decimal(number * full), ""),
        (f"written in {number} versions, leftovers included", decimal(written), ""),
        ("reduction of bytes written", f"{number * full / written:.1f}x", "6-17x"),
        ("kept for one version, at most", decimal(kept), ""),
        ("reduction of bytes kept", f"{full / kept:.1f}x", "2.5-8x"),
        (f"training stood still for {len(stalls)} saves", f"{sum(stalls) * 1000:.1f} ms", ""),
    ]
    again = story.runs[1:]
    rows += [(f"restore of step {run.first}", f"{run.restore_seconds * 1000:.1f} ms", "") for run in again]
    columns = ("what", "figure", "the paper, its models")
    _print_table(console, "totals, every object counted", columns, rows)


def print_quality(console: Console, resumed: Run, uninterrupted: Run) -> None:
    """Held-out quality of the run that was interrupted, and of the one that was not and so lost nothing."""
    figures = np.array([resumed.quality, uninterrupted.quality])
    names = ("interrupted and resumed", "uninterrupted, without loss")
    rows = [(name, *(f"{each:.5f}" for each in run)) for name, run in zip(names, figures, strict=True)]
    rows.append(("difference", *(f"{each:+.5f}" for each in figures[0] - figures[1])))
    title = "the newest tenth of the ratings, held out"
    _print_table(console, title, ("run", "AUC", "log loss"), rows)


def print_tree(console: Console, url: str, storage_options: dict[str, Any]) -> None:
    """Open the newest version lazily, print its tree, and read a few rows of its largest table."""
    begun, store = time.perf_counter(), view(url, **storage_options)
    with xr.open_datatree(store, engine="zarr", consolidated=False, chunks=None) as tree:  # type: ignore[arg-type]
        opened = (time.perf_counter() - begun) * 1000
        console.print(Text(f"newest version through xarray, opened in {opened:.0f} ms:", style="bold"))
        console.print(Text(str(tree)), soft_wrap=True)
        tables = {name: node.to_dataset()["weight"] for name, node in tree["tables"].children.items()}
        name = max(tables, key=lambda name: tables[name].size)
        begun = time.perf_counter()
        rows = tables[name][:3].load().values
        read = (time.perf_counter() - begun) * 1000
        told = f"3 of its {len(tables[name]):,} rows read in {read:.0f} ms; the first begins {rows[0, :4]}"
        console.print(Text(f"tables/{name}/weight: {told}"), soft_wrap=True)


Check = tuple[str, bool, str]
"""A statement, whether it holds, and the figures behind it."""


def check_all(
    story: Story, committed: Sequence[VersionInfo], uninterrupted: Run, samples: int
) -> Iterator[Check]:
    """All checks of the outcome, with the versions `committed` in the end and `samples` in an epoch."""
    training, caught = story.training, story.caught
    detail, holds = f"{len(story.interruptions)} kills, each after its save was committed", False
    if caught is not None:
        holds = caught.objects > 0 and caught.version not in {info.id for info in committed}
        listed = "not listed" if holds else "listed"
        detail = f"{caught.version}: {_objects(caught)}, {caught.nbytes:,} bytes, {listed}"
    yield "the run ended in the middle of a save, and that version does not exist", holds, detail

    restored = [run.version for run in story.runs[1:]]
    newest = [each.newest for each in story.interruptions]
    detail = ", ".join(f"{one} (newest: {other})" for one, other in zip(restored, newest, strict=True))
    holds = bool(newest) and restored == newest
    yield "the resumed run started from the newest committed version", holds, detail or "it never resumed"

    batches = islice(TimeOrderedReader(samples, BATCH), training.steps)
    expected, kept = [batch.tolist() for batch in batches], story.kept_batches()
    detail = (
        f"{sum(map(len, kept)):,} samples in {len(kept):,} steps, {sum(map(len, expected)):,} expected; "
        f"{sum(len(run.batches) for run in story.runs) - len(kept):,} steps after the restored version were repeated"
    )
    yield "no sample was trained twice or skipped", kept == expected, detail

    last = committed[-1].step if committed else None
    detail = f"newest version: step {last}; {len(committed)} versions"
    yield "the last step is in a committed version", last == training.steps, detail

    if training.options.get("bits") == 32:
        ends = story.runs[-1].quality, uninterrupted.quality
        statement = "lossless: resumed and uninterrupted run end with the same figures, to the last bit"
        yield statement, ends[0] is not None and ends[0] == ends[1], f"{ends[0]} and {ends[1]}"


def run_demo(
    console: Console,
    url: str | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
    policy: str = "intermittent",
    bits: int | str | None = None,
    steps: int | None = None,
    every: int = 200,
    data: Path | None = None,
    keep: bool = False,
) -> bool:
    """Train, interrupt a save, resume, compare, and print the figures. True if every check holds."""
    if not console.is_terminal:
        console = Console(file=console.file, width=110)  # no line of a file may be folded
    begun, given = time.perf_counter(), storage_options or {}

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    folder = find_data(data, say)
    features = load_features(folder)
    steps, table_rows = steps or -(-features.train // BATCH), sum(features.rows.values())
    chosen = {"policy": policy, **(CODECS if bits is None else {"bits": bits})}
    with demo_place(url, given, keep, say) as (place, backend):
        say(
            f"{features.train:,} ratings to train on; {steps:,} steps of {BATCH}, a save every {every}; "
            f"{len(features.rows)} tables with {table_rows:,} rows\nstore: {backend.url}"
        )
        training = Training(str(folder.absolute()), steps, every, place, given, chosen)
        story, uninterrupted = _train_both(training, backend, console)
        committed = versions(place, **given)
        print_versions(console, story, committed, table_rows)
        print_totals(console, story, len(committed))
        print_quality(console, story.runs[-1], uninterrupted)
        say("another seed moves the AUC by more than 0.003, see docs/design-notes/optimizer-state.md")
        print_tree(console, place, given)
    checks = list(check_all(story, committed, uninterrupted, features.train))
    for statement, holds, detail in checks:
        word = Text("ok  ", style="green") if holds else Text("FAIL", style="bold red")
        console.print(word, Text(statement), Text(f"({detail})", style="dim"), soft_wrap=True)
    say(f"{time.perf_counter() - begun:.1f} s in all")
    # Commands to try on this store, or on the one that the demo would keep.
    if (url is not None or keep) and not backend.url.startswith("memory:"):
        place = shlex.quote(backend.url.removeprefix("file://"))
        say("try next" + (", with the same --storage-options:" if given else ":"))
    else:
        place = "demo-run"
        say(f"this store is deleted; `cnr demo --keep` leaves one in ./{place}, for:")
    table = max(features.rows, key=features.rows.__getitem__)
    say(f"  cnr ls {place}\n  cnr report {place} -o report.html\n  cnr cat {place} embed.{table} --rows 5:10")
    return all(holds for _, holds, _ in checks)


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
        place = asked = (url or "demo-run").rstrip("/")
        for number in count(2):
            backend = stack.enter_context(open_backend(place, **storage_options))
            if not backend.list_names(""):
                break
            say(f"{place} is in use and stays as it is")
            place = f"{asked}/run-{number}"
        yield place, backend


def _train_both(training: Training, backend: Backend, console: Console) -> tuple[Story, Run]:
    """The training that is interrupted and resumed, and the run of the one that is not."""
    saves = -(-training.steps // training.every)
    if saves < 2:
        raise DemoError(
            f"{training.steps} steps with a save every {training.every} make {saves} save, and the demo needs one "
            "before the one that it interrupts: ask for more --steps or a smaller --every"
        )
    # A few versions before the interruption, but with a save or two left to hit.
    story = Story(training, backend, after=min(4, max(1, saves - 2)))
    in_memory = backend.url.startswith("memory:")  # which only this process sees
    with Progress(console=console, disable=not console.is_terminal) as progress:

        def bar(name: str) -> Callable[[int], object]:
            task = progress.add_task(name, total=training.steps)
            return lambda step: progress.update(task, completed=step)

        (train_with_failed_save if in_memory else train_killed)(story, bar("interrupted and resumed"))
        uninterrupted = Run(bar("uninterrupted"))
        train(training, None, uninterrupted.add)
    return story, uninterrupted


def main() -> int:
    """Train as standard input says, and report on standard output."""

    def emit(*event: Any) -> None:
        print(json.dumps(event), flush=True)

    training = Training(**json.loads(sys.stdin.readline()))
    try:
        train(training, training.url, emit)
    except (CheckpointError, BackendError, CodecError) as error:
        emit("failed", f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main() if sys.argv[1:] == ["--train"] else "usage: cnr demo [--help]")
