"""Drawings as SVG: boxes, arrows and text, light and dark by what the reader's system asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_LIGHT = {"page": "#fdfdfb", "card": "#ffffff", "ink": "#1d1d1b", "soft": "#63635e", "line": "#b9b9b2"}
_LIGHT |= {"a": "#2a6fc9", "b": "#c8690b", "bad": "#b3261e", "good": "#2c7a3f"}
_DARK = {"page": "#1a1a19", "card": "#262624", "ink": "#ecece8", "soft": "#a8a8a1", "line": "#5a5a54"}
_DARK |= {"a": "#6ea8f0", "b": "#e79a4b", "bad": "#f2938c", "good": "#7cc98f"}
_TONES = ("a", "b", "bad", "good")
LINE_HEIGHT = 17
Point = tuple[float, float]


def _rules(colours: dict[str, str]) -> str:
    """What is drawn in which colour."""
    rules = [
        f".page{{fill:{colours['page']};stroke:{colours['line']}}}",
        f"text{{fill:{colours['ink']}}}.soft{{fill:{colours['soft']}}}",
        f".under{{fill:{colours['card']}}}",
        f".card{{fill:{colours['card']};stroke:{colours['line']}}}",
        f".line{{stroke:{colours['soft']}}}.head{{fill:{colours['soft']}}}.rule{{stroke:{colours['line']}}}",
    ]
    for tone in _TONES:
        colour = colours[tone]
        rules.append(
            f".{tone}{{fill:{colour};fill-opacity:.16;stroke:{colour}}}.{tone}-full{{fill:{colour}}}"
            f".{tone}-line{{stroke:{colour}}}.{tone}-head{{fill:{colour}}}text.{tone}-text{{fill:{colour}}}"
        )
    return "".join(rules)


_STYLE = (
    "text{font:13px system-ui,'Segoe UI',Roboto,sans-serif}.title{font-weight:600;font-size:15px}.small{font-size:11px}"
    ".bold{font-weight:600}.mono{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}"
    ".line,[class$=-line]{fill:none;stroke-width:1.6}.dashed{stroke-dasharray:5 4}.rule{fill:none}"
    f"{_rules(_LIGHT)}@media (prefers-color-scheme:dark){{{_rules(_DARK)}}}"
)


class Drawing:
    """A picture of this size, drawn from the back to the front.

    Parameters
    ----------
    width, height
        In pixels.
    title, told
        What it is, and what it shows, for those who can't see it.
    """

    def __init__(self, width: int, height: int, title: str, told: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img"><title>{escape(title)}</title><desc>{escape(told)}</desc><style>{_STYLE}</style>',
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        ]

    def svg(self) -> str:
        """The picture."""
        return "\n".join([*self._parts, "</svg>\n"])

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text whose letters stand at `y`."""
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def lines(self, x: float, y: float, texts: Iterable[str], kind: str = "", anchor: str = "start") -> None:
        """Lines of text, one below the other."""
        for at, text in enumerate(texts):
            self.text(x, y + at * LINE_HEIGHT, text, kind, anchor)

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str = "card", rx: float = 4
    ) -> None:
        """A box without a word. What is beneath does not show through."""
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rx:g}"'
        if kind != "card":
            self._parts.append(f'<rect class="under" {shape}/>')
        self._parts.append(f'<rect class="{kind}" {shape}/>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        texts: Sequence[str],
        kind: str = "card",
        font: str = "",
    ) -> None:
        """A box with lines of text in its middle."""
        self.rect(x, y, width, height, kind)
        first = y + height / 2 + 4.5 - (len(texts) - 1) * LINE_HEIGHT / 2
        self.lines(x + width / 2, first, texts, font, "middle")

    def line(self, points: Sequence[Point], kind: str = "line") -> None:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def arrow(self, points: Sequence[Point], tone: str = "") -> None:
        """A line through points, with a head at its end; its last part is level or upright."""
        prefix = f"{tone}-" if tone else ""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        neck = (x1 - 7 * dx, y1 - 7 * dy)
        self.line([*points[:-1], neck], f"{prefix}line")
        wings = ((neck[0] + 4 * dy, neck[1] + 4 * dx), (neck[0] - 4 * dy, neck[1] - 4 * dx))
        path = " ".join(f"{x:g},{y:g}" for x, y in ((x1, y1), *wings))
        self._parts.append(f'<polygon class="{prefix}head" points="{path}"/>')

    def dot(self, x: float, y: float, kind: str, radius: float = 3.5) -> None:
        """A point."""
        self._parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')
