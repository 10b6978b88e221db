"""One process of the benchmark: it trains a few steps and saves, or loads. `python -m benchmarks.cold_bench.job`."""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numba.core.event as events
import torch

import cnr_store
from benchmarks.saving_bench.training import Training

_TABLES, _STEPS = 2, 3
_POLL_SECONDS = 0.001


class Compiling(events.Listener):  # type: ignore[misc]  # numba ships no types
    """The processor's time that goes to compiling, and how many kernels that is."""

    def __init__(self) -> None:
        self.seconds, self.kernels = 0.0, 0
        self._began: list[float] = []

    def on_start(self, event: Any) -> None:
        self._began.append(time.thread_time())

    def on_end(self, event: Any) -> None:
        began = self._began.pop()
        if not self._began:  # what a kernel calls is compiled within it
            self.seconds += time.thread_time() - began
            self.kernels += 1


def save(folder: Path, rows: int, seconds: float) -> dict[str, float]:
    """Train, for some seconds, and save; then save as torch does."""
    training = Training("adagrad", _TABLES, rows)
    with cnr_store.Checkpointer(folder / "store", training.model, training.optimizer, bits=4) as checkpointer:
        end = time.perf_counter() + seconds
        for _ in range(_STEPS):
            training.touch(training.draw(0.1))
        while time.perf_counter() < end:
            training.touch(training.draw(0.1))
        processor, began = time.thread_time(), time.perf_counter()
        pending = checkpointer.save(1)
        found = {"stall": time.perf_counter() - began, "thread": time.thread_time() - processor}
        pending.result()
        found["committed"] = time.perf_counter() - began
    began = time.perf_counter()
    torch.save(training.state(), folder / "peer")
    return {**found, "peer": time.perf_counter() - began}


def load(folder: Path, rows: int) -> dict[str, float]:
    """Load, and see when the first row is in a table."""
    training = Training("adagrad", _TABLES, rows)
    table = training.arrays[0]
    table.fill_(torch.nan)
    first: list[tuple[float, float]] = []
    with cnr_store.Checkpointer(folder / "store", training.model, training.optimizer, bits=4) as checkpointer:
        began, processor = time.perf_counter(), time.process_time()

        def watch() -> None:
            while not first:
                if not table[::64, 0].isnan().all():
                    first.append((time.perf_counter() - began, time.process_time() - processor))
                time.sleep(_POLL_SECONDS)

        watcher = threading.Thread(target=watch)
        watcher.start()
        checkpointer.load()
        found = {"load": time.perf_counter() - began}
        watcher.join()
    began = time.perf_counter()
    torch.load(folder / "peer")
    seconds, of_processor = first[0]
    return {
        **found,
        "first_row": seconds,
        "first_row_processor": of_processor,
        "peer": time.perf_counter() - began,
    }


def main() -> None:
    """Do what the command line says, and print one line of JSON."""
    what, folder, rows, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
    compiling = Compiling()
    events.register("numba:compile", compiling)
    found = load(Path(folder), int(rows)) if what == "load" else save(Path(folder), int(rows), float(seconds))
    print(json.dumps({**found, "compiling": compiling.seconds, "kernels": compiling.kernels}))


if __name__ == "__main__":
    main()
