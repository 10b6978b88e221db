"""`cnr ls`, `info` and `diff`: what a store, a version or two versions hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog, open_record
from cnr_store.catalog.claims import list_tombstoned
from cnr_store.catalog.objects import list_ids
from cnr_store.cli.maintenance import DAMAGED
from cnr_store.cli.options import AsJson, StorageOptions, Url, VersionName, parse_options, parse_version
from cnr_store.cli.output import new_table, print_json, print_table, say, time_text
from cnr_store.errors import CorruptionError, EmptyStoreError, FormatError
from cnr_store.format import layout
from cnr_store.format.record import ArrayEntry, Record
from cnr_store.maintenance.verification.glance import find_lost, find_lost_bases, read_records
from cnr_store.policies.whole_tables import describe
from cnr_store.reading import diff as reading

_SHOWN_IDS = 3
_MARKS = {
    "damaged": "damaged",
    "pinned": "pinned",
    "folded": "folded",
    "removed": "being removed",
    "lost_base": "can't be restored",
}
_FACTS = {
    **{name: name for name in ("id", "step", "kind", "rows")},
    "bytes": "nbytes",
    **{name: name for name in ("previous", "time", "metadata")},
}
"""Attributes of a record, by the names that are printed."""

Older = Annotated[str, typer.Argument(metavar="OLDER", help="An id, a step, or latest.")]
Newer = Annotated[str, typer.Argument(metavar="[NEWER]", help="An id, a step, or latest.")]


def ls(url: Url, options: StorageOptions = "{}", as_json: AsJson = False) -> None:
    """List the committed versions of a store, oldest first. Those whose base is lost are marked.

    Those whose record is damaged are, too, and the exit status is 3 then. The column fold has the bytes of folds.
    """
    backend = open_backend(url, **parse_options(options))
    catalog = Catalog(backend)
    records, damaged = read_records(catalog)
    if not (records or damaged or catalog.check_format()):
        raise EmptyStoreError(f"{backend.url} holds no store: check the URL")
    pinned, folded = list_ids(backend, layout.PINS), list_ids(backend, layout.FOLDS)
    tombstoned, lost = list_tombstoned(backend), find_lost_bases(records, folded)
    facts = {version: dict.fromkeys(_FACTS) | {"id": version} for version in damaged}
    facts |= {record.id: _facts(record) for record in records}
    listed = [
        facts[version]
        | {
            "pinned": version in pinned,
            "folded": version in folded,
            "fold_bytes": _fold_bytes(catalog, version) if version in folded else None,
            "removed": version in tombstoned,
            "lost_base": lost.get(version),
            "damaged": None if version not in damaged else str(damaged[version]),
        }
        for version in sorted(facts)
    ]
    if as_json:
        print_json(listed)
    elif listed:
        _print_versions(listed)
    else:
        say(f"{url} holds no committed version")
    for error in damaged.values():
        say(f"cnr: {error}")
    if damaged:
        raise typer.Exit(DAMAGED)


def _print_versions(listed: list[dict[str, Any]]) -> None:
    columns = ("id", "step", "kind", "rows", "bytes", "previous", "time")
    table = new_table(*columns, "fold", "marks")
    for facts in listed:
        marks = ", ".join(text for name, text in _MARKS.items() if facts[name])
        shown = [_text(column, facts[column]) for column in columns]
        table.add_row(*shown, _text("bytes", facts["fold_bytes"]), marks or "-")
    print_table(table)


def _fold_bytes(catalog: Catalog, version: str) -> int | None:
    """Bytes that the fold of a version takes. None if it has none that can be read."""
    try:
        fold = catalog.find_fold(version)
    except (CorruptionError, FormatError):  # `cnr verify` says so
        return None
    return None if fold is None else fold.nbytes


def info(
    url: Url, version: VersionName = "latest", options: StorageOptions = "{}", as_json: AsJson = False
) -> None:
    """Show one version, array by array, and whether it lacks an object that restoring it needs."""
    catalog, record = open_record(url, parse_version(version), **parse_options(options))
    facts = _facts(record) | {
        "fold_bytes": _fold_bytes(catalog, record.id),
        "lost": find_lost(catalog, record),
        "removed": record.id in list_tombstoned(catalog.backend),
        "needs": list(record.needs),
        "restores": record.restores,
        "policy": dict(record.policy),
    }
    if as_json:
        print_json(facts | {"arrays": {path: entry.to_json() for path, entry in record.arrays.items()}})
        return
    table = new_table("name", "value")
    for name, value in facts.items():
        table.add_row(name, Text(_text(name, value)))
    if ranks := record.policy.get("ranks"):
        table.add_row("ranks", Text(_ranks_text(ranks)))
    if whole := record.policy.get("whole"):
        table.add_row("whole", Text(describe(whole)))
    print_table(table)
    print_table(_arrays_table(record.arrays))


def diff(
    url: Url, older: Older, newer: Newer = "latest", options: StorageOptions = "{}", as_json: AsJson = False
) -> None:
    """Show which arrays differ between two versions, in how many rows, and by how much."""
    differences = reading.diff(url, parse_version(older), parse_version(newer), **parse_options(options))
    if as_json:
        print_json([asdict(each) for each in differences])
        return
    table = new_table("array", "status", "changed", "rows", "max abs")
    for each in differences:
        largest = "-" if each.max_abs is None else f"{each.max_abs:.3g}"
        table.add_row(each.path, each.status, f"{each.rows_changed:,}", f"{each.rows:,}", largest)
    print_table(table)


def _text(name: str, value: Any) -> str:
    """One fact of a version, for people."""
    if name == "time" and value is not None:
        return time_text(value)
    if name == "needs":
        more = f" and {len(value) - _SHOWN_IDS} more" if len(value) > _SHOWN_IDS else ""
        return ", ".join(value[:_SHOWN_IDS]) + more if value else "-"
    if name == "policy" and {"policy", "reason"} <= value.keys():
        return f"{value['policy']}: {value['reason']}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if name in ("rows", "bytes", "fold_bytes") else str(value)
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _ranks_text(ranks: Mapping[str, Any]) -> str:
    """By how many ranks a version was saved, and the least and the most that one of them wrote."""
    shown = [f"saved by {ranks['world']}"]
    for name, unit in (("bytes", ""), ("seconds", " s")):
        if name in ranks:
            values = ranks[name].values() if isinstance(ranks[name], dict) else ranks[name]
            shown.append(f"{min(values):,} to {max(values):,}{unit or ' ' + name}")
    return ", ".join(shown)


def _facts(record: Record) -> dict[str, Any]:
    return {name: getattr(record, attribute) for name, attribute in _FACTS.items()}


def _arrays_table(arrays: Mapping[str, ArrayEntry]) -> Table:
    table = new_table("array", "kind", "shape", "element", "rows", "bytes", "codec", "base")
    for path, entry in arrays.items():
        shape = " × ".join(f"{length:,}" for length in entry.shape)
        codec = json.dumps(entry.codec) if entry.codec else "-"
        row = [path, entry.kind, shape, entry.element, f"{entry.rows:,}", f"{entry.nbytes:,}", codec]
        table.add_row(*map(Text, row), entry.base or "-")
    return table
