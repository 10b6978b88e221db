"""What the demo prints: figures as tables, the newest version as xarray sees it, and the checks of the outcome."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import xarray as xr
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from zarr.abc.store import Store

from cnr_backends import Backend
from cnr_store import VersionInfo
from cnr_store.catalog.catalog import Catalog
from cnr_store.demo.interrupt import Interruption, Story
from cnr_store.demo.protocol import Finished, RunLog, TrainConfig
from cnr_store.demo.train import TimeOrderedReader
from cnr_store.format.layout import VERSIONS

_LEFT = frozenset({"id", "kind", "what", "run"})
"""Columns of text."""

_SHOWN_ROWS = 3


def _new_table(title: str, *columns: str, **options: Any) -> Table:
    table = Table(title=title, title_justify="left", **options)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    return table


def versions_table(versions: Sequence[VersionInfo], story: Story) -> Table:
    """One line for each committed version, and one for each interrupted save."""
    table = _new_table("versions", "id", "step", "kind", "rows", "bytes", "of full", "reduction", "stall ms")
    # A repeated step was saved again. The last run's save is the committed one.
    stalls = {saved.step: f"{saved.stall_seconds * 1000:.1f}" for log in story.logs for saved in log.saved}
    finished = story.logs[-1].result
    rows = {info.id: _version_row(info, finished, stalls.get(info.step, "-")) for info in versions}
    for interrupted in story.interruptions:
        if interrupted.committed:
            table.caption = "a kill came just after its save was committed, so the next save was tried"
        else:
            rows[interrupted.version] = [
                interrupted.version,
                str(interrupted.step),
                Text("interrupted", style="red"),
                _objects(interrupted),
                decimal(interrupted.nbytes),
                *("-", "-", "-"),
            ]
    for version in sorted(rows):
        table.add_row(*rows[version])
    return table


def _version_row(info: VersionInfo, finished: Finished, stall: str) -> list[str | Text]:
    return [
        info.id,
        str(info.step),
        info.kind,
        f"{info.rows:,} ({info.rows / finished.table_rows:.0%})",
        decimal(info.bytes),
        f"{info.bytes / finished.full_bytes:.1%}",
        f"{finished.full_bytes / info.bytes:.1f}x",
        stall,
    ]


def _objects(interrupted: Interruption) -> str:
    return f"{interrupted.objects} object{'' if interrupted.objects == 1 else 's'}"


@dataclass(frozen=True)
class Volume:
    """What the store of a demo takes, every object counted, beside full copies by `torch.save`."""

    full_bytes: int  # full_bytes, count: bytes of one full copy, and how many versions are committed
    count: int
    written_bytes: int  # all objects: nothing was deleted, and what an interrupted save left is among them
    kept_bytes: int  # the version that needs the most, with all that it needs


def measure(backend: Backend, full_bytes: int) -> Volume:
    """The volume of a demo's store."""
    sizes: dict[str, int] = {}
    for key, size in backend.list_keys(VERSIONS):
        sizes[key.split("/")[1]] = sizes.get(key.split("/")[1], 0) + size
    records = Catalog(backend).oldest_first()
    kept = max(sum(sizes[each] for each in (record.id, *record.needs)) for record in records)
    return Volume(full_bytes, len(records), sum(size for _, size in backend.list_keys("")), kept)


def totals_table(volume: Volume, story: Story) -> Table:
    """What all versions cost together, beside what the paper reports of its models, and what resuming cost."""
    full, count = volume.full_bytes, volume.count
    stalls = [saved.stall_seconds for log in story.logs for saved in log.saved]
    rows = [
        ("tables, optimizer and dense in full, by torch.save", decimal(full), ""),
        (f"{count} of these", decimal(count * full), ""),
        (f"written in {count} versions, leftovers included", decimal(volume.written_bytes), ""),
        ("reduction of bytes written", f"{count * full / volume.written_bytes:.1f}x", "6-17x"),
        ("kept for one version, at most", decimal(volume.kept_bytes), ""),
        ("reduction of bytes kept", f"{full / volume.kept_bytes:.1f}x", "2.5-8x"),
        (f"training stood still for {len(stalls)} saves", f"{sum(stalls) * 1000:.1f} ms", ""),
    ]
    restored = [log.started for log in story.logs[1:] if log.started and log.started.version]
    rows += [(f"restore of step {one.step}", f"{one.restore_seconds * 1000:.1f} ms", "") for one in restored]
    table = _new_table("totals, every object counted", "what", "figure", "the paper, its models")
    for row in rows:
        table.add_row(*row)
    return table


