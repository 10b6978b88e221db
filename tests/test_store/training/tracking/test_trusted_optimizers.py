"""Row-wise Adagrad, and classes that a caller vouches for: tables are saved by rows, exactly."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import cnr_store
from cnr_store import Checkpointer, OptionError, TrackingError
from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking.tracker import Tracker
from tests.test_store.support.rowwise_optimizers import (
    OWN,
    DropsGradients,
    FailsBehindUpdate,
    Lies,
    OwnRowWise,
    RowWiseAdagrad,
    TwoChanges,
)
from tests.test_store.support.tracked_table import listed, moves_untouched

ROWS, DIM = 500, 4


class Job:
    """A model of one bag of rows and a layer, its optimizer and a checkpointer."""

    def __init__(self, url: Path, kind: Any, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.EmbeddingBag(ROWS, DIM, mode="sum"), nn.Linear(DIM, 1, bias=False))
        self.weight = self.model.get_parameter("0.weight")
        self.optimizer: Optimizer = kind(self.model.parameters(), lr=0.1)
        given: dict[str, Any] = {"bits": 32, "policy": "consecutive"} | options
        self.checkpointer = Checkpointer(url, self.model, self.optimizer, **given)

    def backward(self, *rows: int) -> None:
        self.model(torch.tensor([rows])).square().sum().backward()

    def train(self, *rows: int) -> None:
        self.optimizer.zero_grad()
        self.backward(*rows)
        self.optimizer.step()

    def rows_saved(self, step: int) -> int:
        return self.checkpointer.save(step).result().rows

    def bits(self) -> list[bytes]:
        """Of all values, and all that is kept beside them."""
        kept = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        beside = [slots[name] for slots in kept for name in ("step", "sum")]
        return [tensor.detach().numpy().tobytes() for tensor in (*self.model.parameters(), *beside)]


@pytest.fixture
def closing() -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.checkpointer.close()


def check_small_deltas(tmp_path: Path, closing: list[Job], kind: Any, **options: Any) -> None:
    """Train, save by rows, load elsewhere bit for bit, and go on there."""
    job = Job(tmp_path, kind, **options)
    closing.append(job)
    job.train(*range(ROWS))
    assert job.rows_saved(0) == ROWS
    for step in range(1, 5):
        job.train(step, 2 * step)
        job.train(50 + step)
        assert job.rows_saved(step) == 3
    other = Job(tmp_path, kind, seed=1, **options)
    closing.append(other)
    other.checkpointer.load()
    assert other.bits() == job.bits()
    for one in (job, other):
        one.train(3, 77)
    assert other.bits() == job.bits()
    assert other.rows_saved(9) == 2


@pytest.mark.slow
def test_torchrecs_class_is_saved_by_rows(tmp_path: Path, closing: list[Job]) -> None:
    check_small_deltas(tmp_path, closing, RowWiseAdagrad)
    stored = cnr_store.open(tmp_path)["tables/0/sum"]
    assert isinstance(stored, zarr.Array)
    assert stored.shape == (ROWS, 1)


@pytest.mark.slow
@pytest.mark.each_by_day
@pytest.mark.parametrize("kind", OWN)
def test_a_class_of_ones_own_is_saved_by_rows(
    tmp_path: Path, closing: list[Job], kind: type[Optimizer]
) -> None:
    Adagrad([nn.Parameter(torch.zeros(1))])  # after which its step calls hooks, whoever calls it
    check_small_deltas(tmp_path, closing, kind, tracking=cnr_store.Tracking(trusted_optimizers=[kind]))


@pytest.mark.parametrize("kind", [OwnRowWise, TwoChanges])
def test_rows_looked_up_before_a_save_and_stepped_after_it_are_in_the_next(
    tmp_path: Path, closing: list[Job], kind: Any
) -> None:
    job = Job(tmp_path, kind, tracking=cnr_store.Tracking(trusted_optimizers=(kind,)))
    closing.append(job)
    job.train(1)
    job.rows_saved(0)
    job.optimizer.zero_grad()
    job.backward(7)
    assert [job.rows_saved(step) for step in (1, 2)] == [0, 0]
    job.optimizer.step()
    assert job.rows_saved(3) == 1


@pytest.mark.parametrize("kind", OWN)
def test_a_step_may_do_what_it_likes_with_gradients_and_counters(kind: Any) -> None:
    table = nn.Embedding(ROWS, DIM)
    optimizer = kind(table.parameters(), lr=0.1)
    tracker = Tracker(find_tables(table), [optimizer], {kind})
    for row in (3, 5):
        table(torch.tensor([row])).sum().backward()
        for _ in range(3):
            tracker.swap()
        optimizer.step()
        (flagged,) = tracker.swap().values()
        assert listed(flagged, ROWS) == [row]
        optimizer.zero_grad()


def test_a_change_that_no_gradient_is_left_of_is_not_believed(tmp_path: Path, closing: list[Job]) -> None:
    job = Job(tmp_path, DropsGradients, tracking=cnr_store.Tracking(trusted_optimizers=[DropsGradients]))
    closing.append(job)
    for step in range(2):
        job.train(step)
        assert job.rows_saved(step) == (1 if step else ROWS)


def test_rows_of_a_step_that_raised_behind_its_update_are_flagged() -> None:
    table = nn.Embedding(ROWS, DIM)
    optimizer = FailsBehindUpdate(table.parameters())
    tracker = Tracker(find_tables(table), [optimizer], {FailsBehindUpdate})
    table(torch.tensor([3])).sum().backward()
    for _ in range(3):
        tracker.swap()
    with pytest.raises(RuntimeError, match="behind the update"):
        optimizer.step()
    (flagged,) = tracker.swap().values()
    assert listed(flagged, ROWS) == [3]


def test_changes_of_others_are_noticed_as_ever(tmp_path: Path, closing: list[Job]) -> None:
    job = Job(tmp_path, OwnRowWise, tracking=cnr_store.Tracking(trusted_optimizers=[OwnRowWise]))
    closing.append(job)
    job.train(1)
    job.rows_saved(0)
    for step, tensor in enumerate((job.weight, job.optimizer.state[job.weight]["sum"]), 1):
        with torch.no_grad():
            tensor[9] += 1
        job.train(2)
        # Once it was saved whole for that reason, all rows are compared with those stored.
        assert job.rows_saved(step) == (ROWS if step == 1 else 1)
    job.train(2)
    assert job.rows_saved(3) == 1


def test_a_class_that_moves_other_rows_is_caught(tmp_path: Path, closing: list[Job]) -> None:
    job = Job(tmp_path, Lies, tracking=cnr_store.Tracking(trusted_optimizers=[Lies]))
    closing.append(job)
    job.train(1)
    job.rows_saved(0)
    job.train(2)
    with pytest.raises(TrackingError, match=f"table '0': row {ROWS - 1} of tables/0/weight"):
        job.checkpointer.save(1)
    assert job.rows_saved(2) == ROWS


class Subclass(RowWiseAdagrad):
    """May do anything."""


class Namesake(OwnRowWise):
    __qualname__ = "RowWiseAdagrad"


@pytest.mark.parametrize("kind", [Subclass, Namesake, OwnRowWise])
def test_others_are_compared_and_the_log_says_what_to_do(
    tmp_path: Path, closing: list[Job], kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, kind, tracking=cnr_store.Tracking(trusted_optimizers=[RowWiseAdagrad, Lies]))
    closing.append(job)
    with caplog.at_level(logging.WARNING, "cnr_store"):
        for step in range(3):
            job.train(step)
            assert job.rows_saved(step) == (1 if step else ROWS)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{kind.__name__}, parameter group 0: a step of this class may move every row" in said
    assert "trusted_optimizers" in said


def test_nobody_is_told_to_trust_torchs_own() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    reason = moves_untouched(Adam([weight]), weight)
    assert reason is not None
    assert "trusted" not in reason


def test_settings_of_known_classes_count_whoever_trusts_them(tmp_path: Path, closing: list[Job]) -> None:
    def momentum(params: Any, lr: float) -> SGD:
        return SGD(params, lr=lr, momentum=0.9)

    job = Job(tmp_path, momentum, tracking=cnr_store.Tracking(trusted_optimizers=[SGD, RowWiseAdagrad]))
    closing.append(job)
    for step in range(2):
        job.train(step)
        assert job.rows_saved(step) == (2 if step else ROWS)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"weight_decay": 0.1}, r"RowWiseAdagrad, parameter group 0: weight_decay=0\.1"),
        ({"maximize": True}, r"maximize=1\.0"),
        ({"lr": math.inf}, "lr=inf"),
        ({"lr": 1e39}, r"lr=1e\+39"),
        ({"eps": 0.0}, "eps=0"),
        ({"eps": 1e-60}, "eps=1e-60"),
        ({"lr_decay": 0.5, "initial_accumulator_value": 0.1}, None),
    ],
)
def test_settings_of_torchrecs_class_are_looked_at(settings: dict[str, Any], why: str | None) -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    reason = moves_untouched(RowWiseAdagrad([weight], **settings), weight)
    assert (reason is None) == (why is None)
    if why is not None:
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(reason)


@pytest.mark.parametrize(
    "given",
    [
        OwnRowWise,
        "OwnRowWise",
        None,
        3,
        ["OwnRowWise"],
        [nn.Linear],
        [OwnRowWise, None],
        lambda: [OwnRowWise],
    ],
)
def test_what_is_no_list_of_optimizer_classes_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(OptionError, match="trusted_optimizers"):
        Checkpointer(tmp_path, nn.Embedding(3, 2), tracking=cnr_store.Tracking(trusted_optimizers=given))


def test_objects_are_refused(tmp_path: Path) -> None:
    table = nn.Embedding(3, 2)
    mine: Any = [OwnRowWise(table.parameters())]
    with pytest.raises(
        OptionError, match=r"trusted_optimizers holds an object of type OwnRowWise: give subclasses"
    ):
        Checkpointer(tmp_path, table, mine, tracking=cnr_store.Tracking(trusted_optimizers=mine))


class OfClosure(Optimizer):
    """Moves rows uncounted, by gradients that its closure makes, and drops them or fails."""

    def __init__(self, params: Any, fails: bool) -> None:
        super().__init__(params, {})
        self.fails = fails

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1)
            if self.fails:
                raise ArithmeticError
            parameter.grad = None


@pytest.mark.parametrize("is_stale", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_closures_gradient_that_is_not_left_makes_the_table_whole(fails: bool, is_stale: bool) -> None:
    table = nn.Embedding(ROWS, DIM)
    optimizer = OfClosure(table.parameters(), fails)
    tracker = Tracker(find_tables(table), [optimizer], {OfClosure})
    if is_stale:
        table(torch.tensor([3])).sum().backward()
    tracker.swap()

    def closure() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.embedding(torch.tensor([9]), table.weight).sum())

    with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
        optimizer.step(closure)
    (flagged,) = tracker.swap().values()
    assert listed(flagged, ROWS) == list(range(ROWS))


def test_a_gradient_removed_uncounted_makes_the_table_whole_and_none_leaves_it() -> None:
    tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(2))

    class Drops(Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad)
                    parameter.grad = None

    optimizer = Drops(tables.parameters(), {})
    tracker = Tracker(find_tables(tables), [optimizer], {Drops})
    tables[0](torch.tensor([3])).sum().backward()
    optimizer.step()
    first, second = tracker.swap().values()
    assert listed(first, ROWS) == list(range(ROWS))
    assert listed(second, ROWS) == []
