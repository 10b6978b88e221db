"""Steps that once moved rows, or what is kept for them, without a trace: what a load returns tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

import cnr_store
from cnr_store import Checkpointer
from tests.test_store.support.tracked_table import ids

ROWS = 30


class Job:
    """A table that a checkpointer saves as deltas, without the audit, and its optimizer."""

    def __init__(
        self,
        place: Path,
        make: Callable[[Any], Optimizer],
        *,
        given: bool = True,
        dtype: torch.dtype = torch.float32,
        dim: int = 4,
        trusted: Sequence[type[Optimizer]] = (),
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"t": nn.Embedding(ROWS, dim, dtype=dtype)})
        self.optimizer = make(self.model.parameters())
        self._given = [self.optimizer] if given else []
        self._place, self._trusted = place, trusted
        self._again = partial(Job, place, make, given=given, dtype=dtype, dim=dim, trusted=trusted)

    @property
    def weight(self) -> nn.Parameter:
        found = self.model["t"].weight
        assert isinstance(found, nn.Parameter)
        return found

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(
            self._place,
            self.model,
            self._given,
            bits=32,
            policy="consecutive",
            tracking=cnr_store.Tracking(audit=False, trusted_optimizers=self._trusted),
        )

    def train(self, *rows: int) -> None:
        self.optimizer.zero_grad()
        self.model["t"](ids(*rows)).square().sum().backward()
        self.optimizer.step()

    def loaded(self) -> Job:
        """What the newest version holds, in a model of its own."""
        other = self._again()
        cnr_store.load(self._place, other.model, other._given)
        return other


class Dropping(Optimizer):
    """Moves every row by momentum, uncounted, and drops its gradients, as old code does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                kept = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter.data))
                kept.mul_(0.9).add_(parameter.grad)
                parameter.data.add_(kept, alpha=-0.1)
                parameter.grad = None


def test_a_step_of_an_optimizer_not_given_that_drops_its_gradients_is_seen(tmp_path: Path) -> None:
    job = Job(tmp_path, Dropping, given=False)
    with job.checkpointer() as checkpointer:
        for step in range(4):
            job.train(step)
            checkpointer.save(step).result()
    assert torch.equal(job.loaded().weight, job.weight)


@pytest.mark.parametrize(("dtype", "small"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-36)])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: Adagrad(parameters, lr=0.1, eps=1e-5, fused=True),
        lambda parameters: SGD(parameters, lr=10.0, fused=True),
    ],
)
def test_a_gradient_that_a_fused_step_unscales_to_zero_is_seen(
    tmp_path: Path, make: Callable[[Any], Optimizer], dtype: torch.dtype, small: float
) -> None:
    job = Job(tmp_path, make, dtype=dtype)
    job.weight.data.zero_()
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with job.checkpointer() as checkpointer:
        checkpointer.save(0).result()
        scaler.scale(torch.zeros(()))
        job.weight.grad = torch.zeros_like(job.weight)
        job.weight.grad[3], job.weight.grad[7] = small, 60
        scaler.step(job.optimizer)
        scaler.update()
        checkpointer.save(1).result()
    assert torch.equal(job.loaded().weight, job.weight)


def test_a_slot_in_the_place_of_another_entry_is_watched(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda parameters: Adagrad(parameters, lr=0.1))
    kept = job.optimizer.state[job.weight]
    kept["average"] = None  # a placeholder, as some optimizers make
    with job.checkpointer() as checkpointer:
        job.train(1)
        checkpointer.save(0).result()
        kept["average"] = torch.zeros(ROWS)
        job.train(2)
        checkpointer.save(1).result()
        kept["average"][4] = 9
        checkpointer.save(2).result()
    loaded = job.loaded()
    assert torch.equal(loaded.optimizer.state[loaded.weight]["average"], kept["average"])


