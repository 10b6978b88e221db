"""Runs the tests that need a CUDA device, and counts what became of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_bench.place import Place

_ROOT = Path(__file__).parents[2]
_MOST_PROCESSES = 8
# At tiny sizes one file of them does: that each is skipped shows that the runner works.
_FEW = ["tests/test_store/training/tracking/test_bitmap.py"]


def measure(place: Place, folder: Path) -> dict[str, Any]:
    """Run ``pytest -m gpu``."""
    report = folder / "report.xml"
    processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    spread = ["-n", str(processes)] if place.is_timed else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *spread]
    done = subprocess.run([*command, *([] if place.is_timed else _FEW)], cwd=_ROOT, check=False)
    if not report.exists():
        raise RuntimeError(f"pytest ended with {done.returncode} and left no report")
    counts = counted(report)
    print(*(f"{count} {what}" for what, count in counts.items()), sep=", ")
    return {"command": "pytest -m gpu", "exit_status": done.returncode, **counts}


def counted(report: Path) -> dict[str, int]:
    """How many tests ran, and how many of them failed or were skipped, by pytest's JUnit report."""
    suites = list(ElementTree.parse(report).iter("testsuite"))
    found = {name: sum(int(each.get(name, 0)) for each in suites) for name in ("tests", "failures", "errors")}
    skipped = sum(int(each.get("skipped", 0)) for each in suites)
    passed = found["tests"] - found["failures"] - found["errors"] - skipped
    return {"passed": passed, "failed": found["failures"], "errors": found["errors"], "skipped": skipped}
