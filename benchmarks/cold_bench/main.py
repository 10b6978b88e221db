"""The command: starts processes with and without compiled kernels, in turns, prints and writes JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.codec_bench.machine import describe
from benchmarks.codec_bench.targets import Target

_RESULTS = Path(__file__).parents[1] / "results"
_ROWS, _QUICK_ROWS = 1 << 17, 1 << 14
_FULL_ROWS = 1 << 19
_MOST_COMPILING, _MOST_FIRST_ROW, _MOST_STALL = 4.0, 2.0, 1.5
# Saves at once, while kernels are being compiled, and later.
_AFTER_SECONDS = (0.0, 10.0)
_ROUNDS, _FULL_ROUNDS = 2, 5
Found = dict[str, float]


@dataclass(frozen=True)
class Line:
    """Medians of one figure in processes that find no compiled kernel (cold), and in others; and of the peer."""

    figure: str
    cold_seconds: float
    warm_seconds: float
    peer_seconds: float

    HEAD = "figure                                          cold ms   warm ms   cold/warm   torch ms"

    def show(self) -> str:
        return (
            f"{self.figure:44} {self.cold_seconds * 1e3:10.1f} {self.warm_seconds * 1e3:9.1f} {self.ratio:11.2f} "
            f"{self.peer_seconds * 1e3:10.1f}"
        )

    @property
    def ratio(self) -> float:
        return self.cold_seconds / self.warm_seconds


class Jobs:
    """Processes over one folder, each with the compiled kernels of those before it, or with an empty home."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._folder, self._rows = folder, rows
        self.compiling: list[float] = []

    def warm_up(self) -> None:
        """Have kernels compiled for the warm jobs: one that closes at once leaves those that it did not need."""
        self._run("save", "warm", _AFTER_SECONDS[-1])
        self._run("load", "warm", 0.0)

    def pair(self, what: str, seconds: float = 0.0) -> tuple[Found, Found]:
        """What a cold job and a warm one find."""
        shutil.rmtree(self._folder / "cold", ignore_errors=True)
        cold, warm = self._run(what, "cold", seconds), self._run(what, "warm", seconds)
        return cold, warm

    def _run(self, what: str, home: str, seconds: float) -> Found:
        place = self._folder / home
        place.mkdir(exist_ok=True)
        if what == "save":
            shutil.rmtree(self._folder / "store", ignore_errors=True)
        job = [sys.executable, "-m", "benchmarks.cold_bench.job", what, str(self._folder), str(self._rows)]
        done = subprocess.run(
            [*job, str(seconds)],
            env={**os.environ, "HOME": str(place), "NUMBA_CACHE_DIR": str(place / "kernels")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found: Found = json.loads(done.stdout.splitlines()[-1])
        return found


def measure(folder: Path, rows: int, rounds: int, pauses: tuple[float, ...]) -> tuple[list[Line], float]:
    """The lines, and the median of the processor's seconds that compiling takes before a load and a save."""
    jobs = Jobs(folder, rows)
    jobs.warm_up()
    saves: dict[float, list[tuple[Found, Found]]] = {pause: [] for pause in pauses}
    loads = []
    for _ in range(rounds):
        for pause, pairs in saves.items():
            pairs.append(jobs.pair("save", pause))
        loads.append(jobs.pair("load"))
    lines = [
        _line(f"{name}, {_when(pause)}", pairs, figure)
        for pause, pairs in saves.items()
        for name, figure in (
            ("first save: stall", "stall"),
            ("first save: training's own time", "thread"),
            ("first save: committed", "committed"),
        )
    ]
    lines += [
        _line(name, loads, figure)
        for name, figure in (
            ("load: first row", "first_row"),
            ("load: first row, processor's time", "first_row_processor"),
            ("load: whole", "load"),
        )
    ]
    compiling = statistics.median(
        cold["compiling"] for pairs in (*saves.values(), loads) for cold, _ in pairs
    )
    return lines, compiling


def _when(pause: float) -> str:
    return f"after {pause:g} s" if pause else "at once"


def _line(name: str, pairs: list[tuple[Found, Found]], figure: str) -> Line:
    def median(which: int, key: str) -> float:
        return statistics.median(pair[which][key] for pair in pairs)

    return Line(name, median(0, figure), median(1, figure), median(1, "peer"))


def targets(lines: list[Line], compiling: float) -> Iterator[Target]:
    """What the first save, the first load and the compiler may take at most."""
    for line in lines:
        if "stall" in line.figure:
            yield Target(
                f"{line.figure}: times a warm one", _MOST_STALL, line.ratio, "cold cache", at_most=True
            )
        if line.figure == "load: first row":
            name = f"{line.figure}: seconds"
            yield Target(name, _MOST_FIRST_ROW, line.cold_seconds, "cold cache", at_most=True)
    name = "compiling: seconds of the processor"
    yield Target(name, _MOST_COMPILING, compiling, "cold cache", at_most=True)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description="The first save and load of processes without compiled kernels."
    )
    parser.add_argument("--quick", action="store_true", help="small tables, once: to see that it runs")
    parser.add_argument(
        "--full", action="store_true", help="larger tables, more rounds, later saves, too: six minutes"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of cold.json")
    options = parser.parse_args()
    pauses = _AFTER_SECONDS if options.full else (0.0,)
    rows, rounds = (_FULL_ROWS, _FULL_ROUNDS) if options.full else (_ROWS, _ROUNDS)
    if options.quick:
        rows, rounds = _QUICK_ROWS, 1
    with tempfile.TemporaryDirectory(prefix="cnr-cold-") as folder:
        lines, compiling = measure(Path(folder), rows, rounds, pauses)
    print(Line.HEAD, *(line.show() for line in lines), sep="\n")
    print(f"compiling what a save and a load need: {compiling:.2f} s of the processor")
    reached = list(targets(lines, compiling))
    print(*reached, sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        **describe(),
        "lines": [asdict(line) for line in lines],
        "compiling_seconds": compiling,
        "targets": [target.to_json() for target in reached],
    }
    (options.out / "cold.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"Results are in {options.out}")
