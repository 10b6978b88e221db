"""The report as one HTML page: nothing in it is fetched, and nothing runs.

All that comes from a store is escaped, and cut where it is long. The page's own policy forbids scripts and requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib import metadata as packages
from itertools import accumulate

from cnr_store.cli.facts import UNREAD, Facts, health, metadata_text, names_text
from cnr_store.cli.output import counted, size_text, time_text
from cnr_store.cli.report.charts import TICKS, bars, lines, step_axis, strip
from cnr_store.cli.report.figures import Decisions, Figures
from cnr_store.cli.report.style import STYLE

MAX_VERSIONS, MAX_DECISIONS, MAX_STRIPS, MAX_ERRORS = 100, 50, 24, 20
_STRIP_COLUMNS = 120
_LONGEST = 120
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_PACES = (100e6, 1e9)


def page(figures: Figures) -> bytes:
    """The page, in UTF-8."""
    parts = [_head(figures), _tiles(figures), _health(figures)]
    if figures.known:
        parts += [_bytes(figures), _times(figures), _tables(figures), _restores(figures)]
    parts += [_decisions(figures.decisions), _versions(figures), _foot()]
    # A name may hold half a character, which UTF-8 can't.
    return "\n".join(parts).encode("utf-8", "xmlcharrefreplace")


def short(text: str) -> str:
    """Text of a store for the page: cut and escaped, and its direction of writing kept inside."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return f"<bdi>{escape(cut)}</bdi>"


def _head(figures: Figures) -> str:
    name = escape(figures.url)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>Checkpoints of {name}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>Checkpoints</h1><p><bdi>{name}</bdi></p></header>"
    )


def _foot() -> str:
    release = escape(packages.version("cnr-store"))
    return (
        f"<footer>cnr report, cnr-store {release}, {time_text(time.time())}</footer></main></body></html>\n"
    )


def _tiles(figures: Figures) -> str:
    """What matters most, in a few numbers."""
    known, written = figures.known, figures.written_bytes
    tiles = []
    if written:
        tiles.append(
            (
                f"{figures.full_bytes / written:.1f}×",
                f"less than as many full copies: {size_text(written)}, not {size_text(figures.full_bytes)}",
            )
        )
    versions = counted(len(figures.versions), "version")
    count, word = versions.split()
    tiles.append((count, word))
    if known:
        last = known[-1]
        tiles.append((f"{last['step']:,}", f"newest step, saved {time_text(last['time'])}"))
        reads = last["restore_bytes"]
        if reads is not None:
            tiles.append((size_text(reads), f"read to restore it, from {counted(last['chain'], 'version')}"))
    stall = figures.typical("stalled_seconds")
    if stall is not None:
        longest = max(facts["stalled_seconds"] or 0.0 for facts in known)
        tiles.append((_ms(stall), f"typical stall of training; the longest was {_ms(longest)}"))
    tiles.append((f"{figures.restorable:,}", f"of {versions} can be restored"))
    return (
        '<section class="tiles">'
        + "".join(f"<div><b>{number}</b>{escape(text)}</div>" for number, text in tiles)
        + "</section>"
    )


def _health(figures: Figures) -> str:
    """What is damaged, lost or being removed."""
    texts = list(figures.errors)
    for facts in figures.versions:
        if facts["damaged"] is None and health(facts) != UNREAD:
            lost = f": its base {facts['lost_base']} is lost" if facts["lost_base"] else ""
            texts.append(f"step {facts['step']} ({facts['id']}) {health(facts)}{lost}")
    note = "as far as names and records tell. <code>cnr verify --deep</code> reads every byte."
    if not texts:
        return f'<section class="health"><p>Nothing is damaged, {note}</p></section>'
    more = len(texts) - MAX_ERRORS
    shown = [f"<li>{short(text)}</li>" for text in texts[:MAX_ERRORS]]
    shown += [f"<li>and {more:,} more</li>"] if more > 0 else []
    return f'<section class="health bad"><p>This is wrong, {note}</p><ul>{"".join(shown)}</ul></section>'


def _bytes(figures: Figures) -> str:
    known = figures.known
    steps, sizes = [facts["step"] for facts in known], [facts["bytes"] for facts in known]
    written, full = list(accumulate(sizes)), list(accumulate(facts["full_bytes"] for facts in known))
    legend = "Deltas hold the rows that changed; baselines, in the second colour, hold all rows."
    return _section(
        "Bytes",
        bars(
            "Bytes a version",
            legend,
            steps,
            sizes,
            size_text,
            [facts["kind"] == "baseline" for facts in known],
        ),
        lines(
            "Bytes of all versions",
            "Beside as many full copies of the model, in its own element types.",
            steps,
            [("written", written), ("full copies", full)],
            size_text,
        ),
    )


