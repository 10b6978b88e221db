"""The command: measures parts of the benchmark, and joins them to those on record."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.codec_bench.machine import describe
from benchmarks.codec_bench.movielens import DemoDataError, Features, find_data, load_features
from benchmarks.codec_bench.targets import Target
from benchmarks.relative_bench import budget, exact, links, losses, volumes
from benchmarks.relative_bench.plot import draw
from benchmarks.relative_bench.targets import targets
from benchmarks.relative_bench.trace import OptimizerName, Size, Training
from benchmarks.volumes_bench.runs import full_sizes
from benchmarks.volumes_bench.workloads import MovieLens

_RESULTS = Path(__file__).parents[1] / "results"
_NAME = "relative"
_OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
_PARTS = ("volumes", "losses", "counted", "movielens", "exact", "parents", "budget", "links")
_QUICK_ROWS, _ROWS, _FULL_ROWS, _COUNTED_ROWS = 9_000, 27_000, 270_000, 27_000
_SAMPLES_A_ROW = 4 / 27
_RATING_INTERVALS = 15
_FEW_LINKS_ROWS, _LINKS_ROWS = 200_000, 1_000_000


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Relative codes on trainings: bytes, losses and reads.")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROWS:,} rows: to see that it runs")
    parser.add_argument(
        "--full", action="store_true", help=f"{_FULL_ROWS:,} rows, three seeds, all restores; hours"
    )
    parser.add_argument("--rows", type=int, help=f"of the generated table, {_ROWS:,} by default")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--parts", nargs="*", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--restores", type=int, nargs="+")
    parser.add_argument("--join", type=Path, nargs="*", default=[], help="folders whose results to add")
    parser.add_argument("--out", type=Path, default=_RESULTS, help=f"folder of {_NAME}.json")
    options = parser.parse_args()
    options.rows = options.rows or (_FULL_ROWS if options.full else _QUICK_ROWS if options.quick else _ROWS)
    options.seeds = options.seeds or ([1, 2, 3] if options.full else [1])
    options.restores = options.restores or (list(losses.RESTORES) if options.full else [5])
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{_NAME}.json"
    lines = [line for folder in options.join for line in _on_record(folder)]
    for part in options.parts:
        for line in _measured(part, options):
            lines.append(line)
            _write(lines, path)  # a run that is cut short has what it measured
    for target in _write(lines, path):
        print(target)
    print(f"Results are in {options.out}")


def _on_record(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"{_NAME}.json").read_text(encoding="utf-8"))["lines"]
    return found


def _write(lines: list[dict[str, Any]], path: Path) -> list[Target]:
    """Write the newest line of each training and seed, and what they come to."""
    newest = {(line["part"], line["where"], line["seed"]): line for line in lines}
    ordered = [newest[key] for key in sorted(newest, key=lambda key: (_PARTS.index(key[0]), *key[1:]))]
    found = list(targets(ordered))
    document = {**describe(), "lines": ordered, "targets": [target.to_json() for target in found]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(ordered, path.with_suffix(".png"))
    return found


def _measured(part: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of a part, one a training and seed."""
    for seed in options.seeds:
        for where, found in _PART[part](seed, options):
            line = {
                "part": part,
                "where": where,
                "seed": seed,
                "measured": f"{datetime.now(UTC):%Y-%m-%d}",
                **found,
            }
            _show(line)
            yield line


def _size(rows: int) -> Size:
    """Samples and batches in proportion to rows, so that a row is trained alike."""
    return Size(rows, round(rows * _SAMPLES_A_ROW), batch=round(512 * rows / _FULL_ROWS))


def _volumes(seed: int, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    size = _size(options.rows)
    for optimizer in _OPTIMIZERS:
        make = partial(Training, size, optimizer, seed)
        found = volumes.at_equal_error(make, has_state=optimizer != "SGD")
        yield f"Zipf 1.05, {optimizer}", {"rows": options.rows, **found}


def _losses(seed: int, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    size = _size(options.rows)
    training = Training(size, "Adagrad", seed)
    for restores in options.restores:
        found = list(losses.lost(training, losses.SCHEMES, restores))
        yield f"Zipf 1.05, Adagrad, {restores} restores", {"rows": options.rows, "lines": found}


def _counted(seed: int, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    # 21 % of the rows change in an interval, 59 % in twelve.
    samples = round(_COUNTED_ROWS * 24 / 27)
    settings: list[tuple[OptimizerName, float, int | str]] = [
        ("SGD", 0.005, 32),
        ("row-wise Adagrad", 0.04, volumes.STATE),
    ]
    for optimizer, rate, state_bits in settings:
        size = Size(_COUNTED_ROWS, samples, batch=128, exponent=1.5, rate=rate)
        make = partial(Training, size, optimizer, seed)
        full = full_sizes(make())
        found = volumes.counted(make, full.torch_save_bytes, state_bits=state_bits)
        lost = list(losses.lost(make(), losses.COARSE, 1)) if optimizer == "SGD" else []
        yield f"Zipf 1.5, {optimizer}", {"rows": size.rows, "lines": found, "losses": lost}


def _ratings() -> Features | None:
    try:
        return load_features(find_data(say=print))
    except DemoDataError as error:
        print(f"MovieLens is left out: {error}")
        return None


def _budget(seed: int, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    rows, counts = min(options.rows, _ROWS), budget.RESTORES if options.full else options.restores
    for name, make in budget.trainings(rows, seed, _ratings()):
        yield name, {"rows": rows, "lines": list(budget.lost(make, counts))}


def _movielens(seed: int, _: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    if (features := _ratings()) is None:
        return
    found = volumes.at_equal_error(
        partial(MovieLens, features, _RATING_INTERVALS, seed), first=False, has_state=True
    )
    yield (
        "MovieLens, Adagrad",
        {"torch_save_bytes": _torch_save(features), "saves": _RATING_INTERVALS, **found},
    )


def _torch_save(features: Features) -> int:
    return full_sizes(MovieLens(features, _RATING_INTERVALS)).torch_save_bytes


def _exact(seed: int, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    for optimizer in _OPTIMIZERS:
        lines = list(exact.times_fewer(_size(options.rows), optimizer, seed))
        yield f"Zipf 1.05, {optimizer}", {"rows": options.rows, "lines": lines}


def _parents(seed: int, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    for optimizer in _OPTIMIZERS:
        lines = list(exact.saved(_size(options.rows), optimizer, seed))
        yield f"Zipf 1.05, {optimizer}", {"rows": options.rows, "lines": lines}


def _links(seed: int, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = _LINKS_ROWS if options.rows > _ROWS else _FEW_LINKS_ROWS
    yield "ten rows, 8 deltas", {"lines": links.few_rows(rows, seed)}
    yield "restores", {"lines": links.restores(rows, seed)}


_PART = {
    "volumes": _volumes,
    "losses": _losses,
    "counted": _counted,
    "movielens": _movielens,
    "exact": _exact,
    "parents": _parents,
    "budget": _budget,
    "links": _links,
}


def _show(line: dict[str, Any]) -> None:
    print(f"{line['part']}: {line['where']}, seed {line['seed']}")
    for each in [*line["lines"], *line.get("coders", ())]:
        cells = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in each.items()
            if value is not None
        )
        print("  " + ", ".join(cells), flush=True)
