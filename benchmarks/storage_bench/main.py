"""The command: measures, prints and writes JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.codec_bench.machine import describe
from benchmarks.storage_bench import far, memory, restoring, saving

_RESULTS = Path(__file__).parents[1] / "results"
ROWS, QUICK_ROWS, DIM = 1_000_000, 50_000, 64


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description="Pace and memory of saving, restoring and upkeep, beside others."
    )
    parser.add_argument("--quick", action="store_true", help="a small table: to see that it runs")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of storage.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = QUICK_ROWS if options.quick else ROWS
    found: dict[str, Any] = {**describe(), "rows": rows, "dim": DIM}
    for part in (saving, restoring, far, memory):
        with tempfile.TemporaryDirectory() as folder:
            name = part.__name__.rpartition(".")[2]
            found[name] = part.measure(rows, DIM, Path(folder))
            _show(name, found[name])
    targets = [*saving.targets(found["saving"]), *restoring.targets(found["restoring"])]
    print(*targets, sep="\n")
    found["targets"] = [target.to_json() for target in targets]
    (options.out / "storage.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _show(title: str, figures: dict[str, Any]) -> None:
    print(title)
    for name, value in figures.items():
        print(f"  {name:48} {value if isinstance(value, str) else f'{value:,.3f}'}", flush=True)
