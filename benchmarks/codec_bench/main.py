"""The command: measures, prints, writes JSON and draws."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.codec_bench import errors, plots, scaling, table, targets
from benchmarks.codec_bench.machine import describe, pinned
from benchmarks.codec_bench.rows import Rows, trained
from benchmarks.codec_bench.sizes import FULL, QUICK, Sizes

_RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description="Pace and error of the codecs, beside torch and scikit-learn."
    )
    parser.add_argument("--plots", action="store_true", help="only draw errors, without timing anything")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of codecs.json and the plots")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run(QUICK if options.quick else FULL, options.out, timed=not options.plots)


def run(sizes: Sizes, out: Path, timed: bool) -> None:
    """Everything, or errors alone."""
    tables, missing = trained(sizes.training_epochs)
    if missing:
        print(f"Tables trained on MovieLens are left out: {missing}")
    if timed:
        _write(out / "codecs.json", {**describe(), "left_out": missing, **_timed(sizes, tables, out)})
    curves, search = errors.by_scheme(sizes, tables), errors.by_search(sizes)
    _write(out / "codecs-errors.json", {**describe(), **errors.to_json(curves, search)})
    plots.draw_errors(curves, out / "codecs-errors.png")
    plots.draw_search(search, out / "codecs-search.png")
    print(f"Results and plots are in {out}")


def _timed(sizes: Sizes, tables: dict[str, Rows], out: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    lines = []
    print("Every call makes the memory that it fills, ours and the peers'.")
    print(table.HEAD)
    with pinned(1):
        for line in table.measure(sizes, tables):
            print(table.show(line), flush=True)
            lines.append(line)
        zarr_shares = scaling.through_zarr(sizes)
    threads = scaling.two_threads(sizes)
    if threads is None:
        print("Two threads are left out: there is one core.")
    found = [*targets.against_peers(lines), *targets.of_scaling(zarr_shares, threads)]
    print(*found, sep="\n")
    plots.draw_pace(lines, out / "codecs-pace.png")
    return {
        "lines": [line.to_json() for line in lines],
        "through_zarr": {name: asdict(share) for name, share in zarr_shares.items()},
        "two_threads": threads,
        "targets": [target.to_json() for target in found],
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
