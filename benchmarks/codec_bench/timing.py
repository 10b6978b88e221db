"""Best-of-several timing of contenders that take turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

_SAMPLE_SECONDS = 0.02


def race(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of one call of each: the best of `rounds` samples, taken in turns."""
    calls = {name: _calls(run) for name, run in runs.items()}
    best = dict.fromkeys(runs, float("inf"))
    gc.collect()
    for _ in range(rounds):
        for name, run in runs.items():
            best[name] = min(best[name], _sample(run, calls[name]))
    return best


def _calls(run: Callable[[], Any]) -> int:
    """How many calls fill a sample. The first call, which may compile, is not counted."""
    run()
    seconds = _sample(run, 1)
    return max(1, int(_SAMPLE_SECONDS / max(seconds, 1e-9)))


def _sample(run: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls
