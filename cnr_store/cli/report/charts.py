"""Charts as SVG inside HTML. Each takes a bounded number of marks, however many versions there are.

The drawing stretches with the page, so all text stands beside it. Every text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

MAX_COLUMNS = 240
"""Bars of a chart, or points of a line."""
_WIDTH, _HEIGHT = 1000, 200
TICKS = 4

Values = Sequence[float | None]
ToText = Callable[[float], str]


def bars(
    title: str,
    note: str,
    steps: Sequence[int],
    values: Values,
    text: ToText,
    marked: Sequence[bool] = (),
    least: float = 0,
) -> str:
    """A chart of one bar a version, or of the highest one of some, if there are many.

    Parameters
    ----------
    title, note
        What it shows, and what else to know.
    steps, values
        Of the versions; without a value there is no bar.
    text
        A value for people.
    marked
        Versions whose bars have the second colour.
    least
        What the axis shows at least.
    """
    parts = list(spans(len(steps), MAX_COLUMNS))
    known = [value for value in values if value is not None]
    top = _top(max(known, default=0), least)
    width = _WIDTH / len(parts)
    marks = []
    for at, span in enumerate(parts):
        held = [(values[i], i) for i in span if values[i] is not None]
        if not held:
            continue
        value, number = max(held, key=lambda each: each[0] or 0)
        height = _HEIGHT * (value or 0) / top
        kind = "b" if marked and marked[number] else "a"
        marks.append(
            f'<rect class="{kind}" x="{at * width + width * 0.08:.2f}" y="{_HEIGHT - height:.2f}" '
            f'width="{width * 0.84:.2f}" height="{max(height, 0.6):.2f}"><title>{_place(steps, span)}: '
            f"{escape(text(value or 0))}</title></rect>"
        )
    if len(steps) > len(parts):
        note = f"{note} Each bar is the highest of some {round(len(steps) / len(parts))} versions."
    return _figure(title, note, "".join(marks), steps, top, text)


def lines(
    title: str, note: str, steps: Sequence[int], series: Sequence[tuple[str, Sequence[float]]], text: ToText
) -> str:
    """A chart of lines over the versions; the area beneath the first one is filled."""
    parts = list(spans(len(steps), MAX_COLUMNS))
    top = _top(max((value for _, values in series for value in values), default=0))
    marks, names = [], []
    for kind, (name, values) in zip("ab", series, strict=False):
        ends = [values[span[-1]] for span in parts]
        across = _WIDTH / max(1, len(ends) - 1)
        points = [(at * across, _HEIGHT - _HEIGHT * value / top) for at, value in enumerate(ends)]
        points = points if len(points) > 1 else [points[0], (_WIDTH, points[0][1])]
        path = " L".join(f"{x:.2f} {y:.2f}" for x, y in points)
        if kind == "a":
            marks.append(f'<path class="area" d="M0 {_HEIGHT} L{path} L{_WIDTH} {_HEIGHT}Z"/>')
        marks.append(f'<path class="line {kind}" d="M{path}"><title>{escape(name)}</title></path>')
        names.append(f'<span><i class="{kind}"></i>{escape(name)}: {escape(text(values[-1]))}</span>')
    legend = f'<p class="legend">{"".join(names)}</p>'
    return _figure(title, note, "".join(marks), steps, top, text, legend)


def strip(name: str, steps: Sequence[int], shares: Values, columns: int) -> str:
    """One line of a map: the largest share of each column as an opacity, its square root, so that small ones show."""
    parts = list(spans(len(shares), columns))
    marks = []
    for at, span in enumerate(parts):
        held = [share for i in span if (share := shares[i]) is not None]
        if held:
            share = min(1.0, max(held))
            marks.append(
                f'<rect x="{at}" width="1" height="1" fill-opacity="{max(0.03, math.sqrt(share)):.2f}">'
                f"<title>{_place(steps, span)}: {100 * share:.3g} %</title></rect>"
            )
    label = escape(f"rows of {name} by version", quote=True)
    return (
        f'<svg class="strip" viewBox="0 0 {len(parts)} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{"".join(marks)}</svg>'
    )


def step_axis(steps: Sequence[int]) -> str:
    """The first, the middle and the last step, the middle one beneath its version."""
    middle = len(steps) // 2
    shown = [f"<span>{step:,}</span>" for step in (steps[0], steps[-1])[: len(steps)]]
    if len(steps) > 2:
        place = 100 * (middle + 0.5) / len(steps)
        shown.insert(1, f'<span style="left:{place:.2f}%">{steps[middle]:,}</span>')
    return f'<div class="steps">{"".join(shown)}</div>'


def _figure(
    title: str, note: str, marks: str, steps: Sequence[int], top: float, text: ToText, legend: str = ""
) -> str:
    grid = "".join(
        f'<path class="grid" d="M0 {_HEIGHT * at / TICKS:g}H{_WIDTH}"/>' for at in range(TICKS + 1)
    )
    labels = "".join(f"<span>{escape(text(top * at / TICKS))}</span>" for at in range(TICKS, -1, -1))
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>{legend}"
        f'<div class="plot"><div class="values">{labels}</div>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title, quote=True)}">{grid}{marks}</svg>{step_axis(steps)}</div></figure>'
    )


def spans(count: int, most: int) -> Iterator[range]:
    """At most so many ranges of versions after one another, which hold all of them."""
    columns = min(count, most)
    for at in range(columns):
        yield range(at * count // columns, (at + 1) * count // columns)


def _place(steps: Sequence[int], span: range) -> str:
    first, last = steps[span[0]], steps[span[-1]]
    return f"step {first:,}" if len(span) == 1 else f"steps {first:,} to {last:,}"


def _top(value: float, least: float = 0) -> float:
    """The end of an axis: the next of 1, 2, 4, 6, 8 times a power of ten, of which a quarter is a round number."""
    value = max(value, least)
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * each for each in (1, 2, 4, 6, 8, 10) if power * each >= value * (1 - 1e-9))
