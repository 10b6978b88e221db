"""What nights of storms found, written to ``benchmarks/results/storm.json``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping

from tests.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "storm.json"


def publish(name: str, seed: int, counts: Mapping[str, int]) -> None:
    """Write what one test counted, beside what other tests did."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
    found = {**known, "machine": machine, name: {"seed": seed, **dict(sorted(counts.items()))}}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
