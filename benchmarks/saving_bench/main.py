"""The command: measures, prints and writes JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

from benchmarks.codec_bench.machine import describe
from benchmarks.saving_bench import beyond, compared, pace, stall, thousand

_RESULTS = Path(__file__).parents[1] / "results"
_ROWS, _QUICK_ROWS = 1 << 19, 1 << 14
_TABLES, _QUICK_TABLES = 1000, 20
_BEYOND_ROWS = 312_500  # of each table: 320 MB
_COMPARED = 8, 1_000_000  # tables and the rows of each: 1 GB of weights
_PAIRS, _FULL_PAIRS = 5, 20


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description="How long a save holds training, and how fast training is while it is written."
    )
    parser.add_argument("--quick", action="store_true", help="small tables: to see that it runs")
    parser.add_argument("--full", action="store_true", help=f"{_FULL_PAIRS} pairs of paces: seven minutes")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of saving.json")
    options = parser.parse_args()
    rows, rounds, pairs = (_QUICK_ROWS, 2, 2) if options.quick else (_ROWS, 3, _PAIRS)
    if options.full:
        pairs = _FULL_PAIRS
    warnings.filterwarnings("ignore", "torch.distributed is disabled|Sparse invariant checks", UserWarning)
    print(stall.Line.HEAD)
    stalls = []
    for optimizer, tables in (("sgd", 4), ("adagrad", 1)):
        with tempfile.TemporaryDirectory(prefix="cnr-saving-") as folder:
            stalls += stall.measure(optimizer, tables, rows, rounds, Path(folder))
    print(beyond.Line.HEAD)
    with tempfile.TemporaryDirectory(prefix="cnr-saving-") as folder:
        without_room = beyond.measure(min(rows, _BEYOND_ROWS), 2 + rounds, Path(folder))
    print(compared.Line.HEAD)
    with tempfile.TemporaryDirectory(prefix="cnr-saving-") as folder:
        of_adam = compared.measure(*((2, rows) if options.quick else _COMPARED), rounds, Path(folder))
    print(pace.Line.HEAD)
    with tempfile.TemporaryDirectory(prefix="cnr-saving-") as folder:
        paces = pace.measure(4, rows, pairs, Path(folder))
    print(thousand.Line.HEAD)
    many = thousand.measure(_QUICK_TABLES if options.quick else _TABLES, rounds)
    targets = [
        *stall.targets(stalls),
        *beyond.targets(without_room),
        *compared.targets(of_adam),
        *pace.targets(paces),
        *thousand.targets(many),
    ]
    print(*targets, sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        **describe(),
        "stall": [asdict(line) for line in stalls],
        "beyond": [asdict(line) for line in without_room],
        "compared": [asdict(line) for line in of_adam],
        "pace": [asdict(line) for line in paces],
        "thousand": {
            "machine": describe()["machine"],
            "lines": [{**asdict(line), "commit_over_puts": line.ratio} for line in many],
        },
        "targets": [target.to_json() for target in targets],
    }
    (options.out / "saving.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"Results are in {options.out}")
