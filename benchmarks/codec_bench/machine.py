"""What the figures were measured on, and with."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("cnr-codecs", "numba", "numpy", "numcodecs", "scikit-learn", "torch", "zarr")


def describe() -> dict[str, Any]:
    """Machine and versions."""
    return {"machine": machine(), "versions": {name: version(name) for name in PACKAGES}}


def machine() -> dict[str, Any]:
    """The machine alone."""
    return {
        "name": platform.node(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


@contextmanager
def pinned(cores: int) -> Iterator[int]:
    """This thread, and those that it starts, on the last `cores` of the cores allowed. Yields how many there are."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[-cores:])
    try:
        yield min(cores, len(allowed))
    finally:
        os.sched_setaffinity(0, allowed)
