"""Every benchmark runs to its end. What it measures, nobody asks here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The first measures for a minute in every run of CI, the second reads what the others wrote.
_COVERED = {"smoke", "summary"}
_NAMES = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__"} - _COVERED)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _NAMES)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / f"{name}.py"
    subprocess.run([sys.executable, str(script), "--quick", "--out", str(tmp_path)], check=True, cwd=tmp_path)
    written = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert written, "it wrote no results"
    assert all(written), "its results are empty"
