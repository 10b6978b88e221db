"""`cnr cat` and `du`: values of a version, and what takes the space of a store."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
import typer

from cnr_store.catalog.catalog import open_record
from cnr_store.cli.facts import open_store
from cnr_store.cli.options import AsJson, OfVersion, StorageOptions, Url, parse_options, parse_version
from cnr_store.cli.output import print_json, print_line, size_text, table
from cnr_store.format import layout
from cnr_store.maintenance.verification.glance import read_records
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
