"""`cnr ls` and `cnr info`: what a store holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cnr_backends import open_backend
from cnr_store.catalog import Catalog, VersionInfo
from cnr_store.cli.options import AsJson, StorageOptions, Url, storage_options
from cnr_store.format.record import ArrayEntry
from cnr_store.reading.access import versions

VersionName = Annotated[
    str, typer.Argument(metavar="VERSION", help="An id, a step, or latest.", show_default=False)
]

_NUMBERS = frozenset({"step", "rows", "bytes"})
_WIDEST = 10_000


def ls(url: Url, options: StorageOptions = "{}", as_json: AsJson = False) -> None:
    """List the committed versions of a store, oldest first."""
    found = versions(url, **storage_options(options))
    if as_json:
        _print_json([_facts(info) for info in found])
        return
    if not found:
        Console(stderr=True).print(f"{url} holds no committed version", markup=False, soft_wrap=True)
        return
    table = _table("id", "step", "kind", "rows", "bytes", "previous", "time")
    for info in found:
        sizes = (f"{info.rows:,}", f"{info.bytes:,}")
        table.add_row(info.id, str(info.step), info.kind, *sizes, info.previous or "-", _time_text(info.time))
    _print_wide(table)


def info(
    url: Url, version: VersionName = "latest", options: StorageOptions = "{}", as_json: AsJson = False
) -> None:
    """Show one version, array by array."""
    catalog = Catalog(open_backend(url, **storage_options(options)))
    record = catalog.find(int(version) if version.isdecimal() else version)
    facts = _facts(VersionInfo.of(record)) | {
        "needs": list(record.needs),
        "restores": record.restores,
        "policy": dict(record.policy),
        "metadata": record.metadata,
    }
    if as_json:
        _print_json(facts | {"arrays": {path: entry.to_json() for path, entry in record.arrays.items()}})
        return
    lines = _table("name", "value")
    for name, value in facts.items():
        text = (
            _time_text(record.time)
            if name == "time"
            else value
            if isinstance(value, str)
            else json.dumps(value)
        )
        lines.add_row(name, Text(text))
    _print_wide(lines)
    _print_wide(_arrays_table(record.arrays))


def _facts(info: VersionInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "step": info.step,
        "kind": info.kind,
        "rows": info.rows,
        "bytes": info.bytes,
        "previous": info.previous,
        "time": info.time,
    }


def _arrays_table(arrays: Mapping[str, ArrayEntry]) -> Table:
    table = _table("array", "kind", "shape", "element", "rows", "bytes", "codec", "base")
    for path, entry in arrays.items():
        shape = " × ".join(f"{length:,}" for length in entry.shape)
        codec = json.dumps(entry.codec) if entry.codec else "-"
        row = [path, entry.kind, shape, entry.element, f"{entry.rows:,}", f"{entry.nbytes:,}", codec]
        table.add_row(*map(Text, row), entry.base or "-")
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    return table


def _print_wide(table: Table) -> None:
    """A table whose lines are never cut or folded, so that it can be searched and piped."""
    console = Console()
    console.width = max(
        console.width, console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    )
    console.print(table)


def _print_json(doc: object) -> None:
    print(json.dumps(doc, indent=2))


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
