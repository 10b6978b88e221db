"""`cnr info`, `cat`, `diff` and `du`: what a version holds, in what two of them differ, and what takes the space."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import typer
from rich.text import Text

from cnr_store.catalog.catalog import open_record
from cnr_store.catalog.claims import list_tombstoned
from cnr_store.catalog.objects import list_marked, read_tags
from cnr_store.cli.facts import codec_text, fold_bytes, metadata_text, names_text, open_store, record_facts
from cnr_store.cli.options import (
    AsJson,
    OfVersion,
    StorageOptions,
    Url,
    VersionName,
    parse_options,
    parse_version,
)
from cnr_store.cli.output import print_json, print_line, size_text, table, time_text
from cnr_store.errors import listed
from cnr_store.format import layout
from cnr_store.format.record import COUNTS, ArrayEntry
from cnr_store.maintenance.collection.pins import read_reasons
from cnr_store.maintenance.verification.glance import find_lost, read_records
from cnr_store.policies.budget import Budget
from cnr_store.policies.whole_tables import describe
from cnr_store.reading import diff as reading
from cnr_store.reading.opening import find_array, read_array, rows

_SHOWN_ROWS = 10
_MOST_ROWS = 100_000
_SPAN = re.compile(r"(\d{0,18}):(\d{0,18})")

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A table, TABLE/SLOT for optimizer state, a tensor, or the path of an array."
    ),
]
Rows = Annotated[
    str,
    typer.Option(
        "--rows", metavar="ROWS", help="Row numbers, such as 5, 5:10 (without row 10), or 7,9,20:22."
    ),
]
Older = Annotated[str, typer.Argument(metavar="OLDER", help="An id, a step, a tag, or latest.")]
Newer = Annotated[str, typer.Argument(metavar="[NEWER]", help="An id, a step, a tag, or latest.")]


def info(
    url: Url, version: VersionName = "latest", options: StorageOptions = "{}", as_json: AsJson = False
) -> None:
    """Show one version and its arrays, and whether an object is missing that a restore needs."""
    catalog, record = open_record(url, parse_version(version), **parse_options(options))
    facts = record_facts(record) | {
        "tags": sorted(name for name, tagged in read_tags(catalog.backend).items() if tagged == record.id),
        "pinned": record.id in list_marked(catalog.backend, layout.PINS),
        "pin_reasons": read_reasons(catalog.backend, record.id),
        "fold_bytes": fold_bytes(catalog, record.id),
        "lost": find_lost(catalog, record),
        "removed": record.id in list_tombstoned(catalog.backend),
        "needs": list(record.needs),
        "restores": record.restores,
        "spent": record.spent,
        "policy": dict(record.policy),
    }
    if as_json:
        print_json(facts | {"arrays": {path: entry.to_json() for path, entry in record.arrays.items()}})
        return
    for name, value in _told(facts).items():
        print_line(f"{name:<8}  {value}")  # not a table: what is long would widen each line
    print_line(_arrays_table(record.arrays))


def _told(facts: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a version, for people. What it has not is left out."""
    policy, needs, full = facts["policy"], facts["needs"], facts["full_bytes"]
    became_whole = facts["kind"] == "baseline" and not policy.get("full", True)  # it was to be a delta
    reason = "every table is whole" if became_whole else policy.get("reason")
    spent = f", which cost at most {facts['spent']:.2g} % of the loss" if facts["spent"] else ""
    told = {
        "id": facts["id"],
        "step": str(facts["step"]),
        "kind": facts["kind"],
        "rows": f"{facts['rows']:,} of {facts['table_rows']:,}",
        "size": size_text(facts["bytes"])
        + (f", {100 * facts['bytes'] / full:.1f} % of full" if full else ""),
        "fold": size_text(facts["fold_bytes"]) if facts["fold_bytes"] is not None else "",
        "time": time_text(facts["time"]),
        "took": _seconds_text(policy.get("seconds", {})),
        "tags": names_text(facts),
        "metadata": metadata_text(facts["metadata"]),
        "lost": facts["lost"] or "",
        "removed": "it is being removed" if facts["removed"] else "",
        "previous": facts["previous"] or "",
        "needs": listed(needs, 3),
        "restores": f"{facts['restores']}{spent}" if facts["restores"] else "",
        "budget": str(Budget(**policy["budget"], spent=facts["spent"])) if policy.get("budget") else "",
        "policy": f"{policy['policy']}: {reason}" if {"policy", "reason"} <= policy.keys() else "",
        "ranks": _ranks_text(policy["ranks"]) if policy.get("ranks") else "",
        "whole": describe(policy["whole"]) if policy.get("whole") else "",
        "compared": describe(policy["compared"]) if policy.get("compared") else "",
    }
    return {name: text for name, text in told.items() if text}


