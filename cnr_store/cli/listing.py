"""`cnr ls`: the versions of a store, with what each took, what it can be called, and what seems wrong with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.version_info import as_figure
from cnr_store.cli.facts import Facts, health, metadata_text, names_text, read_store
from cnr_store.cli.maintenance import DAMAGED
from cnr_store.cli.options import AsJson, StorageOptions, Url, parse_options
from cnr_store.cli.output import print_json, print_line, say, size_text, table, time_text

Last = Annotated[int | None, typer.Option(min=1, help="List only this many of the newest versions.")]
Sort = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Sort by a column or by a figure in the metadata, smallest first."),
]
Long = Annotated[
    bool, typer.Option("--long", help="Also show ids, times and folds. Lines may be wider than the terminal.")
]


def ls(
    url: Url,
    last: Last = None,
    sort: Sort = None,
    long: Long = False,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """List the committed versions of a store, oldest first, and what seems wrong with any.

    What names and records tell of each version is listed: `cnr verify` looks for lost and damaged objects.
    A narrow terminal shows fewer columns.
    The exit status is 3 if a commit record is damaged.
    """
    found = read_store(Catalog(open_backend(url, **parse_options(options))))
    listed, damaged = found.versions, found.errors
    shown = _sorted(listed, sort) if sort else listed
    shown = shown[-last:] if last else shown
    if as_json:
        print_json(shown)
    elif shown:
        print_line(versions_table(shown, long=long))
        print_line(totals_text(listed, len(shown)))
    else:
        say(f"{url} holds no committed version")
    for error in damaged:
        say(f"cnr: {error}")
    if damaged:
        raise typer.Exit(DAMAGED)


def _sorted(listed: Sequence[Facts], name: str) -> list[Facts]:
    """Ordered by a column or by a figure of the metadata; versions that lack it come first.

    `typer.BadParameter` if no version has it.
    """
    column = {"size": "bytes", "age": "time", "stall": "stalled_seconds"}.get(name, name)
    values = [_figure(facts, column) for facts in listed]
    if listed and all(value is None for value in values):
        known = sorted({"step", "rows", "size", "age", "chain", "stall", *_figures(listed)})
        raise typer.BadParameter(f"no version has the figure {name!r}: there are {', '.join(known)}")
    order = sorted(range(len(listed)), key=lambda at: (values[at] is not None, values[at] or 0))
    ordered = [listed[at] for at in order]
    return ordered[::-1] if name == "age" else ordered


def _figures(listed: Iterable[Facts]) -> set[str]:
    """Names of the figures in all metadata."""
    named = (facts["metadata"] for facts in listed if isinstance(facts["metadata"], dict))
    return {name for metadata in named for name, value in metadata.items() if as_figure(value) is not None}


def _figure(facts: Facts, name: str) -> float | None:
    metadata = facts["metadata"] if isinstance(facts["metadata"], dict) else {}
    value = facts[name] if name in facts else metadata.get(name)
    return as_figure(value)


def versions_table(shown: Sequence[Facts], console: Console | None = None, *, long: bool = False) -> Text:
    """Versions as a table of columns that some of them fill; on a terminal without those that it is too narrow for."""
    now = time.time()
    cells = {
        name: [cell(facts, now) for facts in shown]
        for name, cell in (_LONG | _COLUMNS if long else _COLUMNS).items()
    }
    filled = {name: texts for name, texts in cells.items() if name in _ALWAYS or any(texts)}
    return table(filled, () if long else _SPARE, console)


def totals_text(listed: Sequence[Facts], shown: int) -> str:
    """What all versions take, beside as many full copies of the model."""
    known = [facts for facts in listed if facts["bytes"] is not None]
    written, full = sum(facts["bytes"] for facts in known), sum(facts["full_bytes"] for facts in known)
    folds = sum(facts["fold_bytes"] or 0 for facts in listed)
    parts = [f"{len(listed):,} version{'s' * (len(listed) != 1)}"]
    if shown < len(listed):
        parts.append(f"{shown:,} shown")
    parts.append(size_text(written))
    if folds:
        parts.append(f"and {size_text(folds)} of folds")
    if written:  # a version may need its fold, once what it builds on is removed
        parts.append(f"{full / (written + folds):.1f}x less than as many full copies ({size_text(full)})")
    return ", ".join(parts)


def _rows(facts: Facts, _now: float) -> str:
    if facts["rows"] is None:
        return ""
    if not facts["table_rows"]:
        return f"{facts['rows']:,}"
    share = 100 * facts["rows"] / facts["table_rows"]
    return f"{facts['rows']:,} ({share:.{0 if share >= 10 else 1}f} %)"


def _of_full(facts: Facts, _now: float) -> str:
    return f"{100 * facts['bytes'] / facts['full_bytes']:.1f} %" if facts["full_bytes"] else ""


def _stall(facts: Facts, _now: float) -> str:
    stalled = facts["stalled_seconds"]
    return "" if stalled is None else f"{1000 * stalled:,.0f} ms"


def _age(facts: Facts, now: float) -> str:
    if facts["time"] is None:
        return ""
    seconds = max(0.0, now - facts["time"])
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def _named(name: str) -> Callable[[Facts, float], str]:
    return lambda facts, _now: "" if facts[name] is None else str(facts[name])


_COLUMNS: dict[str, Callable[[Facts, float], str]] = {
    "step": _named("step"),
    "kind": _named("kind"),
    "rows": _rows,
    "size": lambda facts, _now: "" if facts["bytes"] is None else size_text(facts["bytes"]),
    "of full": _of_full,
    "chain": _named("chain"),
    "age": _age,
    "stall": _stall,
    "metadata": lambda facts, _now: metadata_text(facts["metadata"]),
    "tags": lambda facts, _now: names_text(facts),
    "health": lambda facts, _now: health(facts),
}
_LONG: dict[str, Callable[[Facts, float], str]] = {
    "id": _named("id"),
    "previous": _named("previous"),
    "time": lambda facts, _now: "" if facts["time"] is None else time_text(facts["time"]),
    "fold": lambda facts, _now: "" if facts["fold_bytes"] is None else size_text(facts["fold_bytes"]),
}
_ALWAYS = frozenset({"step", "kind", "rows", "size", "of full", "chain", "age", "health"})
"""Columns that are there although no version fills them."""
_SPARE = ("metadata", "stall", "chain", "of full", "age", "rows", "tags", "kind")
"""What a narrow terminal does without, in this order."""
