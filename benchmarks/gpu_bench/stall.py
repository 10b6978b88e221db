"""How long a save holds training whose tables are on the device, beside DCP's.

Training is held until `save` has returned and the device has done what was queued on training's stream.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

import cnr_store
from benchmarks.codec_bench.target import Target
from benchmarks.gpu_bench import aims
from benchmarks.gpu_bench.place import Place
from benchmarks.gpu_bench.state import State
from cnr_store.training.devices import staging

ASYNC, PINNED = "DCP async_save", "DCP async_save, pinned, stager kept"
SHARES = (0.25, 0.01)
_A_RANK_BYTES = 80e9
Wait = Callable[[], object]
Line = dict[str, Any]


def measure(place: Place, folder: Path) -> dict[str, Any]:
    """Ours with a quarter of the rows changed, with few, whole, and quantized by the host; and DCP's, always whole."""
    state, rounds, lines = State(place), place.sizes.rounds, list[Line]()
    with state.checkpointer(folder / "ours") as checkpointer:

        def note(contender: str, share: float, seconds: list[float]) -> None:
            line = {"contender": contender, "share": share, "nbytes": state.nbytes}
            lines.append(line | {"seconds": statistics.median(seconds), "all_seconds": seconds})
            place.show(f"{contender:38} {share:5.0%} {lines[-1]['seconds'] * 1e3:10.2f} ms")

        for share in SHARES:
            ours = [_delta(place, state, checkpointer, share) for _ in range(2 + rounds)]
            note(
                "ours", share, ours[2:]
            )  # the first is whole, and proves the device; the second makes memory
        note("ours", 1.0, [_whole(place, checkpointer) for _ in range(1 + rounds)][1:])
        with patch.object(staging, "can_encode", lambda *_: False):
            without = [_delta(place, state, checkpointer, SHARES[0]) for _ in range(2)]
        note("ours, quantized by the host", SHARES[0], without[1:])
    kept = DefaultStager(StagingOptions(place.is_timed, False, False, place.is_timed))
    for name, stager in ((ASYNC, None), (PINNED, kept)):
        note(name, 1.0, [_dcp(place, state, folder / "peer", stager) for _ in range(2)][1:])
    kept.close()
    whole = next(line for line in lines if line["contender"] == "ours" and line["share"] == 1)
    expected = whole["seconds"] * _A_RANK_BYTES / state.nbytes
    place.show(f"a whole save of 80 GB a rank would take {expected * 1e3:.0f} ms, if it goes with the bytes")
    found = {"lines": lines, "whole_of_80_gb_seconds": expected}
    return {**found, "targets": [each.to_json() for each in _targets(lines)]}


def _held(place: Place, save: Callable[[], Wait]) -> float:
    gc.collect()
    place.wait()
    began = time.perf_counter()
    wait = save()
    if place.device.type == "cuda":
        torch.cuda.current_stream(place.device).synchronize()
    seconds = time.perf_counter() - began
    wait()
    return seconds


def _delta(place: Place, state: State, checkpointer: cnr_store.Checkpointer, share: float) -> float:
    state.touch(checkpointer, share)
    return _held(place, lambda: checkpointer.save(0).result)


def _whole(place: Place, checkpointer: cnr_store.Checkpointer) -> float:
    return _held(place, lambda: checkpointer.save(0, full=True).result)


def _dcp(place: Place, state: State, folder: Path, stager: DefaultStager | None) -> float:
    def save() -> Wait:
        future: Any = async_save(state.state(), checkpoint_id=folder, no_dist=True, async_stager=stager)
        return future.result

    try:
        return _held(place, save)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _targets(lines: list[Line]) -> Iterator[Target]:
    found = {(line["contender"], line["share"]): line["seconds"] for line in lines}
    where = f"{lines[0]['nbytes'] / 1e9:.3g} GB of tables, adaptive 4 bits"
    few, many = found["ours", SHARES[1]], found["ours", SHARES[0]]
    yield aims.target(aims.STALL, many * 1e3, where)
    yield aims.target(aims.STALL_OF_FEW, few * 1e3, where)
    yield aims.target(aims.STALL_SHARE, many / found[ASYNC, 1.0], where)