def _seconds_text(seconds: Mapping[str, float]) -> str:
    """How long a save held training, and took."""
    if not {"stalled", "saved"} <= seconds.keys():
        return ""
    return f"stalled {1000 * seconds['stalled']:,.0f} ms, saved in {seconds['saved']:,.1f} s"


def diff(
    url: Url, older: Older, newer: Newer = "latest", options: StorageOptions = "{}", as_json: AsJson = False
) -> None:
    """Show which arrays differ between two versions, in how many rows, and by how much."""
    differences = reading.diff(url, parse_version(older), parse_version(newer), **parse_options(options))
    if as_json:
        print_json([asdict(each) for each in differences])
        return
    cells: dict[str, list[str]] = {
        "array": [each.path for each in differences],
        "status": [each.status for each in differences],
        "changed": [f"{each.rows_changed:,}" for each in differences],
        "rows": [f"{each.rows:,}" for each in differences],
        "max abs": ["" if each.max_abs is None else f"{each.max_abs:.3g}" for each in differences],
    }
    print_line(table(cells, ("rows", "max abs", "status")))


def _ranks_text(ranks: Mapping[str, Any]) -> str:
    """By how many ranks a version was saved, and the least and the most that one of them wrote."""
    shown = [f"saved by {ranks['world']}"]
    for name, unit in (("bytes", ""), ("seconds", " s")):
        if name in ranks:
            values = ranks[name].values() if isinstance(ranks[name], dict) else ranks[name]
            shown.append(f"{min(values):,} to {max(values):,}{unit or ' ' + name}")
    return ", ".join(shown)


def _arrays_table(arrays: Mapping[str, ArrayEntry]) -> Text:
    entries = arrays.values()
    cells = {
        "array": list(arrays),
        "kind": [entry.kind for entry in entries],
        "shape": [" × ".join(f"{length:,}" for length in entry.shape) for entry in entries],
        "element": [entry.element for entry in entries],
        "rows": ["" if entry.kind == "dense" else f"{entry.rows:,}" for entry in entries],
        "size": [size_text(entry.nbytes) for entry in entries],
        "codec": ["" if entry.codec is None else codec_text(entry.codec) for entry in entries],
        "base": [entry.base or "" for entry in entries],
    }
    counts = {name: [_share_text(entry.counts[name], entry.rows) for entry in entries] for name in COUNTS}
    cells |= {name: texts for name, texts in counts.items() if any(texts)}
    return table(cells, (*COUNTS[::-1], "base", "element", "shape", "codec", "kind", "rows"))


def _share_text(count: int, rows: int) -> str:
    return f"{100 * count / rows:.3g} %" if count else ""


