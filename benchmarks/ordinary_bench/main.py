"""The command: trains as most scripts do, saves by the defaults, and counts every byte, the first whole included."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.codec_bench.machine import describe
from benchmarks.codec_bench.movielens import DemoDataError, find_data, load_features
from benchmarks.codec_bench.targets import Target
from benchmarks.relative_bench.stores import Setting, adaptive, lattice, volumes
from benchmarks.relative_bench.trace import DenseMovieLens, DenseName, OptimizerName, Size, Training
from benchmarks.relative_bench.volumes import Make, times_less
from benchmarks.volumes_bench.runs import full_sizes

_RESULTS = Path(__file__).parents[1] / "results"
_ROWS, _QUICK_ROWS, _BATCH, _RATING_INTERVALS = 270_000, 9_000, 2_048, 15
# Steps of an interval, by the share of the rows that are looked up in it.
_STEPS = {"5 %": 3, "25 %": 25}
_DENSE: tuple[DenseName, ...] = ("Adam", "AdamW", "Adam, weight decay 1e-6", "momentum")
_SPARSE: dict[OptimizerName, float | None] = {"SGD": 0.005, "row-wise Adagrad": None, "Adagrad": None}
_SETTINGS = [
    Setting("defaults", policy="intermittent"),
    Setting("defaults, all versions kept"),
    Setting("defaults, policy auto", policy="auto"),
    Setting("defaults, whole", policy="full"),
    Setting("lattice 0.1, state auto, relative", lattice(0.1), "intermittent", "auto"),
    Setting("8 bits, exact state", adaptive(8), "intermittent"),
]
# Times less written than torch.save, by training, of "defaults" and of those that keep all versions; None: no aim.
_AIMS: dict[str, tuple[float, float | None]] = {
    **{f"{name}, 5 % looked up": (32.0, 60.0) for name in ("Adam", "AdamW")},
    **{f"{name}, 25 % looked up": (14.0, 22.0) for name in ("Adam", "AdamW")},
    "momentum, 5 % looked up": (65.0, None),
    "momentum, 25 % looked up": (29.0, None),
    "SGD, sparse, 21 % changed": (14.0, None),
    "row-wise Adagrad, sparse, 21 % changed": (13.0, None),
    "Adagrad, sparse, 21 % changed": (12.0, None),
}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Bytes that ordinary scripts write at the defaults.")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROWS:,} rows: to see that it runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of ordinary.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    rows, lines = (_QUICK_ROWS if options.quick else _ROWS), list[dict[str, Any]]()
    for seed in options.seeds:
        for name, make in _trainings(rows, seed, options.quick):
            for line in _measured(make):
                print(
                    f"{name}, seed {seed}: {line['setting']}: {line['written_times_less']:.2f}x written, "
                    f"{line['kept_times_less']:.2f}x kept",
                    flush=True,
                )
                lines.append({"training": name, "seed": seed, **line})
    found = list(targets(lines))
    print(*found, sep="\n")
    document = {
        **describe(),
        "rows": rows,
        "lines": lines,
        "targets": [target.to_json() for target in found],
    }
    (options.out / "ordinary.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _trainings(rows: int, seed: int, quick: bool) -> Iterator[tuple[str, Make]]:
    """Names and trainings, which are saved after each interval."""
    batch = round(_BATCH * rows / _ROWS)
    for name in _DENSE[:1] if quick else _DENSE:
        for share, steps in _STEPS.items():
            size = Size(rows, steps * batch, batch)
            yield f"{name}, {share} looked up", partial(Training, size, name, seed)
    few = rows // 10  # 21 % of the rows change in an interval, 59 % in twelve
    for sparse, rate in _SPARSE.items():
        size = Size(few, round(few * 24 / 27), 128, exponent=1.5, rate=rate)
        yield f"{sparse}, sparse, 21 % changed", partial(Training, size, sparse, seed)
    try:
        features = load_features(find_data(say=print))
    except DemoDataError as error:
        print(f"MovieLens is left out: {error}")
        return
    for name in _DENSE[:1] if quick else _DENSE:
        yield f"MovieLens, {name}", partial(DenseMovieLens, features, _RATING_INTERVALS, seed, name)


def _measured(make: Make) -> list[dict[str, Any]]:
    one = full_sizes(make()).torch_save_bytes
    return [times_less(each, one) for each in volumes(make(), _SETTINGS, first=False)]


def targets(lines: Sequence[Mapping[str, Any]]) -> Iterator[Target]:
    """What the defaults should reach: the mean of all seeds."""
    for training, aims in _AIMS.items():
        for setting, least in zip(("defaults", "defaults, all versions kept"), aims, strict=True):
            found = [
                line["written_times_less"]
                for line in lines
                if (line["training"], line["setting"]) == (training, setting)
            ]
            if found and least is not None:
                where = f"{setting}; {len(found)} seeds, ± {np.std(found):.2g}"
                yield Target(
                    f"ordinary: times less than torch.save, {training}", least, float(np.mean(found)), where
                )
