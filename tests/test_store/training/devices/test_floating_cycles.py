"""Optimizer state on floating grids that a device quantizes is stored in the bytes that the host would have written.

Where there is no GPU, tables on the CPU are taken for those of a device.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_store.catalog.catalog import open_record
from tests.test_store.chains.test_relative import RELATIVE, count_relative
from tests.test_store.support.rowwise_optimizers import OwnRowWise
from tests.test_store.training.devices.conftest import stays_on_host
from tests.test_store.training.devices.device import DEVICE
from tests.test_store.training.saving.test_compared import stored as stored_by
from tests.test_store.training.saving.test_state_auto import AUTO
from tests.test_store.training.saving.test_state_auto import Job as Dropping

pytestmark = pytest.mark.usefixtures("elsewhere")
ROWS, DIM = 4096, 3
SUM = "tables/items/sum"
EXP_AVG, EXP_AVG_SQ = "tables/films/exp_avg", "tables/films/exp_avg_sq"


class OneSum(OwnRowWise):
    """Keeps one number a row, without a second dimension."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, initial_accumulator_value=0.25)
        for state in self.state.values():
            state["sum"] = state["sum"].flatten()

    def update(self, parameter: Any, gradient: torch.Tensor, state: Any, group: Any) -> None:
        super().update(parameter, gradient, {**state, "sum": state["sum"][:, None]}, group)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, initial_accumulator_value=0.25, eps=1e-4)


class Job:
    """A table on the device, its optimizer, and their store."""

    def __init__(self, folder: Path, optimizer: Any, dtype: torch.dtype, codec: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Module()
        self.items = nn.Embedding(ROWS, DIM, dtype=dtype, device=DEVICE)
        self.model.add_module("items", self.items)
        self.optimizer = optimizer(self.model.parameters())
        self.sums.copy_(torch.randn(self.sums.shape).exp())
        self.sums[::5] = torch.finfo(dtype).max  # such rows are stored as they are
        options: dict[str, Any] = {"policy": "consecutive", "codec": {"*": codec}, "state_bits": "m3"}
        self.checkpointer = cnr_store.Checkpointer(
            str(folder),
            self.model,
            self.optimizer,
            tracking=cnr_store.Tracking(trusted_optimizers=[OneSum]),
            **options,
        )

    @property
    def sums(self) -> torch.Tensor:
        found: torch.Tensor = self.optimizer.state[self.items.weight]["sum"]
        return found

    def train(self, seed: int) -> None:
        ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:400]
        self.items(ids.to(DEVICE)).float().square().sum().div(9).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(folder: Path, optimizer: Any, dtype: torch.dtype, codec: Any) -> torch.Tensor:
    """Save a whole version and two deltas, load them into another model, go on, and save once more."""
    job = Job(folder, optimizer, dtype, codec)
    with job.checkpointer as checkpointer:
        for step in range(3):
            job.train(step % 2)
            record = checkpointer.save(step=step).result()
            assert record.kind == ("baseline" if step == 0 else "delta")
    other = Job(folder, optimizer, dtype, codec)
    with other.checkpointer as checkpointer:
        assert checkpointer.load().step == 2
        found = other.sums.cpu().clone()
        other.train(7)
        assert checkpointer.save(step=3).result().kind == "delta"
    return found


def stored(folder: Path) -> dict[str, bytes]:
    """All objects that hold rows, by their place."""
    files = [each for each in folder.rglob("c/**/*") if each.is_file()]
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


