"""The log loss that restores under a budget cost: jobs that end, and go on from their store in a new model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

import cnr_store
from benchmarks.codec_bench.movielens import Features
from benchmarks.relative_bench.losses import restored_at
from benchmarks.relative_bench.stores import Workload
from benchmarks.relative_bench.trace import DenseMovieLens, Size, Training
from benchmarks.volumes_bench.ledger import Ledger
from benchmarks.volumes_bench.workloads import MovieLens
from cnr_store.policies.budget import COST_FACTOR

RESTORES = (0, 1, 5, 11, 20)
INTERVALS = 21
BUDGET, LOSSLESS = "budget 0.01", "lossless"
SETTINGS: Mapping[str, Mapping[str, Any]] = {BUDGET: {"budget": 0.01}, LOSSLESS: {"budget": 0}}


class Job(Workload, Protocol):
    """A training whose samples are judged before they are learned; `losses` is their sum, in its state, too."""

    losses: float

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def trainings(rows: int, seed: int, features: Features | None) -> Iterator[tuple[str, Callable[[], Job]]]:
    """Names and trainings: each is begun anew at each call."""
    if features is not None:
        yield "MovieLens, Adagrad", partial(MovieLens, features, INTERVALS, seed)
        yield "MovieLens, Adam", partial(DenseMovieLens, features, INTERVALS, seed, "Adam")
    samples, batch = round(rows * 4 / 27), round(rows / 500)
    begun = Size(rows, samples, batch, intervals=INTERVALS, warm_up=0, spread=1e-4)
    towers = Size(
        rows, 4 * samples, 4 * batch, intervals=INTERVALS, warm_up=0, rate=0.08, spread=0.1, towers=True
    )
    for name, size in (("begun at 1e-4", begun), ("two towers", towers)):
        yield f"{name}, Adagrad", partial(Training, size, "Adagrad", seed)
        yield f"{name}, Adam", partial(Training, size, "Adam", seed)


def lost(make: Callable[[], Job], counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What restores cost, in percent of the loss of a run that saves nothing; of lossless ones, the most alone."""
    training = make()
    for _ in range(training.intervals):
        training.advance()
    for name, options in SETTINGS.items():
        for restores in counts if name == BUDGET else [max(counts)]:
            found, spent = _restored(make, options, restores)
            yield {
                "setting": name,
                "restores": restores,
                "cost_factor": COST_FACTOR,
                "lost_percent": 100 * (found / training.losses - 1),
                "spent_percent": spent,
            }


def _restored(make: Callable[[], Job], options: Mapping[str, Any], count: int) -> tuple[float, float | None]:
    """The loss of all samples of a training that saves after each interval and ends `count` times, at even intervals.

    Beside it, what its records say that these restores cost at most, under a budget.
    """
    ledger = Ledger("job", whole=True)
    for end in [*restored_at(make().intervals, count), INTERVALS]:
        training = make()
        with torch.no_grad():
            for parameter in training.model.parameters() if ledger.present_bytes else ():
                parameter.fill_(math.nan)  # so that whatever is not restored shows
        with cnr_store.Checkpointer(ledger, training.model, training.optimizer, **options) as checkpointer:
            for interval in range(checkpointer.resume(reader=training) + 1, end + 1):
                training.advance()
                checkpointer.save(interval, reader=training).result()
            budget = checkpointer.explain().budget
    return training.losses, budget.spent if budget else None
