"""Peak memory of each operation, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

TIMES_LARGER = 2.5
_ROOT = Path(__file__).parents[2]


def peak_bytes(operation: str, url: Path, rows: int, dim: int) -> int:
    """By how much memory rises above what it was before, the model included."""
    module = "benchmarks.storage_bench.peak"
    command = [sys.executable, "-m", module, operation, str(url), str(rows), str(dim)]
    done = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def measure(rows: int, dim: int, folder: Path) -> dict[str, Any]:
    """MiB, beside the table's."""
    rows = int(TIMES_LARGER * rows)
    found: dict[str, Any] = {"the table itself (MiB)": rows * dim * 4 / 2**20}
    for operation in ("save", "save_delta", "load", "verify", "compact"):
        found[f"{operation}: rise above what there was (MiB)"] = (
            peak_bytes(operation, folder, rows, dim) / 2**20
        )
    return found