class ByColumn(Optimizer):
    """Keeps one number a column, and moves only rows that have a gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            columns = self.state[parameter].setdefault("columns", torch.zeros(parameter.shape[1]))
            columns += parameter.grad.square().sum(0)
            parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize("dim", [ROWS, 4])
def test_state_of_a_square_table_may_be_kept_for_columns(tmp_path: Path, dim: int) -> None:
    job = Job(tmp_path, ByColumn, dim=dim, trusted=[ByColumn])
    with job.checkpointer() as checkpointer:
        for step in range(3):
            job.train(step)
            version = checkpointer.save(step).result()
    assert version.rows == 1  # that of a square table is found by comparison
    loaded = job.loaded()
    assert torch.equal(loaded.weight, job.weight)
    kept = (each.optimizer.state[each.weight]["columns"] for each in (loaded, job))
    assert torch.equal(*kept)


def transposed() -> torch.Tensor:
    return torch.zeros(4, ROWS).t()


def columns_of_a_wider_tensor() -> torch.Tensor:
    return torch.zeros(ROWS, 8)[:, :4]


@pytest.mark.parametrize("values", [transposed, columns_of_a_wider_tensor])
@pytest.mark.parametrize("kind", [Adagrad, SGD])
@pytest.mark.parametrize("given", [True, False])
def test_a_fused_step_of_a_table_with_gaps_is_seen(
    tmp_path: Path, values: Callable[[], torch.Tensor], kind: Any, given: bool
) -> None:
    job = Job(tmp_path, partial(kind, lr=0.1, fused=True), given=given)
    job.model["t"].weight = nn.Parameter(values())
    job.optimizer = kind(job.model.parameters(), lr=0.1, fused=True)
    job._given = [job.optimizer] if given else []
    with job.checkpointer() as checkpointer:
        checkpointer.save(0).result()
        job.model["t"](ids(10, 11)).sum().backward()
        job.optimizer.step()
        checkpointer.save(1).result()
    assert torch.equal(job.loaded().weight, job.weight)


def test_a_subnormal_eps_may_become_zero(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda parameters: Adagrad(parameters, lr=0.1, eps=1e-40))
    with job.checkpointer() as checkpointer:
        checkpointer.save(0).result()
        torch.set_flush_denormal(True)
        try:
            job.weight.grad = torch.zeros_like(job.weight)
            job.weight.grad[3] = 1
            job.optimizer.step()
        finally:
            torch.set_flush_denormal(False)
        checkpointer.save(1).result()
    assert torch.equal(job.loaded().weight.isnan(), job.weight.isnan())


def test_a_slot_that_another_entry_becomes_in_place_is_watched(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda parameters: Adagrad(parameters, lr=0.1))
    kept: Any = job.optimizer.state[job.weight]
    kept["average"] = torch.zeros(ROWS, dtype=torch.complex64)
    kept["mean"] = torch.zeros(())
    with job.checkpointer() as checkpointer:
        for step in range(3):
            job.train(step)
            checkpointer.save(step).result()
        average = kept["average"]
        average.data = average.data.real.clone()
        kept["mean"].data = torch.zeros(ROWS)
        checkpointer.save(3).result()
        for step in (4, 5):
            job.train(step)
            average[step], kept["mean"][step + 9] = 9, 9
            checkpointer.save(step).result()
    loaded = job.loaded()
    for name in ("average", "mean"):
        assert torch.equal(loaded.optimizer.state[loaded.weight][name], kept[name])


@pytest.mark.parametrize("in_place", [True, False])
def test_slots_that_change_places_make_the_table_whole(tmp_path: Path, in_place: bool) -> None:
    job = Job(tmp_path, lambda parameters: Adagrad(parameters, lr=0.1))
    job.optimizer.state[job.weight]["average"] = torch.zeros(ROWS, 4)
    with job.checkpointer() as checkpointer:
        for step in range(2):
            job.train(step)
            assert checkpointer.save(step).result().rows == (1 if step else ROWS)
        kept = job.optimizer.state[job.weight]
        swapped = {"step": kept["step"], "average": kept["sum"], "sum": kept["average"]}
        if in_place:
            kept.clear()
            kept.update(swapped)
        else:
            job.optimizer.state[job.weight] = swapped
        assert checkpointer.save(2).result().rows == ROWS
        job.train(3)
        assert checkpointer.save(3).result().rows == 1
    loaded = job.loaded()
    for name in ("average", "sum"):
        assert torch.equal(loaded.optimizer.state[loaded.weight][name], swapped[name])
