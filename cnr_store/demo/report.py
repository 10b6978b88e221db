"""The demo's figures as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cnr_store.catalog.catalog import VersionInfo
from cnr_store.demo.checks import Check
from cnr_store.demo.config import Finished
from cnr_store.demo.supervise import Interruption, Story

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Costs:
    """Sums over the committed versions.

    `full_bytes`: one checkpoint as `torch.save` writes it; `stored_bytes`: all objects in the store.
    """

    written_bytes: int
    full_bytes: int
    versions: int
    stored_bytes: int

    @property
    def reduction(self) -> float:
        """How many times less was written than by as many full checkpoints."""
        return self.versions * self.full_bytes / self.written_bytes


def size_text(count: float) -> str:
    """Bytes with a decimal unit: 30.2 MB."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def versions_table(versions: Sequence[VersionInfo], story: Story, finished: Finished) -> Table:
    """One line a committed version, and one where a save was interrupted."""
    table = Table(title="versions", title_justify="left")
    table.add_column("id", no_wrap=True)
    table.add_column("step", justify="right")
    table.add_column("kind")
    for name in ("rows", "bytes", "of full", "reduction", "stall ms"):
        table.add_column(name, justify="right", no_wrap=True)
    # A step that was made again was saved again; what counts is the run whose save was committed: the last.
    stalls = {saved.step: saved.stall_seconds for log in story.logs for saved in log.saved}
    rows = {info.id: _version_row(info, finished, stalls.get(info.step)) for info in versions}
    for one in story.interruptions:
        if one.committed:
            table.caption = "a kill came just after its save had committed, so the next save was tried"
        else:
            rows[one.version] = _interrupted_row(one)
    for version in sorted(rows):
        table.add_row(*rows[version])
    return table


def _version_row(info: VersionInfo, finished: Finished, stall_seconds: float | None) -> list[str | Text]:
    full = finished.full_bytes
    return [
        info.id,
        str(info.step),
        info.kind,
        f"{info.rows:,} ({info.rows / finished.table_rows:.0%})",
        size_text(info.bytes),
        f"{info.bytes / full:.1%}",
        f"{full / info.bytes:.1f}x",
        "-" if stall_seconds is None else f"{stall_seconds * 1000:.1f}",
    ]


def _interrupted_row(one: Interruption) -> list[str | Text]:
    left = f"{one.objects} objects"
    kind = Text("interrupted", style="red")
    return [one.version, str(one.step), kind, left, size_text(one.nbytes), "-", "-", "-"]


def totals_table(costs: Costs, story: Story) -> Table:
    """What all versions cost together, and what resuming cost."""
    table = Table(title="totals", title_justify="left", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    stalls = [saved.stall_seconds for log in story.logs for saved in log.saved]
    table.add_row("tables, optimizer and dense in full, by torch.save", size_text(costs.full_bytes))
    table.add_row(f"{costs.versions} of these", size_text(costs.versions * costs.full_bytes))
    table.add_row(f"written in {costs.versions} versions", size_text(costs.written_bytes))
    table.add_row("reduction of bytes written", f"{costs.reduction:.1f}x")
    table.add_row("in the store now, leftovers included", size_text(costs.stored_bytes))
    table.add_row(f"training stood still for {len(stalls)} saves", f"{sum(stalls) * 1000:.1f} ms")
    for log in story.logs[1:]:
        if log.started and log.started.version:
            milliseconds = log.started.restore_seconds * 1000
            table.add_row(f"restore of step {log.started.step}", f"{milliseconds:.1f} ms")
    return table


def quality_table(resumed: Finished, undisturbed: Finished) -> Table:
    """Held-out quality of the run that was interrupted and of the one that was not."""
    table = Table(title="the newest tenth of the ratings, held out", title_justify="left")
    table.add_column("run")
    table.add_column("AUC", justify="right")
    table.add_column("log loss", justify="right")
    for name, run in (("interrupted and resumed", resumed), ("uninterrupted", undisturbed)):
        table.add_row(name, f"{run.auc:.5f}", f"{run.log_loss:.5f}")
    table.add_row(
        "difference",
        f"{resumed.auc - undisturbed.auc:+.5f}",
        f"{resumed.log_loss - undisturbed.log_loss:+.5f}",
    )
    return table


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """One line a check, failed ones in red."""
    for check in checks:
        word = Text("ok  ", style="green") if check.holds else Text("FAIL", style="bold red")
        console.print(word, Text(check.statement), Text(f"({check.detail})", style="dim"), soft_wrap=True)
