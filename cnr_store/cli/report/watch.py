"""`cnr watch`: the figures of a store, live in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cnr_backends import BackendError, open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.cli.facts import UNREAD, health
from cnr_store.cli.listing import totals_text, versions_table
from cnr_store.cli.options import StorageOptions, Url, parse_options
from cnr_store.cli.output import counted, plain, say, size_text, table
from cnr_store.cli.report.figures import Figures, highest, read_figures, spans
from cnr_store.errors import CheckpointError

_BARS, _ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_CHART_COLUMNS, _TABLES, _VERSIONS = 40, 5, 10
_TRENDS = {
    "bytes": "size",
    "restore_bytes": "restore reads",
    "stalled_seconds": "stall",
    "saved_seconds": "save takes",
    "chain": "chain",
}
_OTHER_LINES = 20
"""Lines of a terminal that are no versions."""

Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")]
Once = Annotated[bool, typer.Option("--once", help="Print the figures once, and exit.")]


def watch(url: Url, interval: Interval = 5.0, once: Once = False, options: StorageOptions = "{}") -> None:
    """Show the figures of a store until Ctrl-C: the newest versions, bytes, stalls, changed rows and health.

    If standard output is not a terminal, they are printed each time they change.
    """
    catalog, console = Catalog(open_backend(url, **parse_options(options))), Console()
    figures = _look(catalog)
    if once:
        _print(figures, console)
        return
    with suppress(KeyboardInterrupt):
        if console.is_terminal:
            _show(catalog, console, figures, interval)
        else:
            _follow(catalog, console, figures, interval)


def _look(catalog: Catalog) -> Figures:
    """The figures now: records that were read before may have been removed or damaged since."""
    catalog.refresh()
    return read_figures(catalog)


def _show(catalog: Catalog, console: Console, figures: Figures, interval: float) -> None:
    """Show what fits into the terminal, in place. What can't be read for a while is told beneath the last figures."""
    with Live(console=console, auto_refresh=False) as live:
        problem = Text("")
        while True:
            room = max(1, min(_VERSIONS, console.height - _OTHER_LINES))
            shown = [*_parts(figures, console, room), *([problem] if problem else [])]
            live.update(Group(*shown), refresh=True)
            time.sleep(interval)
            problem = Text("")
            try:
                figures = _look(catalog)
            except (BackendError, CheckpointError) as error:
                problem = Text(f"cnr: {error}", style="red")


def _follow(catalog: Catalog, console: Console, figures: Figures, interval: float) -> None:
    """Print the figures, and print them again when they changed."""
    while True:
        _print(figures, console)
        before = figures
        while figures == before:
            time.sleep(interval)
            try:
                figures = _look(catalog)
            except (BackendError, CheckpointError) as error:
                say(f"cnr: {error}")


def _print(figures: Figures, console: Console) -> None:
    for part in _parts(figures, console, _VERSIONS):
        console.print(part, soft_wrap=True)


def _parts(figures: Figures, console: Console, versions: int) -> list[Text]:
    """The figures as text and tables, one above the other."""
    parts = [
        Text(f"{figures.url}: {totals_text(figures.versions, len(figures.versions))}"),
        versions_table(figures.versions[-versions:], console),
    ]
    if figures.known:
        parts.append(_charts(figures, console))
    if figures.tables:
        parts.append(_changed(figures, console))
    return [*parts, _health(figures)]


def _charts(figures: Figures, console: Console) -> Text:
    """The figures of saves over all versions."""
    values = {name: [facts[name] for facts in figures.known] for name in _TRENDS}
    known = {name: each for name, each in values.items() if any(value is not None for value in each)}
    cells = {
        "figure": [_TRENDS[name] for name in known],
        "trend": [sparkline(each, console) for each in known.values()],
        "newest": [_value(name, each[-1]) for name, each in known.items()],
        "most": [_value(name, highest(each, range(len(each)))) for name, each in known.items()],
    }
    return table(cells, console=console)


def _value(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("bytes"):
        return size_text(value)
    return f"{1000 * value:,.0f} ms" if name.endswith("seconds") else f"{value:,}"


def _changed(figures: Figures, console: Console) -> Text:
    """The share of each table's rows that versions hold."""
    tables = figures.tables[:_TABLES]
    newest = (each.shares[-1] for each in tables)
    cells = {
        "changed rows": [plain(each.name) for each in tables],
        "trend": [sparkline(each.shares, console) for each in tables],
        "newest": ["" if share is None else f"{100 * share:.3g} %" for share in newest],
        "size": [size_text(each.bytes) for each in tables],
    }
    return table(cells, console=console)


def sparkline(values: Sequence[float | None], console: Console) -> str:
    """Values as bars of one line, of which each is the highest of some versions, if there are many."""
    bars = _BARS if console.encoding.startswith("utf") else _ASCII_BARS
    columns = max(5, min(_CHART_COLUMNS, console.width - 40))
    known = [highest(values, span) for span in spans(len(values), columns)]
    top = max((value for value in known if value is not None), default=0) or 1
    heights = (0 if value is None else max(1, round(value / top * (len(bars) - 1))) for value in known)
    return "".join(bars[height] for height in heights)


def _health(figures: Figures) -> Text:
    """How many versions can be restored, and what is wrong with the newest of the others."""
    count = counted(len(figures.versions), "version")
    text = f"{figures.restorable:,} of {count} can be restored, as far as names and records tell"
    wrong = [facts for facts in figures.versions if health(facts) != UNREAD]
    if not (wrong or figures.errors):
        return Text(text)
    last = f"; {wrong[-1]['id']}: {health(wrong[-1])}" if wrong else ""
    errors = "".join(f"\n{error}" for error in figures.errors[:1])
    return Text(f"{text}{last}; `cnr verify` says more{errors}", style="red")
