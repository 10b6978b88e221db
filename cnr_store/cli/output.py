"""How commands print: tables that are never cut, JSON, and progress on long work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_NUMBERS = frozenset(
    {"step", "rows", "bytes", "changed", "max abs", "save", "chain", "written", "kept", "restore"}
)
_WIDEST = 10_000
Report = Callable[[int, int], None]


def new_table(*names: str) -> Table:
    """A table with these columns; numbers stand to the right."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """A table whose lines are never cut or folded, so that it can be searched and piped."""
    console = Console()
    console.width = max(
        console.width, console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    )
    console.print(table)


def print_json(doc: object) -> None:
    print(json.dumps(doc, indent=2))


def print_line(text: str) -> None:
    """Text as it is, in one line; on standard output."""
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def say(text: str) -> None:
    """A remark, on standard error."""
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@contextmanager
def progress(what: str, *, of_bytes: bool = False) -> Iterator[Report]:
    """A bar on standard error, where that is a terminal, for a function to call with (done, all)."""
    count = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, known: bar.update(task, completed=done, total=known)
