"""Every benchmark runs to its end. What it measures, nobody asks here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_bench.tests import counted

ROOT = Path(__file__).parents[1]
# The first measures for a minute in every run of CI, the second reads what the others wrote, the third needs a GPU.
_COVERED = {"smoke", "summary", "gpu"}
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


def run_gpu(folder: Path, *arguments: str, **environment: str) -> str:
    """What the benchmark of GPUs prints; it must end well."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(folder), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    assert run_gpu(tmp_path, CUDA_VISIBLE_DEVICES="") == "no CUDA device: nothing measured\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_benchmark_of_gpus_runs_on_the_cpu(tmp_path: Path) -> None:
    assert run_gpu(tmp_path, "--tiny").endswith("every part ran; nothing is written of the CPU\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(900)
def test_benchmark_of_gpus_runs(tmp_path: Path) -> None:
    run_gpu(tmp_path, "--quick", "--only", "kernels", "--only", "flagging")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found.keys() == {"kernels", "flagging"}
    assert all(part["gpu"]["name"] and part["targets"] for part in found.values())


def test_tests_that_ran_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>')
    assert counted(report) == {"passed": 3, "failed": 2, "errors": 1, "skipped": 3}
