"""Benchmark of tracking: `python benchmarks/tracking.py [--quick | --full] [--out FOLDER]`.

A training step with tracked tables beside the same step without, on one thread: the model of the demo at batch 4,096,
and 1,000 small tables. Seconds are of the processor, and the two take turns in short rounds, so that other work on the
machine counts little; `adds` compares their medians.

A step varies by more than tracking adds to it, so its parts are timed alone, too: `lookup` is what a call of
a table takes longer when it is tracked (it has no hooks), `step` what the hooks around an optimizer's step take, in
microseconds a table. `share` is both, of a step without tracking.

A thousand tables with Adagrad, of dense gradients and of sparse ones, are measured by minimums: of a step with and
without tracking, and of the first step after a save. After a step its dense gradients are read, but for rows that are
flagged already. `read` is what reading all of them takes, by the kernel that flags rows.
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
from statistics import median  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD, Adagrad, Optimizer  # noqa: E402

from benchmarks.codec_bench.machine import describe  # noqa: E402
from benchmarks.codec_bench.movielens import BAGS, CROSS_ROWS, new_training  # noqa: E402
from benchmarks.codec_bench.targets import Target  # noqa: E402
from cnr_store.training.model.tables import find_tables  # noqa: E402
from cnr_store.training.tracking.bitmap import (  # noqa: E402
    bitmap_bytes,
    compile_kernels,
    mark_nonzero_of_tables,
)
from cnr_store.training.tracking.tracker import LISTENERS, Tracker  # noqa: E402

_RESULTS = Path(__file__).parent / "results"
_BATCH = 4096
_BATCHES = 8
_STEPS = 4
_MOST_US = 4
# What MovieLens-100k has of each feature.
_ML_ROWS = {"user": 943, "item": 1682, "age": 8, "gender": 2, "occupation": 21, "year": 73, "genre": 20}
_COUNT_ROWS = {"hour": 24, "weekday": 7, "user_count": 11, "item_count": 11}


@dataclass(frozen=True)
class Line:
    """One model, with and without tracking; `adds` and `share` are of a step without; see above."""

    model: str
    tables: int
    rows: int
    bitmap_bytes: int
    step_seconds: float
    tracked_seconds: float
    adds: float
    lookup_us: float
    step_us: float
    share: float

    HEAD = (
        "model         tables      rows  bits a row   step ms  tracked ms    adds  lookup us  step us  share"
    )

    def show(self) -> str:
        return (
            f"{self.model:12} {self.tables:7d} {self.rows:9d} {self.bitmap_bytes * 8 / self.rows:11.2f} "
            f"{self.step_seconds * 1e3:9.2f} {self.tracked_seconds * 1e3:11.2f} {self.adds:7.2%} "
            f"{self.lookup_us:10.2f} {self.step_us:8.2f} {self.share:6.2%}"
        )


@dataclass(frozen=True)
class Training:
    """A model that trains, and what one of its steps looks up."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    step: Callable[[], object]
    lookups: list[tuple[nn.Module, torch.Tensor]]

    def look_up(self) -> None:
        for table, ids in self.lookups:
            table(ids)