def _times(figures: Figures) -> str:
    known = figures.known
    charts = []
    for name, title, note, text in (
        ("stalled_seconds", "Stall", "How long a save held training.", _ms),
        ("saved_seconds", "Save", "From its begin to the commit, in the background.", _seconds),
        ("chain", "Chain", "Versions that a restore reads.", lambda value: f"{value:,.0f}"),
    ):
        values = [facts[name] for facts in known]
        if any(value is not None for value in values):
            steps = [facts["step"] for facts in known]
            charts.append(bars(title, note, steps, values, text, least=TICKS if name == "chain" else 0))
    return _section("Time and chains", *charts)


def _tables(figures: Figures) -> str:
    """The share of each table's rows that each version holds, as a map."""
    tables = figures.tables[:MAX_STRIPS]
    if not tables:
        return ""
    steps = [facts["step"] for facts in figures.known]
    rows = [
        f"<div>{short(table.name)}<small>{table.rows:,} × {table.dim:,}, {short(table.codec)}, "
        f"{size_text(table.bytes)}</small></div>"
        f"{strip(table.name, steps, table.shares, _STRIP_COLUMNS)}<div>{_percent(table.shares[-1])}</div>"
        for table in tables
    ]
    more = figures.table_count - len(tables)
    note = (
        "The share of a table's rows that each version holds, and that of the newest version. Bytes count all versions."
        + (f" {more:,} more tables take less." if more else "")
    )
    return _section(
        "Changed rows by table",
        f'<figure><figcaption><p>{note}</p></figcaption><p class="legend"><span><i class="faint"></i>few</span>'
        f'<span><i class="a"></i>all</span></p><div class="map">{"".join(rows)}<div></div>{step_axis(steps)}'
        "<div></div></div></figure>",
    )


def _restores(figures: Figures) -> str:
    """What a restore of each version reads, and how long that of the newest one may take."""
    known = [facts for facts in figures.known if facts["restore_bytes"] is not None]
    if not known:
        return ""
    reads = known[-1]["restore_bytes"]
    times = " and ".join(f"{_ms(reads / pace)} at {size_text(pace)}/s" for pace in _PACES)
    note = f"That of step {known[-1]['step']:,} takes about {times}."
    steps, values = [facts["step"] for facts in known], [facts["restore_bytes"] for facts in known]
    return _section("Restore", bars("Bytes that a restore reads", note, steps, values, size_text))


def _decisions(decisions: Sequence[Decisions]) -> str:
    if not decisions:
        return ""
    shown = decisions[-MAX_DECISIONS:][::-1]
    rows = [
        (
            f"{each.first_step:,}" if each.versions == 1 else f"{each.first_step:,} to {each.last_step:,}",
            f"{each.versions:,}",
            escape(each.kind),
            short(f"{each.policy}: {each.reason}" if each.policy else each.reason),
            each.width and short(each.width),
            each.whole and short(each.whole),
        )
        for each in shown
    ]
    names = ("steps", "versions", "kind", "policy and reason", "width", "whole tables")
    filled = [at for at in range(len(names)) if any(row[at] for row in rows)]
    return _section(
        "Decisions",
        _table([names[at] for at in filled], [[row[at] for at in filled] for row in rows]),
        _more(len(decisions), len(shown)),
    )


def _versions(figures: Figures) -> str:
    shown = figures.versions[-MAX_VERSIONS:][::-1]
    names = (
        "step",
        "kind",
        "rows",
        "size",
        "of full",
        "chain",
        "stall",
        "saved",
        "metadata",
        "tags",
        "health",
    )
    return _section("Versions", _table(names, map(_cells, shown)), _more(len(figures.versions), len(shown)))


def _cells(facts: Facts) -> Iterable[str]:
    if facts["damaged"] is not None:
        return (short(facts["id"]), *[""] * 9, '<span class="bad">damaged</span>')
    state = health(facts)
    share = facts["rows"] / facts["table_rows"] if facts["table_rows"] else None
    of_full = facts["bytes"] / facts["full_bytes"] if facts["full_bytes"] else None
    return (
        f"{facts['step']:,}",
        escape(facts["kind"]),
        f"{facts['rows']:,} ({_percent(share)})",
        size_text(facts["bytes"]),
        _percent(of_full),
        f"{facts['chain']:,}",
        "" if facts["stalled_seconds"] is None else _ms(facts["stalled_seconds"]),
        "" if facts["saved_seconds"] is None else _seconds(facts["saved_seconds"]),
        short(metadata_text(facts["metadata"])),
        short(names_text(facts)),
        state if state == UNREAD else f'<span class="bad">{escape(state)}</span>',
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML already; one too wide for the page scrolls by itself."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _more(count: int, shown: int) -> str:
    return f'<p class="note">The newest {shown:,} of {count:,}.</p>' if count > shown else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{_number(100 * share)} %"


def _ms(seconds: float) -> str:
    return f"{_number(1000 * seconds)} ms" if seconds < 1 else _seconds(seconds)


def _seconds(seconds: float) -> str:
    return f"{_number(seconds)} s"


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 99.95 else f"{value:,.0f}"
