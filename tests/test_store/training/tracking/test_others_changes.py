"""Changes that others make beside those of a lookup or a step, from hooks or closures, are in the next save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

import cnr_store
from cnr_store import Checkpointer, VersionInfo, load
from tests.test_store.support.rowwise_optimizers import OwnRowWise

ROWS = 1000
Make = Callable[[], nn.Embedding | nn.EmbeddingBag]


class Job:
    """A table in training that others change too, and its checkpointer, which audits no rows."""

    def __init__(self, store: Path, table: nn.Module, kind: Any = SGD, **options: Any) -> None:
        self.store = store
        self.model = nn.ModuleDict({"t": table})
        self.table: Any = table
        self.optimizer: Any = kind(self.model.parameters(), lr=0.1)
        self.options = {
            "policy": "consecutive",
            "bits": 32,
            "tracking": cnr_store.Tracking(audit=False),
            **options,
        }
        self.is_changing = False

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self.store, self.model, self.optimizer, **self.options)

    @property
    def slots(self) -> Any:
        return self.optimizer.state[self.table.weight]

    def change(self, tensor: torch.Tensor, row: int = 7) -> None:
        """What others do, where the test wants it."""
        if self.is_changing:
            with torch.no_grad():
                tensor[row].add_(0.25)  # torch counts one change; of += it counts two

    def train(self, *rows: int) -> None:
        self.table(torch.tensor([rows])).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def assert_saved(self, fresh: nn.Module) -> None:
        """Check that the newest version is what is in memory."""
        model = nn.ModuleDict({"t": fresh})
        optimizer = type(self.optimizer)(model.parameters(), lr=0.1)
        load(self.store, model, optimizer)
        assert torch.equal(model.get_parameter("t.weight"), self.table.weight)
        for key, slot in self.slots.items():
            found = optimizer.state[model.get_parameter("t.weight")][key]
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(slot))


def embedding() -> nn.Embedding:
    return nn.Embedding(ROWS, 4, max_norm=0.01)  # less than any row has


def bag() -> nn.EmbeddingBag:
    return nn.EmbeddingBag(ROWS, 4, max_norm=0.01)


def hook(job: Job, when: str, *, prepend: bool = False) -> None:
    register = job.table.register_forward_pre_hook if when == "before" else job.table.register_forward_hook
    register(lambda *_: job.change(job.table.weight), prepend=prepend)


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("make", [embedding, bag])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("prepend", [True, False])
@pytest.mark.parametrize("registered", ["earlier", "later"])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_others_change_beside_a_lookup_with_max_norm_is_saved(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Make,
    when: str,
    prepend: bool,
    registered: str,
    compiled: bool,
) -> None:
    torch._dynamo.reset()
    job = Job(tmp_path, make())
    if registered == "earlier":
        hook(job, when, prepend=prepend)
    with job.checkpointer() as checkpointer:
        if registered == "later":
            hook(job, when, prepend=prepend)
        lookup = torch.compile(job.table, backend="eager") if compiled else job.table
        checkpointer.save(1).result()
        lookup(torch.tensor([[3]]))
        assert checkpointer.save(2).result().rows == 1
        job.is_changing = True
        lookup(torch.tensor([[3]]))
        job.is_changing = False
        assert checkpointer.save(3).result().rows in (1, 2)  # row 7, and row 3 where its norm was rounded up
        assert "compared with what is stored: its module has max_norm" in caplog.text
        job.assert_saved(make())


@pytest.mark.parametrize("make", [embedding, bag])
@pytest.mark.parametrize("rows", [[], [3], [3, 3, 5]])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_lookups_with_max_norm_are_no_changes_by_others(
    tmp_path: Path, make: Make, rows: list[int], mode: Callable[[], Any]
) -> None:
    job = Job(tmp_path, make())
    offsets = [torch.tensor([0])] if make is bag else []
    with job.checkpointer() as checkpointer:
        checkpointer.save(1).result()
        with mode():
            for _ in range(2):
                job.table(torch.tensor(rows, dtype=torch.int64), *offsets)
        assert checkpointer.save(2).result().rows == len({*rows})
        job.assert_saved(make())


def sparse() -> nn.Embedding:
    return nn.Embedding(ROWS, 4, sparse=True)


def in_pre_hook(job: Job, slot: str) -> None:
    job.optimizer.register_step_pre_hook(lambda *_: job.change(job.slots[slot]))


def in_post_hook(job: Job, slot: str) -> None:
    job.optimizer.register_step_post_hook(lambda *_: job.change(job.slots[slot]))


def in_closure(job: Job, slot: str) -> None:
    step = job.optimizer.step

    def closure() -> float:
        job.change(job.slots[slot])
        return 0.0

    job.optimizer.step = lambda: step(closure)


def save_a_changed_slot(job: Job, slot: str, changes: Callable[[Job, str], None]) -> VersionInfo:
    changes(job, slot)
    with job.checkpointer() as checkpointer:
        checkpointer.save(1).result()
        job.train(3)
        assert checkpointer.save(2).result().rows == 1
        job.is_changing = True
        job.train(3)
        job.is_changing = False
        return checkpointer.save(3).result()


@pytest.mark.parametrize("changes", [in_pre_hook, in_post_hook, in_closure])
@pytest.mark.parametrize("kind", [SGD, Adagrad, SparseAdam])
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 4)])
def test_a_step_explains_no_change_of_a_slot_of_the_callers_own(
    tmp_path: Path, kind: type[Optimizer], changes: Callable[[Job, str], None], shape: tuple[int, ...]
) -> None:
    job = Job(tmp_path, sparse(), kind)
    job.train(1)
    job.slots["ema"] = torch.zeros(shape)
    assert save_a_changed_slot(job, "ema", changes).rows == ROWS
    job.assert_saved(sparse())


@pytest.mark.parametrize("changes", [in_pre_hook, in_post_hook, in_closure])
@pytest.mark.parametrize(
    ("kind", "slot"), [(Adagrad, "sum"), (SparseAdam, "exp_avg"), (SparseAdam, "exp_avg_sq")]
)
def test_a_step_explains_one_change_of_a_slot_that_it_writes(
    tmp_path: Path, kind: type[Optimizer], slot: str, changes: Callable[[Job, str], None]
) -> None:
    job = Job(tmp_path, sparse(), kind)
    job.train(1)
    assert save_a_changed_slot(job, slot, changes).rows == ROWS
    job.assert_saved(sparse())


@pytest.mark.parametrize("changes", [in_pre_hook, in_post_hook, in_closure])
def test_a_step_without_momentum_explains_no_change_of_what_momentum_left(
    tmp_path: Path, changes: Callable[[Job, str], None]
) -> None:
    job = Job(tmp_path, nn.Embedding(ROWS, 4))
    job.optimizer.param_groups[0]["momentum"] = 0.9
    job.train(1)
    job.optimizer.param_groups[0]["momentum"] = 0
    assert save_a_changed_slot(job, "momentum_buffer", changes).rows == ROWS
    job.assert_saved(nn.Embedding(ROWS, 4))


def test_a_trusted_step_explains_every_change(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        nn.Embedding(ROWS, 4),
        OwnRowWise,
        tracking=cnr_store.Tracking(audit=False, trusted_optimizers=[OwnRowWise]),
    )
    job.train(1)
    job.slots["ema"] = torch.zeros(ROWS, 4)
    job.optimizer.register_step_pre_hook(lambda *_: job.change(job.slots["ema"], row=3))
    with job.checkpointer() as checkpointer:
        checkpointer.save(1).result()
        job.is_changing = True
        job.train(3)
        assert checkpointer.save(2).result().rows == 1
        job.assert_saved(nn.Embedding(ROWS, 4))


def test_an_optimizer_made_anew_for_dense_parameters_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({"t": nn.Embedding(ROWS, 4), "top": nn.Linear(4, 1)})
    given = [SGD(model["t"].parameters(), lr=0.1), Adagrad(model["top"].parameters())]
    anew, own = Adagrad(model["top"].parameters()), SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with Checkpointer(tmp_path, model, given) as checkpointer:
        for optimizer in (*given, own):
            optimizer.step()
        checkpointer.save(1).result()
        caplog.clear()
        for step in (2, 3):
            anew.step()
            checkpointer.save(step).result()
    (line,) = caplog.messages
    assert line.startswith("2 parameters of the model are updated by Adagrad, whose state is in no version")
