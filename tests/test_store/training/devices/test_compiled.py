"""Kernels compile for GPUs, to operations that each round once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.nightly import at_night
from tests.paths import ROOT

_PROGRAM = "tests.test_store.training.devices.compile_kernels"
_KERNELS = {"flag_rows", "flag_bags", "encode_ranges", "search_lines", "walk_ranges", "encode_given"}
_KERNELS |= {"encode_lattice", "encode_floating", "sum_squares", "decode_rows", "decode_integers"}
_EXACT = re.compile(
    r"(?:add|sub|mul|div|sqrt)\.rn\.f(?:32|64)|(?:abs|neg|min|max|setp|set|testp|copysign|cvt)\..*"
)
_CUT = re.compile(r"fma|mad|approx|full|ftz")


@pytest.mark.skipif(find_spec("triton") is None, reason="kernels need Triton (extra gpu)")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its assembler for Linux alone")
@pytest.mark.parametrize("capability", [90, at_night(80), at_night(100)])
def test_kernels_compile_to_operations_that_round_once(capability: int, tmp_path: Path) -> None:
    """No product and sum are contracted, no division is approximate, no small number becomes zero."""
    environment = {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", _PROGRAM, str(capability)],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == _KERNELS
    for line in lines:
        for instruction in line.split()[1:]:
            assert _EXACT.fullmatch(instruction), line
            assert not _CUT.search(instruction), line