def counted() -> Callable[[int], str]:
    """What stands for random names: the same ones in each run."""
    numbers = count()
    return lambda size: f"{next(numbers):0{2 * size}x}"


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("codec", [{"id": "cnr_uniform", "scheme": "asymmetric", "bits": 4}, RELATIVE])
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [(adagrad, torch.float32), (adagrad, torch.bfloat16), (adagrad, torch.float16), (OneSum, torch.float32)],
)
def test_state_is_stored_in_the_bytes_of_the_host(
    optimizer: Any,
    dtype: torch.dtype,
    codec: dict[str, Any],
    tmp_path: Path,
    encoded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, objects = list[torch.Tensor](), list[dict[str, bytes]]()
    for name in ("device", "host"):
        if name == "host":
            stays_on_host(monkeypatch)
        monkeypatch.setattr(secrets, "token_hex", counted())  # names of versions, which seal their rows
        values.append(run(tmp_path / name, optimizer, dtype, codec))
        objects.append(stored(tmp_path / name))
    assert encoded.count(SUM) == 4
    assert torch.equal(values[0].view(torch.uint8), values[1].view(torch.uint8))
    assert any(f"{SUM}/c/" in place for place in objects[0])
    assert objects[0] == objects[1]
    url = str(tmp_path / "device")
    relative = [count_relative(url, each.id, SUM) for each in cnr_store.versions(url)]
    assert [each > 0 for each in relative] == [False, *["relative" in codec] * 2, False]


@pytest.mark.parametrize("codec", [{"id": "cnr_lattice", "step": 0.125}, {"id": "cnr_floating"}], ids=str)
def test_records_count_rows_that_a_device_quantized(tmp_path: Path, encoded: list[str], codec: Any) -> None:
    """How many are raw, on a finer step, and zero: as of rows that the host quantizes."""
    items = nn.Embedding(ROWS, DIM, device=DEVICE)
    with torch.no_grad():
        items.weight.uniform_(1, 2)
        items.weight[:10], items.weight[200:230] = torch.inf, 0
        items.weight[100:120] *= 1e-4
    model = nn.ModuleDict({"songs": items})
    cnr_store.save(str(tmp_path), model, codec=codec, policy="full")
    assert encoded == ["tables/songs/weight"]
    found = open_record(str(tmp_path), "latest")[1].arrays["tables/songs/weight"]
    assert (found.raw, found.finer, found.zero) == (10, 20 * ("step" in codec), 30)


def test_a_table_that_a_device_quantizes_gets_a_new_step(tmp_path: Path, encoded: list[str]) -> None:
    items = nn.Embedding(ROWS, DIM, device=DEVICE)
    codec: Any = {"id": "cnr_lattice", "rms_step": 0.1, "relative": True}
    model, options = nn.ModuleDict({"songs": items}), {"codec": codec, "policy": "consecutive"}
    with cnr_store.Checkpointer(tmp_path, model, **options) as checkpointer:
        for step in range(3):
            with torch.no_grad():
                items.weight[5], items.weight[6:] = torch.inf, items.weight[6:] * (3 if step == 1 else 1)
            checkpointer.touch("songs", range(5, ROWS))
            checkpointer.save(step).result()
    assert len(encoded) == 3
    assert [info.rows for info in cnr_store.versions(str(tmp_path))] == [ROWS, ROWS - 5, ROWS]


def test_state_by_its_kind_is_stored_alike(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        there = DEVICE.type == "cuda"
        rate = torch.tensor(0.002, device=DEVICE) if there else 0.002
        return torch.optim.Adam(parameters, lr=rate, capturable=there)

    job, other, random = (
        Dropping(make, device=DEVICE),
        Dropping(make, device=DEVICE),
        np.random.default_rng(1),
    )
    options = AUTO | {"policy": "consecutive"}
    with cnr_store.Checkpointer(str(tmp_path), job.model, job.optimizer, **options) as checkpointer:
        for step in range(3):
            job.train(random, 8)
            job.check(str(tmp_path), checkpointer.save(step).result().id, other)


def test_state_whose_grid_has_moved_is_left_to_the_host(tmp_path: Path, encoded: list[str]) -> None:
    torch.manual_seed(3)
    model = nn.ModuleDict({"films": nn.Embedding(ROWS, DIM, device=DEVICE)})
    weight = model.get_parameter("films.weight")
    optimizer = torch.optim.Adam([weight], lr=0.01)
    options: dict[str, Any] = {"codec": {"*": RELATIVE}, "state_bits": "m3", "policy": "consecutive"}
    with cnr_store.Checkpointer(str(tmp_path), model, optimizer, **options) as checkpointer:
        for step in range(2):
            weight.grad = torch.randn(weight.shape, device=DEVICE)
            weight.grad[: ROWS // 2] *= 1 - step  # these decay
            optimizer.step()
            encoded.clear()
            version = checkpointer.save(step).result().id
            assert encoded == ["tables/films/weight", *[EXP_AVG, EXP_AVG_SQ][: 2 * (1 - step)]]
    entries = open_record(str(tmp_path), version)[1].arrays
    state = optimizer.state[weight]
    expected = {
        path: stored_by(state[path.rpartition("/")[2]].cpu(), entries[path].codec)
        for path in (EXP_AVG, EXP_AVG_SQ)
    }
    for path in expected:
        assert entries[path].move > (1, 0)
        state[path.rpartition("/")[2]].zero_()
    cnr_store.load(str(tmp_path), model, optimizer)
    for path, values in expected.items():
        np.testing.assert_array_equal(state[path.rpartition("/")[2]].cpu().numpy(), values)
