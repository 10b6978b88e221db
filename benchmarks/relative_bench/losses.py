"""The log loss that restores cost over the life of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from benchmarks.relative_bench.stores import Setting, Workload, adaptive, lattice, new_checkpointer
from benchmarks.relative_bench.trace import Training
from benchmarks.volumes_bench.ledger import Ledger
from cnr_codecs import LosslessRows

RESTORES = (1, 5, 11)
LOSSLESS = LosslessRows().get_config()
SCHEMES = [
    *(Setting(f"adaptive {bits}", adaptive(bits)) for bits in (2, 4)),
    *(Setting(f"lattice {share}", lattice(share)) for share in (0.5, 0.35, 0.2, 0.1)),
    Setting("lossless, m3", LOSSLESS, state_bits="m3"),
]
BUDGET = Setting("budget 0.01", policy="intermittent", budget=0.01)
BUDGET_RESTORES = (0, 1, 5, 11, 20)
COARSE = [
    Setting("adaptive 2", adaptive(2)),
    *(Setting(f"lattice {share}", lattice(share)) for share in (1.5, 0.2)),
]


class Judged(Workload, Protocol):
    """A training whose samples are judged before they are learned; `losses` is the sum."""

    losses: float


def lost(training: Training, schemes: Sequence[Setting], restores: int) -> Iterator[dict[str, Any]]:
    """For each scheme, what so many restores cost in percent of the loss without any. The training ends as it began."""
    begin = training.snapshot()
    for _ in range(training.intervals):
        training.advance()
    plain = training.losses
    for scheme in schemes:
        begin()
        found, _ = _restored(training, scheme, restores)
        yield {"setting": scheme.name, "restores": restores, "lost_percent": 100 * (found / plain - 1)}
    begin()


def budget_lost(make: Callable[[], Judged]) -> Iterator[dict[str, Any]]:
    """What the restores of a run with a budget cost, in percent of the loss of a run that saves nothing."""
    training = make()
    for _ in range(training.intervals):
        training.advance()
    plain = training.losses
    for restores in BUDGET_RESTORES:
        found, spent = _restored(make(), BUDGET, restores)
        yield {
            "setting": BUDGET.name,
            "restores": restores,
            "lost_percent": 100 * (found / plain - 1),
            "spent_percent": spent,
        }


def _restored(training: Judged, scheme: Setting, count: int) -> tuple[float, float | None]:
    """The loss of all samples of a training that goes on from its store `count` times, at even intervals.

    Beside it, what its records say that these restores cost at most, under a budget.
    """
    with new_checkpointer(Ledger(scheme.name, whole=True), training, scheme, audit=False) as checkpointer:
        # The step of a table is found here, and stays; versions between this one and a restore would not be read.
        checkpointer.save(0).result()
        at = {round(training.intervals * (number + 1) / (count + 1)) for number in range(count)}
        for interval in range(1, training.intervals + 1):
            training.advance()
            if interval in at:
                checkpointer.save(interval).result()
                checkpointer.load()
        budget = checkpointer.explain().budget
    return training.losses, budget and budget.spent