def measure(training: Training, rounds: int) -> Line:
    """Medians of rounds with and without tracking, which take turns."""
    plain, tracked, calls, hooked, around = [], [], [], [], []
    tables = find_tables(training.model)
    training.step()
    for turn in range(2 * rounds):
        if turn % 4 in (0, 3):
            plain.append(_seconds(training.step))
            calls.append(_seconds(training.look_up))
            continue
        with _tracker(training.model, training.optimizer) as tracker:
            tracked.append(_seconds(training.step))
            hooked.append(_seconds(training.look_up))
            around.append(_seconds(lambda: _around_step(tracker, training.optimizer)))
    step, beside = median(plain), median(tracked)
    lookup_us, step_us = (
        seconds / len(tables) * 1e6 for seconds in (median(hooked) - median(calls), median(around))
    )
    rows = sum(table.rows for table in tables)
    size = sum((table.rows + 7) // 8 for table in tables)
    share = (lookup_us + step_us) * 1e-6 * len(tables) / step
    return Line(
        training.name, len(tables), rows, size, step, beside, beside / step - 1, lookup_us, step_us, share
    )


def _around_step(tracker: Tracker, optimizer: Optimizer) -> None:
    tracker.before_step(optimizer)
    tracker.after_step(optimizer)


@contextmanager
def _tracker(model: nn.Module, optimizer: Optimizer) -> Iterator[Tracker]:
    for _ in compile_kernels():  # as a Checkpointer does beside training
        pass
    tracker = Tracker(find_tables(model), [optimizer])
    try:
        yield tracker
    finally:
        tracker.close()


def _seconds(step: Callable[[], object]) -> float:
    step()
    begin = time.process_time()
    for _ in range(_STEPS):
        step()
    return (time.process_time() - begin) / _STEPS


def of_the_demo() -> Training:
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

    lookups = [(table, batches[0][name]) for name, table in model.embed.items()]
    return Training("demo", model, optimizer, step, lookups)


def of_small_tables(tables: int = 1000) -> Training:
    model = nn.ModuleList(nn.Embedding(1000, 16, sparse=True) for _ in range(tables))
    optimizer = SGD(model.parameters(), lr=0.1)
    ids = torch.randint(1000, (128,), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack([table(ids) for table in model]).square().sum())
        optimizer.step()

    return Training("small tables", model, optimizer, step, [(table, ids) for table in model])


@dataclass(frozen=True)
class Many:
    """A thousand tables: minimums, in microseconds a table and step where a name says so."""

    gradients: str
    tables: int
    step_seconds: float
    tracked_seconds: float
    adds_us: float
    adds_after_save_us: float
    read_us: float

    @property
    def target(self) -> Target:
        name, where = (
            "tracking: microseconds a table and step",
            f"{self.tables} tables, {self.gradients} gradients",
        )
        return Target(name, _MOST_US, self.adds_us, where, at_most=True)

    HEAD = "gradients  tables   step ms  tracked ms  adds us a table and step  after a save  read us"

    def show(self) -> str:
        return (
            f"{self.gradients:10} {self.tables:6d} {self.step_seconds * 1e3:9.2f} "
            f"{self.tracked_seconds * 1e3:11.2f} {self.adds_us:25.2f} "
            f"{self.adds_after_save_us:13.2f} {self.read_us:8.2f}"
        )


def of_bags(sparse: bool, tables: int) -> Training:
    model = nn.ModuleList(nn.EmbeddingBag(1000, 16, sparse=sparse) for _ in range(tables))
    optimizer = Adagrad(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(1)

    def step() -> None:
        ids = torch.randint(1000, (64, 1), generator=random)
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack([table(ids) for table in model]).square().sum())
        optimizer.step()

    return Training("sparse" if sparse else "dense", model, optimizer, step, [])


def measure_many(sparse: bool, tables: int, rounds: int) -> Many:
    """Two models alike, of which one is tracked, in turns."""
    plain, tracked = of_bags(sparse, tables), of_bags(sparse, tables)
    times: dict[str, list[float]] = {
        name: [] for name in ("plain", "tracked", "plain after a save", "after a save", "read")
    }
    with _tracker(tracked.model, tracked.optimizer) as tracker:
        for turn in range(2 * rounds):
            is_fresh = turn >= rounds
            if is_fresh:
                tracker.swap()
            names = ("plain after a save", "after a save") if is_fresh else ("plain", "tracked")
            pair = list(zip((plain, tracked), names, strict=True))
            for training, name in pair if turn % 2 else pair[::-1]:
                if training is plain:
                    LISTENERS.discard(tracker)  # or it looks for its tables among those of the other model
                times[name].append(_once(training.step))
                LISTENERS.add(tracker)
            if not sparse:
                times["read"].append(_once(lambda: _read_gradients(tracked.model)))
    step, beside, other_step, fresh, read = (min(each[2:], default=0.0) for each in times.values())
    adds, fresh_adds, read = ((each / tables * 1e6) for each in (beside - step, fresh - other_step, read))
    return Many(plain.name, tables, step, beside, adds, fresh_adds, read)


def _read_gradients(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    rows, words = (np.full(len(gradients), size, np.int64) for size in gradients[0].shape)
    bitmaps = np.zeros((len(gradients), bitmap_bytes(int(rows[0]))), np.uint8)
    first, size = bitmaps.ctypes.data, bitmaps.shape[1]
    places = np.arange(first, first + bitmaps.nbytes, size)
    mark_nonzero_of_tables(places, rows, np.array([each.data_ptr() for each in gradients]), words)


def _once(step: Callable[[], object]) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="What tracking adds to a training step.")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs")
    parser.add_argument("--full", action="store_true", help="twice the rounds: two minutes")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of tracking.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 4 if options.quick else 24 if options.full else 12
    print(Line.HEAD)
    lines = []
    for make in (of_the_demo, of_small_tables):
        lines.append(measure(make(), rounds))
        print(lines[-1].show(), flush=True)
    print(Many.HEAD)
    many = []
    for sparse in (False, True):
        many.append(measure_many(sparse, 50 if options.quick else 1000, 2 * rounds))
        print(many[-1].show(), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        **describe(),
        "lines": [asdict(line) for line in lines],
        "thousand": {
            "machine": describe()["machine"],
            "lines": [asdict(line) for line in many],
            "targets": [line.target.to_json() for line in many],
        },
    }
    (options.out / "tracking.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"Results are in {options.out}")


if __name__ == "__main__":
    main()
