"""Benchmark of tracking: `python benchmarks/tracking.py [--quick] [--out FOLDER]`.

A training step with tracked tables beside the same step without, on one thread: the model of the demo at batch 4,096,
and 1,000 small tables. Seconds are of the processor, so that other work on the machine counts little; each is the
best of a few rounds, in which the two take turns.
"""

import sys
from pathlib import Path

# As a script this folder would come first on the path, and hide the standard library's `codecs`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse  # noqa: E402  # after the path is set
import json  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD, Optimizer  # noqa: E402

from benchmarks.codec_bench.machine import describe  # noqa: E402
from cnr_store.demo.data import CROSS_ROWS  # noqa: E402
from cnr_store.demo.model import BAGS, new_training  # noqa: E402
from cnr_store.training.tables import find_tables  # noqa: E402
from cnr_store.training.tracker import Tracker  # noqa: E402

_RESULTS = Path(__file__).parent / "results"
_BATCH = 4096
_BATCHES = 8
_STEPS = 5
# What MovieLens-100k has of each feature.
_ML_ROWS = {"user": 943, "item": 1682, "age": 8, "gender": 2, "occupation": 21, "year": 73, "genre": 20}
_COUNT_ROWS = {"hour": 24, "weekday": 7, "user_count": 11, "item_count": 11}


@dataclass(frozen=True)
class Line:
    """One model, with and without tracking; `share` is what tracking adds to a step."""

    model: str
    tables: int
    rows: int
    bitmap_bytes: int
    step_seconds: float
    tracked_seconds: float
    share: float

    HEAD = "model         tables      rows  bits a row   step ms  tracked ms   adds"

    def show(self) -> str:
        return (
            f"{self.model:12} {self.tables:7d} {self.rows:9d} {self.bitmap_bytes * 8 / self.rows:11.2f} "
            f"{self.step_seconds * 1e3:9.2f} {self.tracked_seconds * 1e3:11.2f} {self.share:6.2%}"
        )


def measure(
    name: str, model: nn.Module, optimizer: Optimizer, step: Callable[[], object], rounds: int
) -> Line:
    """The best round of each kind; they take turns."""
    tables = find_tables(model)
    step()
    plain, tracked = [], []
    for _ in range(rounds):
        plain.append(_seconds(step))
        with _tracker(model, optimizer):
            tracked.append(_seconds(step))
    best, beside = min(plain), min(tracked)
    sizes = [(table.rows + 7) // 8 for table in tables]
    rows = sum(table.rows for table in tables)
    return Line(name, len(tables), rows, sum(sizes), best, beside, beside / best - 1)


@contextmanager
def _tracker(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    tracker = Tracker(find_tables(model), [optimizer])
    try:
        yield
    finally:
        tracker.close()


def _seconds(step: Callable[[], object]) -> float:
    step()
    begin = time.process_time()
    for _ in range(_STEPS):
        step()
    return (time.process_time() - begin) / _STEPS


def of_the_demo(rounds: int) -> Line:
    rows = {**_ML_ROWS, **_COUNT_ROWS, **CROSS_ROWS}
    model, optimizer = new_training(rows, seed=0)
    random = torch.Generator().manual_seed(1)
    batches = [
        {
            name: torch.randint(count, (_BATCH, 6) if name in BAGS else (_BATCH,), generator=random)
            for name, count in rows.items()
        }
        for _ in range(_BATCHES)
    ]
    labels = torch.rand(_BATCH, generator=random).round()
    turn = iter(range(10**9))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(batches[next(turn) % _BATCHES])
        torch.autograd.backward(nn.functional.binary_cross_entropy_with_logits(logits, labels))
        optimizer.step()

    return measure("demo", model, optimizer, step, rounds)


def of_small_tables(rounds: int, tables: int = 1000) -> Line:
    model = nn.ModuleList(nn.Embedding(1000, 16, sparse=True) for _ in range(tables))
    optimizer = SGD(model.parameters(), lr=0.1)
    ids = torch.randint(1000, (128,), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack([table(ids) for table in model]).square().sum())
        optimizer.step()

    return measure("small tables", model, optimizer, step, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description="What tracking adds to a training step.")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of tracking.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 4 if options.quick else 15
    print(Line.HEAD)
    lines = []
    for run in (of_the_demo, of_small_tables):
        lines.append(run(rounds))
        print(lines[-1].show(), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {**describe(), "lines": [asdict(line) for line in lines]}
    (options.out / "tracking.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"Results are in {options.out}")


if __name__ == "__main__":
    main()
