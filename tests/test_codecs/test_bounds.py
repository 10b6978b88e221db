"""No kernel reads or writes outside its arrays. Only numba's check of every index sees it where nothing crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

_OUTSIDE = """
import numpy
from cnr_codecs.kernels.building.compiled import kernel

@kernel
def first(values):
    return values[0]

first(numpy.zeros(0, numpy.uint8))
"""


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(folder), "CNR_NIGHTLY_FACTOR": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **checks},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_an_index_outside_is_seen(tmp_path: Path) -> None:
    assert "IndexError: index is out of bounds" in _run(tmp_path, "-c", _OUTSIDE).stdout


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("folder", ["test_codecs", "test_store/training/tracking"])
def test_kernels_stay_within_their_arrays(tmp_path: Path, folder: str) -> None:
    quick = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not server and not nightly")
    done = _run(tmp_path, "-m", "pytest", f"tests/{folder}", *quick)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
