"""`cnr report`: how the saves of a store went, as one page: `page.html`, which draws the figures that it gets as JSON.

Nothing is fetched. The page's own policy forbids requests, and any script but the template's own.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import sha256
from importlib import metadata as packages
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.cli.facts import UNREAD, Facts, health, metadata_text, names_text
from cnr_store.cli.maintenance import DAMAGED
from cnr_store.cli.options import AsJson, StorageOptions, Url, parse_options
from cnr_store.cli.output import counted, json_text, print_json, print_line, say, size_text, time_text
from cnr_store.cli.report.figures import Figures, TableFigures, highest, read_figures, spans
from cnr_store.reading.atomic_output import new_file

MAX_VERSIONS, MAX_DECISIONS, MAX_STRIPS, MAX_ERRORS = 100, 50, 24, 20
MAX_COLUMNS, STRIP_COLUMNS = 240, 120
"""Bars of a chart, or points of a line; and parts of a table's strip: however many versions there are."""
_LONGEST = 120

Output = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Where to write the page. An existing file is replaced."
    ),
]


def report(
    url: Url, output: Output = "report.html", options: StorageOptions = "{}", as_json: AsJson = False
) -> None:
    """Write one HTML page about a store: bytes, chains, changed rows, stalls, restores, decisions and health.

    The page needs no network. With --json the figures are printed and no page
    is written. The exit status is 3 if a commit record is damaged.
    """
    figures = read_figures(Catalog(open_backend(url, **parse_options(options))))
    if as_json:
        print_json(asdict(figures))
    else:
        written = page(figures)
        with new_file(output, overwrite=True, options={}) as file:
            file.write(written)
        print_line(f"{output}: {counted(len(figures.versions), 'version')}, {size_text(len(written))}")
    for error in figures.errors:
        say(f"cnr: {error}")
    if figures.errors:
        raise typer.Exit(DAMAGED)


def page(figures: Figures) -> bytes:
    """The page, in UTF-8."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    script = template.rpartition("<script>")[2].partition("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    # No text of a store can end the element that holds it.
    data = re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", json_text(_document(figures)))
    before, after = template.replace("{script}", digest).split("{figures}")
    return f"{before}{data}{after}".encode()


def _document(figures: Figures) -> dict[str, Any]:
    """What the page shows, bounded: of each long list so many, newest first, beside how long it is."""
    known = figures.known
    last = _version(known[-1]) | {"time": time_text(known[-1]["time"])} if known else None
    wrong = figures.errors + [
        f"step {facts['step']} ({facts['id']}) {health(facts)}"
        + (f": its base {facts['lost_base']} is lost" if facts["lost_base"] else "")
        for facts in known
        if health(facts) != UNREAD
    ]
    return {
        "url": figures.url,
        "made": f"cnr report, cnr-store {packages.version('cnr-store')}, {time_text(time.time())}",
        **{name: getattr(figures, name) for name in ("written_bytes", "full_bytes", "restorable")},
        "newest": last,
        "stall": figures.typical("stalled_seconds"),
        "longest_stall": max((facts["stalled_seconds"] or 0 for facts in known), default=0),
        "wrong": {"shown": [_short(text) for text in wrong[:MAX_ERRORS]], "count": len(wrong)},
        "known": len(known),
        "columns": _columns(known),
        "strip_columns": _steps(known, STRIP_COLUMNS),
        "tables": {"shown": list(map(_table, figures.tables[:MAX_STRIPS])), "count": figures.table_count},
        "decisions": _newest(figures.decisions, MAX_DECISIONS, asdict),
        "versions": _newest(figures.versions, MAX_VERSIONS, _version),
    }


def _newest(items: Sequence[Any], most: int, document: Callable[[Any], Any]) -> dict[str, Any]:
    return {"shown": [document(each) for each in items[-most:][::-1]], "count": len(items)}


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _steps(known: Sequence[Facts], most: int) -> dict[str, list[Any]]:
    """The first and the last step of each column."""
    ends = [(known[span[0]]["step"], known[span[-1]]["step"]) for span in spans(len(known), most)]
    return {"first": [first for first, _ in ends], "last": [last for _, last in ends]}


def _columns(known: Sequence[Facts]) -> dict[str, list[Any]]:
    """Of each column the highest figures, and the bytes of all versions to its end."""
    columns, found = list(spans(len(known), MAX_COLUMNS)), _steps(known, MAX_COLUMNS)
    for name in ("bytes", "full_bytes", "restore_bytes", "stalled_seconds", "saved_seconds", "chain"):
        values = [facts[name] for facts in known]
        found[name] = [highest(values, span) for span in columns]
        if name.startswith(("bytes", "full")):
            sums = list(accumulate(values))
            found[f"all_{name}"] = [sums[span[-1]] for span in columns]
    largest = (max(span, key=lambda at: known[at]["bytes"]) for span in columns)
    return found | {"baseline": [known[at]["kind"] == "baseline" for at in largest]}


def _table(table: TableFigures) -> dict[str, Any]:
    shares = [highest(table.shares, span) for span in spans(len(table.shares), STRIP_COLUMNS)]
    words = {"name": _short(table.name), "codec": _short(table.codec)}
    return asdict(table) | words | {"shares": shares, "newest": table.shares[-1]}


def _version(facts: Facts) -> dict[str, Any]:
    texts = {"metadata": _short(metadata_text(facts["metadata"])), "tags": _short(names_text(facts))}
    return {**facts, **texts, "pin_reasons": None, "health": health(facts), "sound": health(facts) == UNREAD}
