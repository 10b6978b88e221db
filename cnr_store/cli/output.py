"""Printing: tables that are never cut, JSON, and progress of long work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.filesize import decimal
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
    {
        *("step", "rows", "bytes", "size", "of full", "fold", "chain", "age", "stall", "changed", "max abs"),
        *("save", "written", "kept", "restore", "newest", "most"),
    }
)
_WIDEST = 10_000
Report = Callable[[int, int], None]


def new_table(*names: str) -> Table:
    """A table with these columns; numbers are aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """Print a table without cutting or folding lines, so that it can be searched and piped."""
    console = Console()
    console.width = max(
        console.width, console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    )
    console.print(table)


def print_json(doc: object) -> None:
    """Print one JSON document."""
    print(json.dumps(doc, indent=2))


def print_line(text: str) -> None:
    """Print text as it is, in one line."""
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def say(text: str) -> None:
    """Print a remark on standard error."""
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


def plain(text: str) -> str:
    """Text of a store for a terminal: what is no letter, such as an escape sequence, is spelled out."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def size_text(nbytes: float) -> str:
    """A number of bytes, in powers of a thousand."""
    return decimal(round(nbytes))


def time_text(seconds: float) -> str:
    """Seconds since 1970 as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@contextmanager
def progress(what: str, *, of_bytes: bool = False) -> Iterator[Report]:
    """A bar on standard error, if that is a terminal, and the function that moves it to (done, all)."""
    count = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, known: bar.update(task, completed=done, total=known)
