"""How long a load of tables on the device takes from page cache, beside torch.load and the limits of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_bench import aims
from benchmarks.gpu_bench.place import Place
from benchmarks.gpu_bench.state import State

_LIMIT_BYTES, _TINY_BYTES = 1 << 30, 1 << 12
_OURS, _PEER = "ours, 4 bits", "torch.load"


def measure(place: Place, folder: Path) -> dict[str, Any]:
    """Bytes of tables a second. What is loaded was just written, so that it is in page cache where there is room."""
    state = State(place)
    with state.checkpointer(folder / "ours") as checkpointer:
        checkpointer.save(0).result()
    place.wait()
    torch.save(state.state(), folder / "peer")

    def ours() -> None:
        with state.checkpointer(folder / "ours") as checkpointer:
            checkpointer.load()

    def peer() -> None:
        torch.load(folder / "peer", map_location=place.device, weights_only=True)

    paces = {_OURS: _pace(place, state, ours), _PEER: _pace(place, state, peer)}
    limits = _limits(place)
    limit = min(limits, key=lambda name: limits[name])
    for name, pace in (paces | limits).items():
        place.show(f"{name:38} {pace / 1e9:8.2f} GB/s")
    where = f"{state.nbytes / 1e9:.3g} GB of tables; {limit} is slower; torch.load reaches "
    where += f"{paces[_PEER] / limits[limit]:.2f}"
    target = aims.target(aims.RESTORE, paces[_OURS] / limits[limit], where)
    found = {"nbytes": state.nbytes, "bytes_per_second": paces, "limits": limits}
    return {**found, "targets": [target.to_json()]}


def _pace(place: Place, state: State, load: Callable[[], None]) -> float:
    found = []
    for _ in range(3 if place.is_timed else 1):
        state.clear()
        place.wait()
        began = time.perf_counter()
        load()
        place.wait()
        found.append(time.perf_counter() - began)
    return state.nbytes / statistics.median(found)


def _limits(place: Place) -> dict[str, float]:
    """Bytes a second that a plain copy moves: to the device from pinned memory, and within host memory."""
    size = _LIMIT_BYTES if place.is_timed else _TINY_BYTES
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=place.is_timed)
    there, here = torch.empty_like(pinned, device=place.device), torch.zeros_like(pinned)
    return {
        "bus, from pinned memory": size / place.seconds(lambda: there.copy_(pinned, non_blocking=True)),
        "host memory": size / place.seconds(lambda: here.copy_(pinned)),
    }
