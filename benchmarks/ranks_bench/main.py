"""The command: counts and times saves, prints, and writes JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.codec_bench.machine import describe
from benchmarks.ranks_bench import scaling, timing

_RESULTS = Path(__file__).parents[1] / "results"
_BYTES, _QUICK_BYTES = 1e13, 1e9
_EVERY = 100


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description="What a save of many ranks sends and stores, counted; and how long one of 1 and 2 ranks takes."
    )
    parser.add_argument("--quick", action="store_true", help="small tables: to see that it runs")
    parser.add_argument(
        "--only", choices=("counts", "times"), help="one part of it; the other one stays as it is"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of ranks.json")
    options = parser.parse_args()
    path = options.out / "ranks.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if options.only != "times":
        document["counts"] = _count(options.quick)
    if options.only != "counts":
        document["times"] = {**describe(), **timing.measure(options.quick)}
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"Results are in {path}")


def _count(quick: bool) -> dict[str, Any]:
    model = scaling.big_model(_QUICK_BYTES if quick else _BYTES, _EVERY)
    runs = []
    for world in scaling.WORLDS[:3] if quick else scaling.WORLDS:
        runs.append(scaling.summary(world, model, scaling.record(world, model)))
        print(json.dumps(runs[-1]), flush=True)
    targets = list(scaling.targets(runs))
    print(*targets, sep="\n")
    return {
        "runs": runs,
        "exponents": scaling.exponents(runs),
        "targets": [target.to_json() for target in targets],
    }