def quality_table(resumed: Finished, uninterrupted: Finished) -> Table:
    """Held-out quality of the run that was interrupted, and of the one that was not and so lost nothing."""
    table = _new_table("the newest tenth of the ratings, held out", "run", "AUC", "log loss")
    for name, run in (("interrupted and resumed", resumed), ("uninterrupted, without loss", uninterrupted)):
        table.add_row(name, f"{run.auc:.5f}", f"{run.log_loss:.5f}")
    auc, loss = resumed.auc - uninterrupted.auc, resumed.log_loss - uninterrupted.log_loss
    table.add_row("difference", f"{auc:+.5f}", f"{loss:+.5f}")
    return table


def print_tree(store: Store, console: Console) -> None:
    """Open a version lazily, print its tree, and read a few rows of its largest table."""
    begun = time.perf_counter()
    with xr.open_datatree(store, engine="zarr", consolidated=False, chunks=None) as tree:  # type: ignore[arg-type]
        opened = time.perf_counter() - begun
        console.print(Text(f"newest version through xarray, opened in {opened * 1000:.0f} ms:", style="bold"))
        console.print(Text(str(tree)), soft_wrap=True)
        tables = {
            name: node.to_dataset()["weight"] for name, node in tree.children["tables"].children.items()
        }
        name = max(tables, key=lambda name: tables[name].size)
        begun = time.perf_counter()
        rows = tables[name][:_SHOWN_ROWS].load()
        read = time.perf_counter() - begun
        count, first = tables[name].sizes["row"], rows.values[0, :4]
        line = f"{len(rows)} of its {count:,} rows read in {read * 1000:.0f} ms; the first begins {first}"
        console.print(f"tables/{name}/weight: {line}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Check:
    """One statement, whether it holds, and the figures behind it."""

    statement: str
    holds: bool
    detail: str


def check_all(
    config: TrainConfig,
    story: Story,
    versions: Sequence[VersionInfo],
    uninterrupted: RunLog,
    samples: int,
) -> list[Check]:
    """All checks of the outcome.

    `config`, `story`, `uninterrupted`: what was trained, and the logs of both trainings.
    `versions`: what is committed in the end.
    `samples`: samples of an epoch.
    """
    last = versions[-1].step if versions else None
    checks = [
        _interrupted_in_a_save(story, versions),
        _resumed_from_newest(story),
        _exactly_once(story, config, samples),
        Check(
            "the last step is in a committed version",
            last == config.steps,
            f"newest version: step {last}; {len(versions)} versions",
        ),
    ]
    if config.bits == 32:
        checks.append(_same_bits(story.logs[-1], uninterrupted))
    return checks


def kept_steps(logs: Sequence[RunLog]) -> list[list[int]]:
    """Samples of each step in the final model: a resumed run drops the steps after its version."""
    steps: list[list[int]] = []
    for log in logs:
        steps = steps[: log.first_step] + log.steps
    return steps


def _interrupted_in_a_save(story: Story, versions: Sequence[VersionInfo]) -> Check:
    statement = "the run ended in the middle of a save, and that version does not exist"
    caught = story.caught
    if caught is None:
        return Check(statement, False, f"{len(story.interruptions)} kills, each after its save was committed")
    listed = caught.version in {info.id for info in versions}
    return Check(
        statement,
        caught.objects > 0 and not listed,
        f"{caught.version}: {_objects(caught)}, {caught.nbytes:,} bytes, {'listed' if listed else 'not listed'}",
    )


def _resumed_from_newest(story: Story) -> Check:
    restored = [log.started.version if log.started else None for log in story.logs[1:]]
    newest = [interruption.newest for interruption in story.interruptions]
    pairs = ", ".join(f"{each} (newest: {other})" for each, other in zip(restored, newest, strict=True))
    return Check(
        "the resumed run started from the newest committed version",
        bool(newest) and restored == newest,
        pairs or "it never resumed",
    )


def _exactly_once(story: Story, config: TrainConfig, samples: int) -> Check:
    expected = [batch.tolist() for batch in islice(TimeOrderedReader(samples, config.batch), config.steps)]
    kept = kept_steps(story.logs)
    repeated = sum(len(log.steps) for log in story.logs) - len(kept)
    return Check(
        "no sample was trained twice or skipped",
        kept == expected,
        f"{sum(map(len, kept)):,} samples in {len(kept):,} steps, {sum(map(len, expected)):,} expected; "
        f"{repeated:,} steps after the restored version were repeated",
    )


def _same_bits(resumed: RunLog, uninterrupted: RunLog) -> Check:
    pairs = [(log.finished.auc, log.finished.log_loss) for log in (resumed, uninterrupted) if log.finished]
    return Check(
        "lossless: resumed and uninterrupted run end with the same figures, to the last bit",
        len(pairs) == 2 and pairs[0] == pairs[1],
        " and ".join(f"{auc!r}, {loss!r}" for auc, loss in pairs),
    )


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """One line for each check, failed ones in red."""
    for check in checks:
        word = Text("ok  ", style="green") if check.holds else Text("FAIL", style="bold red")
        console.print(word, Text(check.statement), Text(f"({check.detail})", style="dim"), soft_wrap=True)
