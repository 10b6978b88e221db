"""Sums of Adagrad that are NaN or negative beside values that are numbers: steps move such rows without a gradient."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

import cnr_store
from cnr_store import Checkpointer
from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking import stepped_tables
from cnr_store.training.tracking.tracker import Tracker
from tests.test_store.support.rowwise_optimizers import RowWiseAdagrad
from tests.test_store.support.tracked_table import ids, listed

ROWS = 60
BAD = 7
Make = Callable[[Any], Optimizer]
MAKERS: list[Make] = [
    partial(Adagrad, lr=0.1, foreach=True),
    partial(Adagrad, lr=0.1, fused=True),
    partial(Adagrad, lr=0.1, foreach=False),
    RowWiseAdagrad,
]
adagrad = MAKERS[0]


class Job:
    """A table of which one row had a gradient of NaN, and its optimizer."""

    def __init__(
        self, make: Make = adagrad, *, given: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"t": nn.Embedding(ROWS, 4, dtype=dtype)})
        self.optimizer = make(self.model.parameters())
        self.given = [self.optimizer] if given else []

    @property
    def weight(self) -> Any:
        return self.model["t"].weight

    @property
    def sums(self) -> torch.Tensor:
        kept: torch.Tensor = self.optimizer.state[self.weight]["sum"]
        return kept

    def train(self, row: int, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (self.model["t"](ids(row)).square().sum() * factor).backward()
        self.optimizer.step()

    def repair(self) -> None:
        with torch.no_grad():
            self.weight[self.weight.isnan()] = 0.5

    def checkpointer(self, url: Path) -> Checkpointer:
        return Checkpointer(url, self.model, self.given, bits=32, policy="consecutive", audit=False)

    def tracker(self) -> Tracker:
        return Tracker(find_tables(self.model), self.given)


def check_newest(url: Path, job: Job, make: Make = adagrad) -> None:
    """Check that a load gives what the job has."""
    other = Job(make, given=bool(job.given), dtype=job.weight.dtype)
    cnr_store.load(url, other.model, other.given)
    assert torch.equal(other.weight.nan_to_num(99), job.weight.nan_to_num(99))
    if job.given:
        assert torch.equal(other.sums.nan_to_num(99), job.sums.nan_to_num(99))


@pytest.mark.slow
@pytest.mark.some_by_day(6)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MAKERS)
def test_a_row_repaired_without_its_sum_is_saved_as_it_becomes(
    tmp_path: Path, make: Make, dtype: torch.dtype, given: bool
) -> None:
    job = Job(make, given=given, dtype=dtype)
    with job.checkpointer(tmp_path) as checkpointer:
        job.train(1)
        checkpointer.save(0).result()
        job.train(BAD, math.nan)
        job.repair()
        checkpointer.save(1).result()
        job.train(2)
        assert job.weight[BAD].isnan().all()
        assert checkpointer.save(2).result().rows == 2
        check_newest(tmp_path, job, make)
        job.train(3)  # the row is NaN for good: no step moves it any more
        checkpointer.save(3).result()
        job.train(4)
        assert checkpointer.save(4).result().rows < 5
    check_newest(tmp_path, job, make)


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False])
def test_a_sum_that_is_nan_from_the_begin_or_by_a_load_is_found(tmp_path: Path, given: bool) -> None:
    job = Job(given=given)
    cnr_store.save(tmp_path / "older", job.model, bits=32)
    job.train(BAD, math.nan)
    job.repair()
    with job.checkpointer(tmp_path / "newer") as checkpointer:
        checkpointer.save(0).result()
        job.train(2)
        checkpointer.save(1).result()
        check_newest(tmp_path / "newer", job)
    with Checkpointer(
        tmp_path / "older", job.model, bits=32, policy="consecutive", audit=False
    ) as checkpointer:
        checkpointer.load()
        job.train(3)
        assert job.weight[BAD].isnan().all()
        checkpointer.save(1).result()
    job.given = []
    check_newest(tmp_path / "older", job)


def test_rows_touched_after_they_were_repaired_are_looked_at() -> None:
    job = Job()
    tracker = job.tracker()
    job.train(BAD, math.nan)
    tracker.swap()
    job.train(3)
    job.weight.data[BAD] = 0.5
    tracker.mark("t", [BAD])
    assert listed(tracker.swap()["t"], ROWS) == [3, BAD]
    job.train(2)
    assert listed(tracker.swap()["t"], ROWS) == list(range(ROWS))
    job.train(2)
    tracker.mark("t", [4])
    job.train(5)
    assert listed(tracker.swap()["t"], ROWS) == [2, 4, 5]


def test_a_sum_set_by_hand_below_zero_makes_the_table_whole_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(RowWiseAdagrad)
    tracker = job.tracker()
    with torch.no_grad():
        job.sums[BAD] = -1
    tracker.swap()
    for _ in range(2):
        tracker.make_whole("t", "so that the row stays as it is")
        tracker.swap()
        with torch.no_grad():
            job.weight[BAD] = 0.5
        tracker.mark("t", [BAD])
        tracker.swap()
        with caplog.at_level(logging.WARNING, "cnr_store"):
            job.train(2)
            (reason,) = tracker.whole_reasons().values()
        assert reason.startswith("RowWiseAdagrad keeps a 'sum' that is NaN or negative")
        tracker.swap()
    assert "set these sums to numbers" in caplog.text
    with torch.no_grad():
        job.weight[BAD], job.sums[BAD] = 0.5, 0
    tracker.swap()
    job.train(2)
    assert listed(tracker.swap()["t"], ROWS) == [2]


@pytest.mark.parametrize("kind", MAKERS)
def test_ordinary_intervals_look_at_no_sums(kind: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(kind)
    tracker = job.tracker()
    job.train(1)
    tracker.swap()
    job.train(BAD, math.nan)
    looked: list[object] = []
    monkeypatch.setattr(stepped_tables, "unsound_sums", lambda *given: looked.append(given))
    for row in (2, 3):
        job.train(row)
        tracker.swap()
    assert not looked
    job.repair()
    tracker.swap()
    job.train(4)
    job.train(5)
    assert len(looked) == 1
