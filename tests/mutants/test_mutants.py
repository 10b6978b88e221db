"""Each guarantee is held by a test: with one line of source broken, a test must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS, Mutant
from tests.paths import ROOT

SOURCES = ("cnr_store", "codecs", "backends", "tests", "docs", "pyproject.toml", "README.md")
FAILED = 1
"""pytest's exit status where tests ran and some failed: not that of a usage or collection error."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.guarantee.replace(" ", "-"))
def test_each_line_to_break_occurs_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.line) == 1
    for path in mutant.tests.split():
        assert (ROOT / path.partition("::")[0]).exists()


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, with the kernels compiled so far."""
    folder = tmp_path_factory.mktemp("mutants")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.guarantee.replace(" ", "-"))
def test_a_broken_line_is_noticed(mutant: Mutant, copied: Path) -> None:
    file = copied / mutant.file
    sound = file.read_text()
    file.write_text(sound.replace(mutant.line, mutant.broken))
    try:
        done = _run(copied, mutant.tests.split())
    finally:
        file.write_text(sound)
    assert done.returncode == FAILED, f"no test noticed: {done.stdout[-2000:]}"


def _run(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    paths = [folder, folder / "codecs" / "src", folder / "backends" / "src"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not nightly",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1500
    )
