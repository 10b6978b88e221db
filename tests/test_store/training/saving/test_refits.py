"""A step that no longer fits its table is found anew: the next version holds the table whole, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store import Checkpointer, SaveError
from cnr_store.catalog.catalog import open_record

ROWS, DIM = 3000, 8
PATH = "tables/t/weight"
LATTICE = {"id": "cnr_lattice", "rms_step": 0.1, "relative": True}
BEYOND = "rows are beyond its step, and were stored as they are"
DOUBLED = "its values have doubled since it got its step"
HALVED = "its values have halved since it got its step"
Change = Callable[[torch.Tensor, int], Any]
"""Changes rows before a save of that step, and returns which."""


def new_model(scale: float = 1.0) -> nn.ModuleDict:
    torch.manual_seed(5)
    table = nn.EmbeddingBag(ROWS, DIM, sparse=True)
    with torch.no_grad():
        table.weight *= scale
    return nn.ModuleDict({"t": table})


def save(checkpointer: Checkpointer, model: nn.Module, change: Change, steps: range) -> None:
    weight = model.get_parameter("t.weight")
    for step in steps:
        with torch.no_grad():
            rows = change(weight, step)
        checkpointer.touch("t", rows)
        checkpointer.save(step).result()


def run(url: Any, model: nn.Module, change: Change, steps: int, **options: Any) -> None:
    options = {"codec": {"*": LATTICE}, "policy": "consecutive", **options}
    with Checkpointer(url, model, **options) as checkpointer:
        save(checkpointer, model, change, range(steps))


def whole(url: Path) -> dict[int, str]:
    """Of the versions behind the first, the steps of those that hold the table whole, and why."""
    found = {}
    for info in cnr_store.versions(str(url))[1:]:
        record = open_record(str(url), info.id)[1]
        if record.arrays[PATH].base is None:
            (found[record.step],) = record.policy["whole"]
    return found


def entry(url: Path, step: int) -> Any:
    return open_record(str(url), step)[1].arrays[PATH]


def some(step: int, count: int = ROWS // 20) -> torch.Tensor:
    """Rows of a step."""
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))[:count]


def trained(weight: torch.Tensor, step: int) -> Any:
    rows: Any = some(step) if step else []
    if step:
        weight[rows] += 0.1 * torch.randn(len(rows), DIM, generator=torch.Generator().manual_seed(step))
    return rows


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
def test_zeros_that_are_trained_get_a_step(tmp_path: Path, policy: str, relative: bool) -> None:
    model = new_model(0)
    run(tmp_path, model, trained, 4, policy=policy, codec={"*": LATTICE | {"relative": relative}})
    assert whole(tmp_path) == {2: DOUBLED}
    assert [entry(tmp_path, step).raw for step in range(4)] == [0, ROWS // 20, 0, 0]
    error = cnr_store.state_dict(tmp_path, 3)["t.weight"] - model.get_parameter("t.weight").detach().numpy()
    assert 0 < np.abs(error).max() <= entry(tmp_path, 3).codec["step"] / 2


@pytest.mark.parametrize(
    ("policy", "factor", "why"),
    [("consecutive", 2.2, DOUBLED), ("one-shot", 2.2, DOUBLED), ("one-shot", 0.4, HALVED)],
)
def test_a_table_that_grows_or_shrinks_gets_a_step(
    tmp_path: Path, policy: str, factor: float, why: str
) -> None:
    """Each save changes a third of the rows, so that no delta of the last version's has most of the values."""

    def moved(weight: torch.Tensor, step: int) -> Any:
        rows = torch.arange(step % 3, ROWS, 3)
        weight[rows] *= factor if step else 1
        return rows

    model = new_model(1e-4)
    run(tmp_path, model, moved, 8, policy=policy)
    assert whole(tmp_path) == {4: why}
    scale = float(model.get_parameter("t.weight").detach().abs().median()) * 1.4826
    assert 1 / 3 < entry(tmp_path, 7).codec["step"] / (0.1 * scale) < 3


