"""Errors for the plots: by scheme and width, and by bins and ratio of the greedy walk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.codec_bench.rows import DRAWS, Rows, drawn
from benchmarks.codec_bench.sizes import Sizes
from cnr_codecs import UniformRows, error_report
from cnr_codecs.report import BINS_LADDER

DIM = 64
SEARCHED_BITS = (2, 3, 4)
RATIOS = (0.1, 0.2, 0.3, 0.5, 1.0)


@dataclass(frozen=True)
class Point:
    """One width of one scheme."""

    bits: int
    row_bytes: float
    mean_l2_error: float
    mean_relative_error: float


Curves = dict[str, list[Point]]


@dataclass(frozen=True)
class Search:
    """Mean l2 error at one width: of walks, by ratio and then bins, and of the default search."""

    walks: dict[float, dict[int, float]]
    default: float


def by_scheme(sizes: Sizes, tables: dict[str, Rows]) -> dict[str, Curves]:
    """For each set of rows, each scheme's error by width."""
    sets = {name: drawn(name, sizes.error_rows, DIM) for name in DRAWS} | tables
    return {name: _curves(rows[: sizes.error_rows]) for name, rows in sets.items()}


def _curves(rows: Rows) -> Curves:
    curves: Curves = {}
    for report in error_report(rows):
        if "bits" not in report.config:
            continue
        label = str(report.config.get("scheme") or f"k-means, {report.config['group']}")
        point = Point(
            report.config["bits"], report.row_bytes, report.mean_l2_error, report.mean_relative_error
        )
        curves.setdefault(label, []).append(point)
    return curves


def by_search(sizes: Sizes) -> dict[int, Search]:
    """For normal rows and each searched width, the walk's error by ratio and bins."""
    rows = drawn("normal", sizes.error_rows, DIM)
    return {bits: _search(rows, bits) for bits in SEARCHED_BITS}


def _search(rows: Rows, bits: int) -> Search:
    codecs = [UniformRows("adaptive", bits, bins, ratio) for ratio in RATIOS for bins in BINS_LADDER]
    reports = error_report(rows, codecs=[UniformRows("adaptive", bits), *codecs])
    errors = iter(report.mean_l2_error for report in reports)
    default = next(errors)
    return Search({ratio: {bins: next(errors) for bins in BINS_LADDER} for ratio in RATIOS}, default)


def to_json(curves: dict[str, Curves], search: dict[int, Search]) -> dict[str, Any]:
    """Both, as plain JSON."""
    return {
        "by_scheme": {
            name: {scheme: [asdict(point) for point in points] for scheme, points in lines.items()}
            for name, lines in curves.items()
        },
        "by_search": {str(bits): asdict(found) for bits, found in search.items()},
    }
