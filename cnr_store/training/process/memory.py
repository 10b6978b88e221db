"""How much memory a process may still take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
# Of a control group, version 2 and 1: its limit, what it uses, and which of that are pages of files.
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_bytes() -> int:
    """Bytes that each process of a job on this host may still take, by the machine and its control group."""
    found = [_number(_MEMORY, "MemAvailable:", unit=1 << 10)]
    for limit, used, stat, cached in _LIMITS:
        most, taken = _number(_GROUP / limit), _number(_GROUP / used)
        if most is not None and taken is not None:
            found.append(most - taken + (_number(_GROUP / stat, cached) or 0))
    free = min((each for each in found if each is not None), default=sys.maxsize)
    return max(0, free) // _processes()


def _number(file: Path, name: str = "", unit: int = 1) -> int | None:
    """The number that a file of the system has, on a line that begins so; None without one, such as "max"."""
    try:
        line = next(line for line in file.read_text().splitlines() if line.startswith(name))
        return unit * int(line.removeprefix(name).split()[0])
    except (OSError, ValueError, StopIteration, IndexError):
        return None


def _processes() -> int:
    """How many processes the job has on this host, as torchrun says."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdecimal() else 1