@pytest.mark.slow
def test_rows_that_no_step_can_take_make_one_version_whole(tmp_path: Path) -> None:
    """Two per cent of NaN and 1e30 for ever: also where the job goes on from a load."""

    def broken(weight: torch.Tensor, step: int) -> Any:
        bad = torch.arange(0, ROWS, 50)
        weight[bad] = torch.nan if step % 2 else 1e30
        weight[some(step)] += 0.001
        return torch.cat([bad, some(step)])

    def broken_later(weight: torch.Tensor, step: int) -> Any:
        return broken(weight, step) if step else []

    run(tmp_path / "first", new_model(), broken, 6)
    assert whole(tmp_path / "first") == {}
    model = new_model()
    run(tmp_path / "later", model, broken_later, 7)
    assert whole(tmp_path / "later") == {3: BEYOND}
    with Checkpointer(tmp_path / "later", model, codec={"*": LATTICE}, policy="consecutive") as checkpointer:
        checkpointer.load()
        save(checkpointer, model, broken, range(7, 11))
    assert whole(tmp_path / "later") == {3: BEYOND}


def test_few_rows_and_one_version_of_many_are_no_reason(tmp_path: Path) -> None:
    def broken(weight: torch.Tensor, step: int) -> Any:
        rows = torch.arange(0, ROWS, 40 if step % 2 else 110)
        weight[rows] = torch.nan if step else 1
        return rows

    run(tmp_path, new_model(), broken, 6)
    assert whole(tmp_path) == {}


def test_rows_looked_up_may_be_greater_than_the_others(tmp_path: Path) -> None:
    """What a delta holds is no sample of the table."""
    model = new_model()
    hot = torch.arange(0, ROWS, 5)

    def popular(weight: torch.Tensor, step: int) -> Any:
        weight[hot] *= 1.01 if step else 20
        return hot

    run(tmp_path, model, popular, 8)
    assert whole(tmp_path) == {}


def test_a_given_step_stays(tmp_path: Path) -> None:
    def huge(weight: torch.Tensor, step: int) -> Any:
        weight[:] = torch.randn(ROWS, DIM) * 1000.0**step
        return range(ROWS)

    codec = {"id": "cnr_lattice", "step": 0.0625, "rms_step": 0.1, "relative": True}
    run(tmp_path, new_model(), huge, 5, codec={"*": codec})
    assert whole(tmp_path) == {}
    assert entry(tmp_path, 4).raw == ROWS


@pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
def test_compared_tables_get_a_step(tmp_path: Path, policy: Any) -> None:
    """`explain` says so before; the state beside them stays a delta; and a save that fails forgets it not."""
    model, fails = new_model(1e-4), [False]
    weight: Any = model.get_parameter("t.weight")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def fault(operation: str, key: str, index: int) -> Any:
        return "before" if fails[0] and operation == "create" and key.startswith("versions/") else None

    backend = FaultyBackend(open_backend(tmp_path), fault)
    options: dict[str, Any] = {"codec": {"*": LATTICE}, "state_bits": {"*": "m3"}, "policy": policy}
    with Checkpointer(
        backend, model, optimizer, **options, failures=cnr_store.Failures(retry_seconds=0)
    ) as checkpointer:
        for step in range(4):
            (torch.randn(ROWS, DIM) * weight).sum().backward()
            optimizer.step()
            if step == 2:
                with torch.no_grad():
                    weight *= 10
            (table,) = checkpointer.explain()
            assert (table.whole, table.compared) == (step in (0, 3), step in (1, 2))
            if step == 3:
                assert (table.why, table.changed) == (DOUBLED, ROWS)
                fails[0] = True
                with pytest.raises(SaveError):
                    checkpointer.save(step).result()
                fails[0] = False
            checkpointer.save(step).result()
    assert whole(tmp_path) == {3: DOUBLED}
    kinds = {path: each.kind for path, each in open_record(str(tmp_path), 3)[1].arrays.items()}
    assert kinds["tables/t/exp_avg"] == kinds["tables/t/exp_avg_sq"] == "delta"
    assert not cnr_store.verify(str(tmp_path), deep=True).problems
