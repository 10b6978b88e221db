"""Random programs under Lightning, killed and told to end anywhere: resumed they end as those that nothing stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import cnr_store
from tests.test_store.integrations import lightning_program
from tests.test_store.integrations.lightning_program import Plan
from tests.test_store.support.fork_server import ForkServer

BY_DAY = (0, 3, 5, 307)
"""Averages by three kinds, manual optimization, both signals, all ways to resume, the last batch of an epoch."""
PROGRAMS = 400


@pytest.fixture(scope="module")
def jobs() -> Iterator[ForkServer]:
    found = ForkServer(lightning_program)
    yield found
    found.close()


PLACES = ("batch", "validation", "epoch")
"""Where Lightning's own checkpoints are of: the end of a batch, of a validation, of an epoch."""


def lives(
    jobs: ForkServer, folder: Path, seed: int, way: str, began: list[str], places: Sequence[str] = PLACES
) -> Any:
    """Run a program until it ends, and return how.

    `began`: gets the position at which each life begins, or gives it.
    `places`: which of Lightning's own checkpoints at one position is taken.
    """
    folder.mkdir()
    for life, end in enumerate([*(Plan(seed).ends if way != "none" else ()), None]):
        at = began[life] if way == "own" and life else None
        jobs.ask({"side": str(folder), "seed": seed, "way": way, "end": end, "at": at, "places": places})
        ended = jobs.ask("reap")
        assert not ended["status"] or ended["signal"] == 9, (folder / "failure").read_text()
        if way == "store":
            began.append((folder / "began").read_text())
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


def known_losses(plan: Plan, began: list[str]) -> Iterator[set[str]]:
    """What of a state Lightning does not bring back where a life begins at some positions: the keys of the state.

    It keeps no gradients of batches that wait for a step, leaves out the end of a fit that had only that left, and
    saves the end of an epoch before its schedulers step. A `ModelCheckpoint` forgets of which step it has saved.
    """
    if plan.accumulates > 1:
        yield {"kept"}
    for steps, batches, _ in (map(int, place.split("-")) for place in began):
        if batches % plan.batches % plan.accumulates:
            yield {"model", "optimizers", "average", "EarlyStopping", "schedulers", "Notes"}
        if batches % plan.batches == 0 and plan.scheduler == "plateau":
            yield {"schedulers"}
        if steps == plan.max_steps or batches == plan.batches * plan.epochs:
            yield {"model", "average", "schedulers", "counts", "Notes", "EarlyStopping"}


def check_metadata(url: Path, seen: list[list[Any]]) -> None:
    """Check that each version has the epoch of its step, or of batches behind it, and no score but of its step."""
    epochs = {(one[2], one[0]) for one in seen if len(one) == 4}
    scores = [one for one in seen if len(one) == 2]
    for version in cnr_store.versions(url):
        assert (version.step, version.metadata["epoch"]) in epochs
        if "loss" in version.metadata:
            assert [version.step, version.metadata["loss"]] in scores


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed in BY_DAY else [pytest.mark.nightly]) for seed in range(PROGRAMS)],
)
def test_a_program_ends_as_without_a_kill(jobs: ForkServer, tmp_path: Path, seed: int) -> None:
    began: list[str] = []
    whole = lives(jobs, tmp_path / "none", seed, "none", began)
    resumed = lives(jobs, tmp_path / "store", seed, "store", began)
    plan = Plan(seed)
    check_metadata(tmp_path / "store" / "store", resumed["Notes"]["seen"])
    for lost in known_losses(plan, began):
        whole, resumed = (
            {key: one for key, one in state.items() if key not in lost} for state in (whole, resumed)
        )
    if found := differences(whole, resumed):
        # What Lightning's own checkpoints can't do is not asked for.
        orders = [PLACES[first:] + PLACES[:first] for first in range(len(PLACES))]
        own = (lives(jobs, tmp_path / f"own {order[0]}", seed, "own", began, order) for order in orders)
        assert any(not differences({key: one[key] for key in resumed}, resumed) for one in own), (
            f"{plan}: begun at {began}, {found}"
        )
