"""Benchmark of following: `python benchmarks/following.py [--quick] [--out FOLDER]`.

A table of float32 rows is saved whole and then as deltas of 8 bits; each delta is followed from the baseline, beside
reading the same version whole. Bytes are those asked of the storage, a local folder.
"""

import sys
from pathlib import Path

# As a script this folder would come first on the path, and hide the standard library's `codecs`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse  # noqa: E402  # after the path is set
import functools  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

import cnr_store  # noqa: E402
from benchmarks.codec_bench.machine import describe  # noqa: E402
from benchmarks.reading_bench.counting import CountingBackend  # noqa: E402
from cnr_backends import Backend, open_backend  # noqa: E402
from cnr_codecs import UniformRows  # noqa: E402
from cnr_store.format.layout import record_key, weight_path  # noqa: E402
from cnr_store.writing.plan import Plan, RowsWrite  # noqa: E402
from cnr_store.writing.writer import Writer  # noqa: E402

_RESULTS = Path(__file__).parent / "results"
_DIM = 64
_CODEC = UniformRows("adaptive", 8)
_PATH = weight_path("users")
_WORKERS = 2
_REPEATS = 5


@dataclass(frozen=True)
class Line:
    """One delta, followed and read whole; the best of a few times."""

    table_bytes: int
    rows_changed: int
    share: float
    delta_bytes: int
    follow_seconds: float
    follow_bytes: int
    follow_requests: int
    whole_seconds: float
    whole_bytes: int
    whole_requests: int

    HEAD = "  table MB  changed   share  delta MB | follow: s      MB  reads | whole: s       MB  reads"

    def show(self) -> str:
        return (
            f"{self.table_bytes / 1e6:10.0f} {self.rows_changed:8d} {self.share:7.2%} {self.delta_bytes / 1e6:9.2f} |"
            f" {self.follow_seconds:9.3f} {self.follow_bytes / 1e6:7.2f} {self.follow_requests:6d} |"
            f" {self.whole_seconds:8.3f} {self.whole_bytes / 1e6:8.2f} {self.whole_requests:6d}"
        )


class Values:
    """Rows of random values, made where they are asked for: always the same few megabytes."""

    def __init__(self, seed: int) -> None:
        self._pool = np.random.default_rng(seed).normal(size=(1 << 14, _DIM)).astype(np.float32)

    def block(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        return self._pool[np.arange(begin, end) % len(self._pool)]


def measure(rows: int, shares: list[float], folder: str) -> list[Line]:
    """Follow and read deltas of these shares of a table's rows, drawn at random."""
    backend = open_backend(folder)
    writer = Writer(backend, _WORKERS)
    baseline = _write(writer, 0, rows, None, None)
    lines = []
    for step, share in enumerate(shares, 1):
        ids = np.sort(np.random.default_rng(step).choice(rows, round(rows * share), replace=False))
        delta = _write(writer, step, rows, baseline.id, ids)
        follow = _best(backend, functools.partial(_follow, since=baseline, rows=len(ids)))
        whole = _best(backend, cnr_store.state_dict)
        lines.append(Line(rows * _DIM * 4, len(ids), share, delta.bytes, *follow, *whole))
        print(lines[-1].show(), flush=True)
        backend.delete(record_key(delta.id))  # the next is followed from the baseline, too
    return lines


def _write(
    writer: Writer, step: int, rows: int, base: str | None, ids: np.ndarray[Any, Any] | None
) -> cnr_store.VersionInfo:
    write = RowsWrite(_PATH, (rows, _DIM), "float32", base, ids, Values(step), _CODEC)
    needs = (base,) if base else ()
    return cnr_store.VersionInfo.from_record(writer.write(Plan(step, base, [write], [], {}, {}, needs)))


def _follow(place: Backend, since: cnr_store.VersionInfo, rows: int) -> None:
    (update,) = cnr_store.follow(place, since)
    if sum(len(block.values) for block in update.blocks()) != rows:
        raise RuntimeError("following yielded other rows than were written")


def _best(backend: Backend, run: Callable[[Backend], object]) -> tuple[float, int, int]:
    """(seconds, bytes read, requests) of the fastest of a few runs."""
    found = []
    run(backend)  # kernels and files are warm from here on
    for _ in range(_REPEATS):
        counting = CountingBackend(backend)
        begin = time.perf_counter()
        run(counting)
        found.append((time.perf_counter() - begin, counting.nbytes, len(counting.log)))
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time and bytes of following deltas, beside reading versions whole."
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the size: to see that it runs")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of following.json")
    options = parser.parse_args()
    rows = (1 << 30) // (_DIM * 4) // (4 if options.quick else 1)
    print(Line.HEAD)
    lines = []
    # As many rows of a table four times as large must cost the same.
    for size, shares in ((rows // 4, [0.01, 0.04]), (rows, [0.001, 0.01])):
        with tempfile.TemporaryDirectory(prefix="cnr-following-") as folder:
            lines += measure(size, shares, folder)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {**describe(), "lines": [asdict(line) for line in lines]}
    (options.out / "following.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"Results are in {options.out}")


if __name__ == "__main__":
    main()
