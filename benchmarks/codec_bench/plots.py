"""Draws errors by scheme and width, errors by the search's bins and ratio, and paces beside peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.codec_bench.errors import Curves, Search
from benchmarks.codec_bench.table import IN_CACHE, Line

mpl.use("Agg")  # no display
from matplotlib import pyplot as plt  # reads the choice above

_DIM = 64


def draw_errors(curves: Mapping[str, Curves], path: Path) -> None:
    """Mean l2 error by width, one panel a set of rows, one line a scheme."""
    figure, panels = _panels(len(curves))
    for panel, (name, lines) in zip(panels, curves.items(), strict=True):
        for scheme, points in lines.items():
            panel.plot([p.bits for p in points], [p.mean_l2_error for p in points], marker="o", label=scheme)
        panel.set(title=name, xlabel="bits", yscale="log")
    panels[0].set_ylabel("mean l2 error")
    panels[0].legend()
    _save(figure, path)


def draw_search(found: Mapping[int, Search], path: Path) -> None:
    """Mean l2 error of the greedy walk by bins and ratio, one panel a width; the default search as a line."""
    figure, panels = _panels(len(found))
    for panel, (bits, search) in zip(panels, found.items(), strict=True):
        for ratio, points in search.walks.items():
            panel.plot(list(points), list(points.values()), marker=".", label=f"ratio {ratio:g}")
        panel.axhline(search.default, color="black", linestyle="--", label="default search")
        panel.set(title=f"{bits} bits", xlabel="bins")
    panels[0].set_ylabel("mean l2 error")
    panels[0].legend(fontsize="small")
    _save(figure, path)


def draw_pace(lines: Sequence[Line], path: Path) -> None:
    """Encoding and decoding of normal rows in cache, all contenders."""
    chosen = [x for x in lines if (x.rows, x.dim, x.size) == ("normal", _DIM, IN_CACHE)]
    names = [f"{x.contender}, {x.bits} bits" for x in chosen]
    figure, panels = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    for panel, way in zip(panels, ("encode", "decode"), strict=True):
        colors = ["tab:blue" if x.contender.startswith("ours") else "tab:gray" for x in chosen]
        panel.barh(names, [getattr(x, f"{way}_gb_s") for x in chosen], color=colors)
        panel.set(title=f"{way}, normal rows of {_DIM}, one core", xlabel="GB/s", xscale="log")
    panels[0].invert_yaxis()
    _save(figure, path)


def _panels(count: int) -> tuple[Any, list[Any]]:
    """A figure with `count` panels, at most four in a line."""
    across = min(count, 4)
    down = -(-count // across)
    figure, grid = plt.subplots(
        down, across, figsize=(4 * across, 4 * down), layout="constrained", squeeze=False
    )
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
