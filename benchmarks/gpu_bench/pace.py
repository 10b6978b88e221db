"""The pace of a DLRM while a save of its tables is copied and written."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import async_save

import cnr_store
from benchmarks.gpu_bench import aims
from benchmarks.gpu_bench.dlrm import Dlrm
from benchmarks.gpu_bench.place import Place

_OURS = "ours"
_AFTER_SECONDS = 1.0


def measure(place: Place, folder: Path) -> dict[str, Any]:
    """Steps beside each kind of save, from its return until it is written, and steps alone before and after."""
    dlrm, peer = Dlrm(place), folder / "peer"
    with cnr_store.Checkpointer(
        folder / "ours", dlrm.model, dlrm.optimizer, limits=cnr_store.Limits(workers=1), **place.options
    ) as checkpointer:

        def dcp() -> Any:
            shutil.rmtree(peer, ignore_errors=True)
            return async_save(dlrm.state(), checkpoint_id=peer, no_dist=True)

        works: dict[str, Callable[[], Any]] = {
            f"{_OURS}, whole, 4 bits": lambda: checkpointer.save(0, full=True),
            f"{_OURS}, rows that changed, 4 bits": lambda: checkpointer.save(0),
            "DCP async_save": dcp,
        }
        shares: dict[str, list[float]] = {name: [] for name in works}
        for work in works.values():
            _beside(place, dlrm, work)  # buffers are there from now on
        before = _alone(place, dlrm)
        for _ in range(place.sizes.rounds):
            for name, work in works.items():
                beside = _beside(place, dlrm, work)
                after = _alone(place, dlrm)
                shares[name].append(beside / ((before + after) / 2))
                before = after
    found = {name: statistics.median(each) for name, each in shares.items()}
    beside = "; ".join(f"{name}: {share:.1%}" for name, share in found.items())
    place.show(f"{before:.1f} steps a second alone; beside {beside}")
    targets = [aims.target(aims.PACE, share, name) for name, share in found.items() if name.startswith(_OURS)]
    return {
        "alone_steps_per_second": before,
        "shares": shares,
        "targets": [each.to_json() for each in targets],
    }


def _beside(place: Place, dlrm: Dlrm, work: Callable[[], Any]) -> float:
    """Steps a second from when a save has returned until it is written."""
    saving = work()
    pace = _pace(place, dlrm, saving.done)
    saving.result()
    return pace


def _alone(place: Place, dlrm: Dlrm) -> float:
    end = time.perf_counter() + (_AFTER_SECONDS if place.is_timed else 0)
    return _pace(place, dlrm, lambda: time.perf_counter() > end)


def _pace(place: Place, dlrm: Dlrm, done: Callable[[], bool]) -> float:
    """Steps a second until it is done, at least one time those that are timed together."""
    place.wait()
    began, count = time.perf_counter(), 0
    while True:
        dlrm.step()
        count += 1
        if done():
            break
        if count % 4 == 0:
            place.wait()  # else steps would be queued far ahead
    place.wait()
    return count / (time.perf_counter() - began)
