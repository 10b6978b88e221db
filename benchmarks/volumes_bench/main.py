"""The command: measures, prints and writes JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.codec_bench.machine import describe
from benchmarks.codec_bench.movielens import DemoDataError, find_data, load_features
from benchmarks.volumes_bench.ledger import PARTS
from benchmarks.volumes_bench.runs import Full, Line, Setting, full_sizes, measure
from benchmarks.volumes_bench.workloads import MovieLens, Synthetic, Workload
from cnr_store.policies.policy import POLICIES
from cnr_store.training.model.tables import find_tables

_RESULTS = Path(__file__).parents[1] / "results"
_WIDTHS = (32, 8, 4, 3, 2)
_SOME_WIDTHS = (8, 4, 2)
_ROWS = (80_000, 40_000, 20_000, 10_000)
_INTERVALS = 12
_SHORT_CHAIN = 3
"""Short enough to fold within a few saves: what folds write stands in the column "folds"."""

_RATING_INTERVALS = 15
_HEAD = (
    f"  {'policy':27} {'bits':>4} | {'written MB':>10} {'of torch.save':>14} {'folds':>6} | {'all kept':>8} {'':>6} | "
    f"{'last kept':>9} {'':>6} | {'peak':>6} {'':>6}"
)

Make = Callable[[], Workload]


def settings(policies: Sequence[str], widths: Sequence[int]) -> Iterator[Setting]:
    """Every policy at every width, ``auto`` also for a store that keeps one version; and the defaults."""
    for bits in widths:
        yield from (Setting(policy, bits) for policy in policies)
        yield Setting("auto", bits, keep_last=1)
        if "consecutive" in policies:
            yield Setting("consecutive", bits, max_chain=_SHORT_CHAIN)
    yield Setting("intermittent", "auto")


def run(name: str, make: Make, chosen: Sequence[Setting]) -> dict[str, Any]:
    """One workload: its full checkpoints, and a line a setting. One width at a time, for memory's sake."""
    found = make()
    tables = find_tables(found.model)
    rows = sum(table.rows for table in tables)
    full = full_sizes(found)
    print(
        f"{name}: {rows:,} rows in {len(tables)} tables, {found.intervals} saves; rows alone "
        f"{full.weights_bytes / 1e6:.1f} MB, torch.save {full.torch_save_bytes / 1e6:.1f} MB\n{_HEAD}"
    )
    lines: list[Line] = []
    for _, group in groupby(chosen, lambda setting: setting.bits):
        for line in measure(make(), list(group)):
            print(_show(line, full), flush=True)
            lines.append(line)
    return {
        "workload": name,
        "rows": rows,
        "tables": len(tables),
        **asdict(full),
        "lines": [line.to_json() | times_less(line, full) for line in lines],
    }


def times_less(line: Line, full: Full) -> dict[str, float | None]:
    """How many times `torch.save` at each save writes and keeps as much.

    With everything kept it keeps all its files; else one between saves, and two at the end of a save. Of weights,
    the bytes of their rows alone are compared.
    """
    one, saves = full.torch_save_bytes, len(line.written_bytes)
    kept, peak = line.mean_kept_bytes, line.peak_bytes
    return {
        "written_times_less": one / line.mean_written_bytes,
        "weights_written_times_less": saves * full.weights_bytes / line.parts_bytes["weights"],
        "all_kept_times_less": line.all_kept_bytes and saves * one / line.all_kept_bytes,
        "kept_times_less": kept and one / kept,
        "peak_times_less": peak and 2 * one / peak,
    }


def _show(line: Line, full: Full) -> str:
    less = times_less(line, full)

    def pair(value: float | None, factor: float | None, width: int) -> str:
        if value is None or factor is None:
            return f"{'':{width}} {'':6}"
        return f"{value / 1e6:{width}.2f} {factor:5.1f}x"

    return (
        f"  {line.policy:27} {line.bits!s:>4} |"
        f" {line.mean_written_bytes / 1e6:10.2f} {less['written_times_less']:13.1f}x"
        f" {line.parts_bytes['folds'] / sum(line.written_bytes):6.0%} |"
        f" {pair(line.all_kept_bytes, less['all_kept_times_less'], 8)} |"
        f" {pair(line.mean_kept_bytes, less['kept_times_less'], 9)} |"
        f" {pair(line.peak_bytes, less['peak_times_less'], 6)}   "
        f"rows alone {less['weights_written_times_less']:.1f}x; {_shares(line)}"
    )


def _shares(line: Line) -> str:
    total = sum(line.written_bytes)
    return ", ".join(
        f"{part} {line.parts_bytes[part] / total:.0%}" for part in PARTS if line.parts_bytes[part]
    )


def _workloads(quick: bool) -> Iterator[tuple[str, Make, list[Setting]]]:
    rows = tuple(count // 10 for count in _ROWS) if quick else _ROWS
    widths, intervals = ((4,), 4) if quick else (_WIDTHS, _INTERVALS)
    yield (
        "synthetic, SGD",
        partial(Synthetic, rows, intervals, rowwise=False),
        list(settings(POLICIES, widths)),
    )
    fewer = list(settings(("full", "intermittent", "auto"), (4,) if quick else _SOME_WIDTHS))
    yield "synthetic, one number a row beside it", partial(Synthetic, rows, intervals, rowwise=True), fewer
    try:
        features = load_features(find_data(say=print))
    except DemoDataError as error:
        print(f"MovieLens is left out: {error}")
        return
    ratings = partial(MovieLens, features, 4 if quick else _RATING_INTERVALS)
    chosen = list(settings(POLICIES, (4,) if quick else _SOME_WIDTHS))
    narrow = [Setting(policy, 4, state_bits=8) for policy in ("intermittent", "auto")]
    yield "MovieLens-100k, Adagrad", ratings, chosen + narrow


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description="Bytes written and kept by policy and width, beside torch.save."
    )
    parser.add_argument(
        "--quick", action="store_true", help="small tables, few settings: to see that it runs"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of volumes.json")
    options = parser.parse_args()
    found = [run(*workload) for workload in _workloads(options.quick)]
    options.out.mkdir(parents=True, exist_ok=True)
    document = json.dumps({**describe(), "workloads": found}, indent=1)
    (options.out / "volumes.json").write_text(document + "\n", encoding="utf-8")
    print(f"Results are in {options.out}")


if __name__ == "__main__":
    main()
