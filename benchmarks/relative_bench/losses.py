"""The log loss that restores cost over the life of a training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.relative_bench.stores import Setting, adaptive, lattice, new_checkpointer
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
COARSE = [
    Setting("adaptive 2", adaptive(2)),
    *(Setting(f"lattice {share}", lattice(share)) for share in (1.5, 0.2)),
]


def lost(training: Training, schemes: Sequence[Setting], restores: int) -> Iterator[dict[str, Any]]:
    """For each scheme, what so many restores cost in percent of the loss without any. The training ends as it began."""
    begin = training.snapshot()
    for _ in range(training.intervals):
        training.advance()
    plain = training.losses
    for scheme in schemes:
        begin()
        found = _restored(training, scheme, restores)
        yield {"setting": scheme.name, "restores": restores, "lost_percent": 100 * (found / plain - 1)}
    begin()


def _restored(training: Training, scheme: Setting, count: int) -> float:
    """The loss of all samples of a training that goes on from its store `count` times, at even intervals."""
    with new_checkpointer(Ledger(scheme.name, whole=True), training, scheme, audit=False) as checkpointer:
        # The step of a table is found here, and stays; versions between this one and a restore would not be read.
        checkpointer.save(0).result()
        at = restored_at(training.intervals, count)
        for interval in range(1, training.intervals + 1):
            training.advance()
            if interval in at:
                checkpointer.save(interval).result()
                checkpointer.load()
    return training.losses


def restored_at(intervals: int, count: int) -> list[int]:
    """After which intervals a run is restored: evenly, `count` times."""
    return [round(intervals * (number + 1) / (count + 1)) for number in range(count)]
