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
from rich.text import Text

_NUMBERS = frozenset(
    {
        *("step", "rows", "bytes", "size", "of full", "fold", "chain", "age", "stall", "changed", "max abs"),
        *("save", "written", "folds", "kept", "restore", "newest", "most"),
        *("objects", "of all", "in the latest", "raw", "finer", "zero"),
    }
)
Report = Callable[[int, int | None], None]


def table(
    cells: Mapping[str, Sequence[str]], spare: Sequence[str] = (), console: Console | None = None
) -> Text:
    """Columns as lines of text, aligned, none of them cut or folded: so they can be searched and piped.

    A terminal too narrow for all goes without those of `spare`, one after the other. The lines are made here, as rich
    would make them: of thousands of rows it takes seconds.
    """
    console, columns = console or Console(), {name: _padded(name, texts) for name, texts in cells.items()}
    for name in filter(cells.__contains__, spare):
        width = sum(2 + cell_len(column[0]) for column in columns.values()) - 2
        if not console.is_terminal or width <= console.width:
            break
        del columns[name]
    lines = ["  ".join(each) for each in zip(*columns.values(), strict=True)]
    text = Text("\n".join(lines), no_wrap=True)
    text.stylize("table.header", 0, len(lines[0]))
    return text


def _padded(name: str, texts: Sequence[str]) -> list[str]:
    """The cells of a column, its name first, all as wide as the widest; numbers to the right."""
    cells = [name, *(text or "-" for text in texts)]
    widths = [cell_len(cell) for cell in cells]
    spaces = [" " * (max(widths) - width) for width in widths]
    if name in _NUMBERS:
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


def print_line(text: str | Text) -> None:
    """Print text as it is, without folding lines."""
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
