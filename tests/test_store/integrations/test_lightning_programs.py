"""Random programs under Lightning, killed and told to end anywhere: resumed they end as those that nothing stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cnr_store
from tests.test_store.integrations import lightning_program
from tests.test_store.integrations.lightning_program import Plan
from tests.test_store.support.fork_server import ForkServer

BY_DAY = (0, 3, 5)
"""Averages by Lightning's three kinds, manual optimization, signals of both kinds, all ways to resume."""
PROGRAMS = 400


@pytest.fixture(scope="module")
def jobs() -> Iterator[ForkServer]:
    found = ForkServer(lightning_program)
    yield found
    found.close()


def lives(jobs: ForkServer, folder: Path, seed: int, way: str, began: list[int]) -> Any:
    """Run a program until it ends, and return how. `began`: gets the step with which each life begins, or gives it."""
    folder.mkdir()
    for life, end in enumerate([*(Plan(seed).ends if way != "none" else ()), None]):
        at = began[life] if way == "own" else 0
        jobs.ask({"side": str(folder), "seed": seed, "way": way, "end": end, "at": at})
        ended = jobs.ask("reap")
        assert not ended["status"] or ended["signal"] == 9, (folder / "failure").read_text()
        if way == "store":
            began.append(int((folder / "began").read_text()))
        if (folder / "end").exists():
            break
    return torch.load(folder / "end", weights_only=False)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states differ, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for place, pair in pairs for found in differences(*pair, f"{path}/{place}")]
    return [] if one == other else [f"{path}: {one} and {other}"]


def check_metadata(url: Path, seen: list[list[Any]]) -> None:
    """Check that each version has the epoch of its step, or of batches behind it, and no score but of its step."""
    epochs = {(one[2], one[0]) for one in seen if len(one) == 4}
    scores = {one[0]: one[1] for one in seen if len(one) == 2}
    for version in cnr_store.versions(url):
        assert (version.step, version.metadata["epoch"]) in epochs
        if "loss" in version.metadata:
            assert version.metadata["loss"] == scores[version.step]


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed in BY_DAY else [pytest.mark.nightly]) for seed in range(PROGRAMS)],
)
def test_a_program_ends_as_without_a_kill(jobs: ForkServer, tmp_path: Path, seed: int) -> None:
    began: list[int] = []
    whole = lives(jobs, tmp_path / "none", seed, "none", began)
    resumed = lives(jobs, tmp_path / "store", seed, "store", began)
    check_metadata(tmp_path / "store" / "store", whole["Notes"]["seen"])
    if found := differences(whole, resumed):
        # What Lightning's own checkpoints can't do is not asked for.
        own = lives(jobs, tmp_path / "own", seed, "own", began)
        assert differences(own, resumed) == [], f"{Plan(seed)}: begun at {began}, {found}"
