"""What tracking adds to a DLRM step on the device, and what flagging takes alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench import aims
from benchmarks.gpu_bench.dlrm import Dlrm
from benchmarks.gpu_bench.place import Place
from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking.table_tracker import RowBits
from cnr_store.training.tracking.tracker import Tracker


def measure(place: Place, _: Path) -> dict[str, Any]:
    """Steps with and without tracking take turns; medians of them count."""
    dlrm, sizes = Dlrm(place), place.sizes
    plain, tracked = list[float](), list[float]()
    for _turn in range(sizes.rounds):
        plain.append(place.seconds(dlrm.steps) / sizes.steps)
        tracker = Tracker(find_tables(dlrm.model), [dlrm.optimizer])
        try:
            tracked.append(place.seconds(dlrm.steps) / sizes.steps)
        finally:
            tracker.close()
    flags = [RowBits(sizes.lookup_rows, place.device) for _ in dlrm.ids]
    alone = place.seconds(lambda: [each.mark(ids) for each, ids in zip(flags, dlrm.ids, strict=True)])
    step = statistics.median(plain)
    adds = statistics.median(with_it / without - 1 for with_it, without in zip(tracked, plain, strict=True))
    found = {
        "step_seconds": step,
        "tracked_seconds": statistics.median(tracked),
        "adds": adds,
        "flag_seconds": alone,
        "bits_a_row": 8 * sum(each.there.nbytes for each in flags) / (sizes.lookup_rows * len(flags)),
    }
    place.show(f"a step {step * 1e3:.2f} ms, tracking adds {adds:.2%}; flags alone: {alone * 1e3:.3f} ms")
    where = f"{sizes.lookup_tables} tables, batch {sizes.batch:,}, pooling {sizes.pooling}, all that tracking adds"
    targets = [aims.target(aims.FLAGGING, adds, where)]
    targets.append(aims.target(aims.FLAG_BITS, found["bits_a_row"], "on the device"))
    return {**found, "targets": [each.to_json() for each in targets]}
