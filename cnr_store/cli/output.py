"""Printing: tables that are never cut, JSON, and progress of long work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.cells import cell_len
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
from rich.table import Column, Table
from rich.text import Text

_NUMBERS = frozenset(
    {
        *("step", "rows", "bytes", "size", "of full", "fold", "chain", "age", "stall", "changed", "max abs"),
        *("save", "written", "folds", "kept", "restore", "newest", "most"),
        *("objects", "of all", "in the latest", "raw", "finer", "zero"),
    }
)
_WIDEST = 10_000
Report = Callable[[int, int | None], None]


def new_table(*names: str) -> Table:
    """A table with these columns; numbers are aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    return table


def fitting_table(cells: Mapping[str, Sequence[str]], spare: Sequence[str], console: Console) -> Table:
    """A table of these columns. A terminal too narrow for all goes without those of `spare`, one after the other."""
    columns = list(cells)
    while (
        console.is_terminal
        and (dropped := next((name for name in spare if name in columns), None))
        and _width(console, _table(columns, cells)) > console.width
    ):
        columns.remove(dropped)
    return _table(columns, cells)


def _table(columns: Sequence[str], cells: Mapping[str, Sequence[str]]) -> Table:
    table = new_table(*columns)
    for row in zip(*(cells[name] for name in columns), strict=True):
        table.add_row(*(Text(cell or "-") for cell in row))
    return table


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(width=_WIDEST)).maximum


def print_table(table: Table) -> None:
    """Print a table without cutting or folding lines, so that it can be searched and piped.

    The lines are made here, as rich would make them: of thousands of rows it takes seconds.
    """
    console = Console(soft_wrap=True)
    columns = [_padded(console, column) for column in table.columns]
    head, *lines = ("  ".join(cells) for cells in zip(*columns, strict=True))
    console.print(Text(head, style="table.header"))
    if lines:
        console.print(Text("\n".join(lines)))


def _padded(console: Console, column: Column) -> list[str]:
    """The cells of a column, its name first, all as wide as the widest."""
    cells = [
        each.plain if isinstance(each, Text) else console.render_str(str(each)).plain
        for each in (column.header, *column.cells)
    ]
    widths = [cell_len(cell) for cell in cells]
    spaces = [" " * (max(widths) - width) for width in widths]
    if column.justify == "right":
        return [space + cell for space, cell in zip(spaces, cells, strict=True)]
    return [cell + space for space, cell in zip(spaces, cells, strict=True)]


def print_json(doc: object) -> None:
    """Print one JSON document."""
    print(json_text(doc, indent=2))


def json_text(doc: object, indent: int | None = None) -> str:
    """A JSON document. JSON has no NaN and no infinity: they are spelled as Zarr spells them."""
    try:
        return json.dumps(doc, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_spelled(doc), indent=indent, allow_nan=False)


def _spelled(value: object) -> object:
    """The same with "NaN", "Infinity" and "-Infinity" for what is no number of JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _spelled(each) for name, each in value.items()}
    return [_spelled(each) for each in value] if isinstance(value, list | tuple) else value


def print_line(text: str) -> None:
    """Print text as it is, in one line."""
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def say(text: str) -> None:
    """Print a remark on standard error."""
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


def plain(text: str) -> str:
    """Text of a store for a terminal: what is no letter, such as an escape sequence, is spelled out."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def counted(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


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
