"""TorchRec jobs that are killed and go on with other numbers of ranks and other shardings. They need TorchRec."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.nightly import NIGHT, TODAY
from tests.test_store.ranks.support.rank_processes import preload, run_ranks
from tests.test_store.support.same_arrays import assert_same_arrays

LIFE = "tests.test_store.ranks.support.torchrec_life:life"
STEPS = 6
LAST_STEPS = 50 if NIGHT else 12
RUNS = [(2, "rtcd"), (3, "tcrd"), (1, "ccrd"), (4, "qrtd")]
"""How many ranks and which shardings; by day one of the first three is killed, on each day another."""

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="needs TorchRec"),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    preload("torchrec")


def run(folder: Path, world: int, sharding: str, optimizer: str, last_step: int, dies: bool = False) -> Any:
    """A life of a job, which leaves files: see `life`."""
    signals = {(0, "kill"): [(rank, signal.SIGKILL) for rank in range(world)]} if dies else {}
    arguments = str(folder), sharding, optimizer, last_step, dies
    outcomes = run_ranks(world, LIFE, *arguments, signals=signals, deadline_seconds=300)
    if dies:
        assert {each.signal for each in outcomes} == {signal.SIGKILL}, outcomes
        return None
    assert [each.where for each in outcomes] == [""] * world
    return outcomes[0].value


def left(folder: Path, name: str) -> dict[str, Any]:
    """What a life left in a file."""
    found = torch.load(folder / f"{name}.pt")
    return {name: value.numpy() for name, value in found.items()}


def test_a_killed_run_goes_on_over_ranks_and_shardings(tmp_path: Path) -> None:
    folder, alone = tmp_path / "run", tmp_path / "alone"
    folder.mkdir()
    alone.mkdir()
    last = 0
    for world, sharding in RUNS if NIGHT else (RUNS[TODAY % 3], RUNS[-1]):
        before, dies = last, world != 4
        last += STEPS if dies else LAST_STEPS
        run(folder, world, sharding, "EXACT_ADAGRAD", last, dies)
        start = max(int(path.stem.removeprefix("loaded")) for path in folder.glob("loaded*"))
        # The save that the kill cut short exists, or else the one before it.
        assert start in ({before - 1, before} if before else {0})
        if start:
            assert_same_arrays(left(folder, f"loaded{start}"), left(folder, str(start)))
    run(alone, 1, "tttd", "EXACT_ADAGRAD", last)
    end, expected = (left(each, str(last)) for each in (folder, alone))
    assert end.keys() == expected.keys()
    for name, values in end.items():
        np.testing.assert_allclose(
            values, expected[name], rtol=0, atol=1e-5 * abs(values).max(), err_msg=name
        )
