"""What tracking adds to a DLRM step on the device, and what its kernels take alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_bench import aims
from benchmarks.gpu_bench.dlrm import Dlrm
from benchmarks.gpu_bench.place import Place
from cnr_store.training.devices.flags import DeviceFlags
from cnr_store.training.model.tables import find_tables
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
    flags = DeviceFlags([sizes.lookup_rows] * sizes.lookup_tables, place.device)
    bags = torch.arange(0, dlrm.ids.numel() + 1, sizes.pooling, device=place.device)
    alone = place.each_seconds(
        {
            "a launch a table": lambda: [flags.mark(ids, table) for table, ids in enumerate(dlrm.ids)],
            "one launch": lambda: flags.mark_bags(dlrm.ids.reshape(-1), bags),
        }
    )
    step = statistics.median(plain)
    adds = statistics.median(with_it / without - 1 for with_it, without in zip(tracked, plain, strict=True))
    found = {
        "step_seconds": step,
        "tracked_seconds": statistics.median(tracked),
        "adds": adds,
        "flag_seconds": {name: statistics.median(each) for name, each in alone.items()},
        "bits_a_row": 8 * flags.words.nbytes / (sizes.lookup_rows * sizes.lookup_tables),
    }
    alone_ms = ", ".join(f"{name} {each * 1e3:.3f} ms" for name, each in found["flag_seconds"].items())
    place.show(f"a step {step * 1e3:.2f} ms, tracking adds {adds:.2%}; flags alone: {alone_ms}")
    where = f"{sizes.lookup_tables} tables, batch {sizes.batch:,}, pooling {sizes.pooling}, all that tracking adds"
    targets = [aims.target(aims.FLAGGING, adds, where)]
    targets.append(aims.target(aims.FLAG_BITS, found["bits_a_row"], "on the device"))
    return {**found, "targets": [each.to_json() for each in targets]}
