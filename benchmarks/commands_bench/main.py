"""The command: fills a store, copies it to a real S3 server, and runs commands and peers there."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.codec_bench.machine import describe
from benchmarks.codec_bench.targets import Target
from benchmarks.growth import Training
from tests.s3_server import NoServerError, S3Server, serving

_ROOT = Path(__file__).parents[2]
_RESULTS = Path(__file__).parents[1] / "results"
_VERSIONS, _QUICK_VERSIONS = 2_000, 20
_DELAYS = (0.0, 0.02)
"""Seconds before each request: none, and what lies between a machine and a bucket of its region."""
_LOOKS = {
    "ls": ["ls"],
    "ls --last 20": ["ls", "--last", "20"],
    "report": ["report", "--output", "/dev/null"],
    "watch --once": ["watch", "--once"],
    "du": ["du"],
    "info": ["info"],
    "verify latest": ["verify", "latest"],
}
_READING = "peer: read all records"
_PEERS = {"peer: list all objects": "list", _READING: "read"}


@dataclass(frozen=True)
class Line:
    """What one command took. Python's start and imports are left out of the seconds."""

    command: str
    delay_ms: float
    seconds: float
    cpu_seconds: float
    requests: dict[str, int]
    peak_mib: float

    HEAD = "  command                       delay ms   seconds     CPU s  requests  peak MiB"

    @property
    def count(self) -> int:
        return sum(self.requests.values())

    def show(self) -> str:
        seconds = f"{self.seconds:9.2f} {self.cpu_seconds:9.2f}"
        return f"  {self.command:29} {self.delay_ms:8.0f} {seconds} {self.count:9,} {self.peak_mib:9.0f}"


class Bench:
    """Runs commands on the store of a server, and prints a line for each."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options = url, json.dumps(options)
        self.lines: list[Line] = []
        print(Line.HEAD)

    def peer(self, title: str, name: str, delay_seconds: float) -> None:
        self._run(title, delay_seconds, [name, self.url, self.options])

    def cnr(self, title: str, arguments: Sequence[str], delay_seconds: float) -> None:
        name, *more = arguments
        command = ["cnr", name, self.url, *more, "--storage-options", self.options]
        self._run(title, delay_seconds, command)

    def _run(self, title: str, delay_seconds: float, command: Sequence[str]) -> None:
        module = "benchmarks.commands_bench.counted"
        done = subprocess.run(
            [sys.executable, "-m", module, str(delay_seconds), *command],
            cwd=_ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        took = json.loads(done.stderr.splitlines()[-1])
        if took.pop("status"):
            raise RuntimeError(f"{title} failed: {done.stderr}")
        self.lines.append(Line(title, 1e3 * delay_seconds, **took))
        print(self.lines[-1].show(), flush=True)


def measure(server: S3Server, versions: int, folder: Path) -> list[Line]:
    """Fill a store in a folder, copy it to the server, and run everything there."""
    fill(folder / "store", versions)
    url = server.url("store")
    copy(folder / "store", url, server.storage_options)
    bench = Bench(url, server.storage_options)
    for delay in _DELAYS:
        for title, name in _PEERS.items():
            bench.peer(title, name, delay)
        for title, arguments in _LOOKS.items():
            bench.cnr(title, arguments, delay)
    # Each removes a quarter of what there was at first.
    for kept, delay in zip((versions * 3 // 4, versions // 2), _DELAYS, strict=True):
        rule = ["gc", "--keep-last", str(kept)]
        bench.cnr("gc, a quarter, --dry-run", [*rule, "--dry-run"], delay)
        bench.cnr("gc, a quarter", rule, delay)
    return bench.lines


def fill(folder: Path, versions: int) -> None:
    training = Training(str(folder))
    for _ in range(versions):
        training.save()
    training.checkpointer.close()


def copy(folder: Path, url: str, options: dict[str, Any]) -> None:
    import s3fs  # only who has a server needs it

    s3fs.S3FileSystem(**options, use_listings_cache=False).put(str(folder), url, recursive=True)


def targets(lines: Sequence[Line], versions: int) -> Iterator[Target]:
    """A look at all versions asks for little more than their records, and takes little more than to plainly read these.

    The times of a processor are compared: they are steadier than the others.
    """
    found = {(line.command, line.delay_ms): line for line in lines}
    where = f"{versions:,} versions"
    looks, plain = [found[name, 0] for name in ("ls", "report", "watch --once")], found[_READING, 0]
    name = "ls, report and watch on S3: requests a version"
    yield Target(name, 1.1, max(line.count for line in looks) / versions, where, at_most=True)
    name = "ls, report and watch on S3: times the CPU of plainly reading all records"
    times = max(line.cpu_seconds for line in looks) / plain.cpu_seconds
    yield Target(name, 2, times, where, at_most=True)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="What commands take on S3, where there are many versions.")
    parser.add_argument("--quick", action="store_true", help="few versions: to see that it runs")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of commands.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    versions = _QUICK_VERSIONS if options.quick else _VERSIONS
    found: dict[str, Any] = {**describe(), "versions_listed": versions}
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory() as disk,
            serving(Path(disk)) as server,
        ):
            lines = measure(server, versions, Path(folder))
    except NoServerError as error:
        found["left out"] = str(error)
    else:
        aims = list(targets(lines, versions))
        print(*aims, sep="\n")
        found |= {"lines": [asdict(line) for line in lines], "targets": [aim.to_json() for aim in aims]}
    (options.out / "commands.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
