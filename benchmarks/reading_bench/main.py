"""The command: measures, prints and writes JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.codec_bench.machine import describe
from benchmarks.reading_bench import few_rows, whole
from benchmarks.reading_bench.few_rows import FewRows
from benchmarks.reading_bench.peers import Place
from benchmarks.reading_bench.relay import relaying
from tests.s3_server import NoServerError, serving

_RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description="A few rows of huge tables, and whole versions, beside peers."
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of reading.json")
    options = parser.parse_args()
    sizes = [10**5, 10**7] if options.quick else [10**6, 10**9]
    rows, rounds = (50_000, 1) if options.quick else (1_000_000, 7)
    print(FewRows.HEAD)
    # Each shard of a table is an object: on the server ten times fewer, so that writing them takes seconds.
    lines = [*_in_a_folder(sizes, rounds), *_on_s3([sizes[0], sizes[1] // 10], rounds)]
    wholes = [_whole(rows, deltas, rounds) for deltas in (0, 10)]
    document = {
        **describe(),
        "few_rows": [asdict(line) for line in lines],
        "whole": [{**asdict(line), "share_of_restore": line.share} for line in wholes],
        "targets": [line.target.to_json() for line in wholes],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "reading.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"Results are in {options.out}")


def _in_a_folder(sizes: list[int], rounds: int) -> list[FewRows]:
    with tempfile.TemporaryDirectory() as folder:
        return [_shown(line) for line in few_rows.measure("folder", Place(folder, {}), sizes, rounds, None)]


def _on_s3(sizes: list[int], rounds: int) -> list[FewRows]:
    try:
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
            place = Place(server.url("reading"), server.storage_options)
            with relaying(server.port) as relay:
                return [_shown(line) for line in few_rows.measure("SeaweedFS", place, sizes, rounds, relay)]
    except NoServerError as error:
        print(f"S3 is left out: {error}")
        return []


def _whole(rows: int, deltas: int, rounds: int) -> whole.Whole:
    with tempfile.TemporaryDirectory() as folder:
        line = whole.measure(Path(folder), rows, 64, deltas, rounds)
    print(line.show(), flush=True)
    return line


def _shown(line: FewRows) -> FewRows:
    print(line.show(), flush=True)
    return line
