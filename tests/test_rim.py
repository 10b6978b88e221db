"""What stands around the core can be taken away: the core imports none of it, and works without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import blocked_imports
from tests.nightly import at_night
from tests.paths import ROOT
from tests.source_tree import imports, modules
from tests.test_store.support.fork_server import ForkServer

_DISTRIBUTED = "cnr_store.training.distributed"
RIM = {
    "frameworks": ["cnr_store.integrations", "lightning", "pytorch_lightning", "accelerate"],
    "torchrec": [
        f"{_DISTRIBUTED}.torchrec",
        "torchrec",
        "fbgemm_gpu",
    ],
    "demo": ["cnr_store.cli.demo", "demo", "movielens"],
    "report": ["cnr_store.cli.report"],
    "command line": ["cnr_store.cli", "typer", "rich"],
    "dcp": ["cnr_store.dcp"],
    "importers": ["cnr_store.training.importing", "safetensors"],
    "readers": ["cnr_store.training.data", "torchdata"],
}
"""Modules of ours, with what they alone are for."""
EVERYTHING = [name for names in RIM.values() for name in names]
ROOMS = sorted(path.name for path in (ROOT / "tests/test_store").iterdir() if any(path.rglob("test_*.py")))
ROOMS.remove("integrations")  # tests of the rim alone


def test_the_core_imports_nothing_of_the_rim() -> None:
    def is_rim(module: str) -> bool:
        return any(f"{module}.".startswith(f"{name}.") for name in EVERYTHING)

    assert {name for name in EVERYTHING if name.startswith("cnr_")} <= modules().keys()
    within = {one.importer for one in imports() if is_rim(one.imported) and not is_rim(one.importer)}
    # The door to TorchRec, and public names: both import when asked.
    assert within == {f"{_DISTRIBUTED}.torchrec_door", "cnr_store"}


@pytest.fixture(scope="module")
def jobs() -> Iterator[ForkServer]:
    found = ForkServer(blocked_imports)
    yield found
    found.close()


def run(jobs: ForkServer, side: Path, blocked: list[str], tests: list[str]) -> None:
    jobs.ask({"side": str(side), "blocked": blocked, "tests": tests})
    status = jobs.ask("reap")["status"]
    assert status == 0, (side / "failure").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", [None, *map(at_night, RIM)])
def test_the_core_works_without(jobs: ForkServer, tmp_path: Path, part: str | None) -> None:
    run(jobs, tmp_path, RIM[part] if part else EVERYTHING, [])


@pytest.mark.nightly
@pytest.mark.parametrize("room", ROOMS)
def test_tests_pass_without_the_rim(jobs: ForkServer, tmp_path: Path, room: str) -> None:
    run(jobs, tmp_path, EVERYTHING, [str(ROOT / "tests/test_store" / room)])
