"""Draws bits a value by mean error, and log loss lost by bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmarks.relative_bench.targets import of
from benchmarks.relative_bench.volumes import WIDTHS

mpl.use("Agg")  # no display
from matplotlib import pyplot as plt  # reads the choice above

_LOSS_SETTINGS = ("adaptive 4", "lattice 0.5", "lattice 0.35", "lattice 0.2")


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Means of the seeds. Left: deltas at equal error, adaptive dashed. Right: what restores cost."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    found = [line for line in lines if line["part"] in ("volumes", "movielens")]
    for number, where in enumerate(sorted({line["where"] for line in found})):
        own = [line for line in found if line["where"] == where]
        errors = [np.mean([_by_width(line["mean_l2_errors"], width) for line in own]) for width in WIDTHS]
        for name, style in (("adaptive", "--"), ("as adaptive", "-")):
            bits = [
                np.mean([of(line, f"{name} {width}", "bits_a_value") for line in own]) for width in WIDTHS
            ]
            label = where if style == "-" else None
            left.plot(errors, bits, style, marker="o", color=f"C{number}", label=label)
    left.set(
        title="deltas; dashed: adaptive, solid: relative",
        xlabel="mean l2 error",
        ylabel="bits a value",
        xscale="log",
    )
    if found:
        left.legend(fontsize="small")
    lost = [line for line in lines if line["part"] == "losses"]
    counts = sorted({line["lines"][0]["restores"] for line in lost})
    for setting in _LOSS_SETTINGS if counts else ():
        means = [
            np.mean(
                [of(line, setting, "lost_percent") for line in lost if line["lines"][0]["restores"] == count]
            )
            for count in counts
        ]
        right.plot(counts, np.maximum(means, 1e-4), marker="o", label=setting)
    right.set(title="log loss lost, %", xlabel="restores in 12 intervals", yscale="log")
    if counts:
        right.legend(fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _by_width(errors: Mapping[Any, float], width: int) -> float:
    """JSON has made strings of the keys of those that were read again."""
    return errors[width] if width in errors else errors[str(width)]
