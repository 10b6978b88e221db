"""Benchmark of growth: `python benchmarks/growth.py [--quick | --full] [--out FOLDER]`.

A small table is saved as consecutive versions, one after the other, to a local folder: what a save, its record, a
listing and a load take as versions add up. Folds are made behind the saves, as `max_chain` asks by default.
"""

import sys
from pathlib import Path

# As a script this folder would come first on the path, and hide the standard library's `codecs`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse  # noqa: E402  # after the path is set
import json  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import cnr_store  # noqa: E402
from benchmarks.codec_bench.machine import describe  # noqa: E402
from benchmarks.codec_bench.targets import Target  # noqa: E402
from cnr_backends import open_backend  # noqa: E402
from cnr_store.catalog.catalog import Catalog  # noqa: E402

_RESULTS = Path(__file__).parent / "results"
_ROWS, _DIM, _LOOKUPS = 2000, 8, 4
_LISTED = 2_000
_COUNTS, _FULL_COUNTS = (100, 500, _LISTED), (100, 500, _LISTED, 10_000)
_SAVES = 64  # of the last ones: as many as lie between two folds


@dataclass(frozen=True)
class Line:
    """A store of so many versions. Times of saves and bytes of records are those of the last 64."""

    versions: int
    save_ms: float
    record_bytes: int
    versions_seconds: float
    load_seconds: float

    HEAD = "  versions |  save ms  record bytes | versions() s   load s"

    def show(self) -> str:
        return (
            f"  {self.versions:8,} | {self.save_ms:8.1f} {self.record_bytes:13,} |"
            f" {self.versions_seconds:12.2f} {self.load_seconds:8.3f}"
        )


class Training:
    """Saves a table of which a few rows change each time."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.table = nn.Embedding(_ROWS, _DIM, sparse=True)
        self.optimizer = torch.optim.SGD(self.table.parameters(), lr=0.1)
        self.checkpointer = cnr_store.Checkpointer(
            folder, self.table, self.optimizer, policy="consecutive", job=cnr_store.Job(rng=False)
        )
        self.seconds: list[float] = []
        self.ids: list[str] = []

    def save(self) -> None:
        self.table(torch.randint(0, _ROWS, (_LOOKUPS,))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        begin = time.perf_counter()
        self.ids.append(self.checkpointer.save(len(self.ids)).result().id)
        self.seconds.append(time.perf_counter() - begin)

    def look(self) -> Line:
        catalog = Catalog(open_backend(self.folder))
        records = [catalog.record(version).record_bytes for version in self.ids[-_SAVES:]]
        begin = time.perf_counter()
        listed = cnr_store.versions(self.folder)
        listed_seconds = time.perf_counter() - begin
        if len(listed) != len(self.ids):
            raise RuntimeError("versions() lists other versions than were saved")
        begin = time.perf_counter()
        cnr_store.load(self.folder, nn.Embedding(_ROWS, _DIM, sparse=True))
        load_seconds = time.perf_counter() - begin
        save_ms = 1e3 * statistics.median(self.seconds[-_SAVES:])
        return Line(len(listed), save_ms, max(records), listed_seconds, load_seconds)


def measure(counts: Sequence[int]) -> list[Line]:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        training = Training(folder)
        print(Line.HEAD)
        for count in counts:
            while len(training.ids) < count:
                training.save()
            lines.append(training.look())
            print(lines[-1].show(), flush=True)
        training.checkpointer.close()
    return lines


def targets(lines: Sequence[Line]) -> Iterator[Target]:
    """A listing of 2,000 versions within a second; saves and records that don't grow with what is there."""
    first, last = lines[0], lines[-1]
    for line in lines:
        if line.versions == _LISTED:
            where = f"{_LISTED:,} versions"
            yield Target("versions(): seconds", 1, line.versions_seconds, where, at_most=True)
    where = f"{last.versions:,} versions, of {first.versions:,}"
    yield Target("a save's time as versions add up", 1.5, last.save_ms / first.save_ms, where, at_most=True)
    grown = last.record_bytes / first.record_bytes
    yield Target("a record's bytes as versions add up", 1.5, grown, where, at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What saves, listings and loads take as versions add up.")
    parser.add_argument("--quick", action="store_true", help="few versions: to see that it runs")
    parser.add_argument("--full", action="store_true", help=f"{_FULL_COUNTS[-1]:,} versions")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of growth.json")
    options = parser.parse_args()
    lines = measure((20, 100) if options.quick else _FULL_COUNTS if options.full else _COUNTS)
    options.out.mkdir(parents=True, exist_ok=True)
    found = list(targets(lines))
    print(*found, sep="\n")
    figures = {"lines": [asdict(line) for line in lines], "targets": [each.to_json() for each in found]}
    document = json.dumps({**describe(), **figures}, indent=1)
    (options.out / "growth.json").write_text(document + "\n", encoding="utf-8")
    print(f"Results are in {options.out}")


if __name__ == "__main__":
    main()