def cat(
    url: Url,
    name: Name,
    wanted: Rows = f"0:{_SHOWN_ROWS}",
    version: OfVersion = "latest",
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Print rows of a table, of its optimizer state, or of a dense tensor, without reading the other rows."""
    catalog, record = open_record(url, parse_version(version), **parse_options(options))
    path = find_array(record, name)
    shape = record.arrays[path].shape
    if not shape:
        number = read_array(catalog, record, path)
        if as_json:
            print_json({"version": record.id, "name": name, "rows": [], "values": number.tolist()})
        else:
            print_line(f"{name} of step {record.step}: {_value_text(number)}")
        return
    ids = _parse_rows(wanted, shape[0])
    values = rows(url, name, ids, record.id, **parse_options(options))
    if as_json:
        print_json({"version": record.id, "name": name, "rows": ids, "values": values.tolist()})
        return
    print_line(f"{name} of step {record.step}: {' × '.join(f'{length:,}' for length in shape)}")
    for row, value in zip(ids, values, strict=True):
        print_line(f"{row}: {_value_text(value)}")


def _parse_rows(text: str, count: int) -> list[int]:
    """Row numbers from text such as 7,9,20:22; spans end with the array.

    `typer.BadParameter` if it is something else, or too many rows.
    """
    ids: list[int] = []
    for part in text.split(","):
        span = _SPAN.fullmatch(part.strip())
        if span is None:
            span = _SPAN.fullmatch(f"{part.strip()}:{part.strip()}")
            if span is None or not span[1]:
                raise typer.BadParameter(f"--rows {text}: give row numbers, such as 5, 5:10 or 7,9,20:22")
            ids.append(int(span[1]))
            continue
        found = range(int(span[1] or 0), min(int(span[2] or count), count))
        if len(ids) + len(found) > _MOST_ROWS:
            raise typer.BadParameter(
                f"--rows {text}: these are over {_MOST_ROWS:,} rows; `cnr export` writes whole tables"
            )
        ids.extend(found)
    return ids


def _value_text(value: Any) -> str:
    """A row for people, in one line, no number cut."""
    text = np.array2string(
        np.asarray(value), max_line_width=10**9, threshold=10**9, precision=6, separator=" "
    )
    return text.replace("\n", "")


def du(url: Url, options: StorageOptions = "{}", as_json: AsJson = False) -> None:
    """Show the disk usage of a store: of versions, folds, unfinished saves and removed versions, and of each array."""
    catalog = open_store(url, parse_options(options))
    records, damaged = read_records(catalog)
    kinds = _kinds(catalog.backend.list_keys(""), {record.id for record in records} | damaged.keys())
    arrays: Counter[str] = Counter()
    for record in records:
        arrays.update({path: entry.nbytes for path, entry in record.arrays.items()})
    latest = records[-1].arrays if records else {}
    if as_json:
        doc = {kind: {"objects": objects, "bytes": nbytes} for kind, (objects, nbytes) in kinds.items()}
        print_json({"objects": doc, "arrays": dict(arrays.most_common())})
        return
    cells = {
        "what": list(kinds),
        "objects": [f"{objects:,}" for objects, _ in kinds.values()],
        "size": [size_text(nbytes) for _, nbytes in kinds.values()],
    }
    print_line(table(cells))
    if arrays:
        whole, largest = max(1, arrays.total()), dict(arrays.most_common())
        cells = {
            "array": list(largest),
            "size": [size_text(nbytes) for nbytes in largest.values()],
            "of all": [f"{100 * nbytes / whole:.1f} %" for nbytes in largest.values()],
            "in the latest": [size_text(latest[path].nbytes) if path in latest else "" for path in largest],
        }
        print_line(table(cells, ("in the latest", "of all")))


def _kinds(objects: Iterable[tuple[str, int]], committed: set[str]) -> dict[str, tuple[int, int]]:
    """How many objects there are of each kind, and their bytes."""
    objects = list(objects)
    removed = {key.split("/")[1] for key, _ in objects if key.startswith(f"{layout.TOMBSTONES}/")}
    beside = "claims, pins, tags and the reserve"
    names = ("versions", "folds", "unfinished saves", "removed versions", beside, "all")
    found = {name: [0, 0] for name in names}
    for key, nbytes in objects:
        top, _, rest = key.partition("/")
        place = rest.partition("/")[0]
        if top == layout.VERSIONS and layout.is_version(place):
            kind = "versions" if place in committed else names[3 if place in removed else 2]
        elif top == layout.TOMBSTONES:
            kind = "removed versions"
        else:
            kind = "folds" if top == layout.FOLDS else beside
        for name in (kind, "all"):
            found[name][0] += 1
            found[name][1] += nbytes
    return {name: (objects, nbytes) for name, (objects, nbytes) in found.items() if objects or name == "all"}
