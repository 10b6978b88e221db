"""Rows that moved out of sight are saved: a table is whole where a counter, or its memory, tells of a change."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

import cnr_store
from tests.test_store.support.hogwild import train_shared
from tests.test_store.support.tracked_table import ROWS, backward, ids


class Job:
    """A model with the table ``t``, and a checkpointer of deltas; each save is compared with the live table."""

    def __init__(self, url: Path, optimizer: str = "given", *, share: bool = False) -> None:
        torch.manual_seed(0)
        self.url = url
        self.table = nn.Embedding(ROWS, 3, sparse=True)
        self.model = nn.ModuleDict({"t": self.table})
        if share:
            self.model.share_memory()
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        self.checkpointer = cnr_store.Checkpointer(
            url,
            self.model,
            self.optimizer if optimizer == "given" else None,
            policy="consecutive",
            bits=32,
            tracking=cnr_store.Tracking(audit=False),
        )
        self.step = 0
        self.save()

    def look(self, *rows: int) -> None:
        """Look rows up for training."""
        self.table(ids(*rows)).sum()

    def write(self, *rows: int) -> None:
        """Change rows by hand."""
        with torch.no_grad():
            self.table.weight[ids(*rows)] += 1

    def train(self, *rows: int, optimizer: Optimizer | None = None) -> None:
        backward(self.table(ids(*rows)).square().sum())
        (optimizer or self.optimizer).step()
        self.table.zero_grad()

    def save(self) -> int:
        """Save, compare what a load gives with the table, bit for bit, and return the rows written."""
        self.step += 1
        info = self.checkpointer.save(self.step).result()
        other = nn.ModuleDict({"t": nn.Embedding(ROWS, 3)})
        cnr_store.load(self.url, other, tables="t")
        saved, live = other.get_parameter("t.weight"), self.table.weight
        assert torch.equal(saved.view(torch.int32), live.view(torch.int32))
        return info.rows


@contextmanager
def job(url: Path, optimizer: str = "given", *, share: bool = False) -> Iterator[Job]:
    made = Job(url, optimizer, share=share)
    with made.checkpointer:
        yield made


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """The only warning."""
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    return record.getMessage()


@pytest.mark.slow
def test_rows_that_other_processes_train_are_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(tmp_path, share=True) as run:
        spawning = multiprocessing.get_context("spawn")
        here, there = spawning.Pipe()
        process = spawning.Process(target=train_shared, args=(run.model, there), daemon=True)
        process.start()
        there.close()
        for rows in ([3, 4], [5], [6]):
            here.send(rows)
            run.train(1)
            assert here.recv() == rows
            assert run.save() == ROWS
        here.send([])
        process.join()
        assert process.exitcode == 0
    assert "shared with other processes" in logged(caplog)


def test_a_table_is_whole_from_when_its_memory_is_shared(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        run.train(1)
        assert run.save() == 1
        run.model.share_memory()
        for _ in range(3):
            run.train(1)
            assert run.save() == ROWS


def test_a_table_is_whole_if_the_state_of_its_optimizer_is_shared(tmp_path: Path) -> None:
    model = nn.Embedding(ROWS, 3)
    optimizer = Adagrad(model.parameters())
    optimizer.share_memory()
    with cnr_store.Checkpointer(
        tmp_path, model, optimizer, policy="consecutive", bits=32, tracking=cnr_store.Tracking(audit=False)
    ) as checkpointer:
        checkpointer.save(1).result()
        optimizer.state[model.weight]["sum"].numpy()[7] = 5  # as another process would
        checkpointer.save(2).result()
    other = nn.Embedding(ROWS, 3)
    loaded = Adagrad(other.parameters())
    cnr_store.load(tmp_path, other, loaded)
    assert torch.equal(loaded.state[other.weight]["sum"], optimizer.state[model.weight]["sum"])


def by_hand(run: Job) -> None:
    run.look(1)
    run.write(9)


def by_hand_before_a_step(run: Job) -> None:
    by_hand(run)
    run.train(2)


def by_hand_after_a_step(run: Job) -> None:
    run.train(2)
    by_hand(run)


def past_the_module(run: Job) -> None:
    run.look(1)
    backward(nn.functional.embedding(ids(9), run.table.weight).sum())
    with torch.no_grad():
        run.table.weight.sub_(torch.as_tensor(run.table.weight.grad))
    run.table.weight.grad = None


def past_the_hooks(run: Job) -> None:
    run.look(1)
    backward(run.table.forward(ids(9)).sum())
    with torch.no_grad():
        run.table.weight[9] -= 1
    run.table.weight.grad = None


def by_a_renorm_past_the_hooks(run: Job) -> None:
    run.look(1)
    nn.functional.embedding(ids(9), run.table.weight, max_norm=0.01)


@pytest.mark.some_by_day(6)
@pytest.mark.parametrize("optimizer", ["given", "none"])
@pytest.mark.parametrize(
    "change",
    [
        by_hand,
        by_hand_before_a_step,
        by_hand_after_a_step,
        past_the_module,
        past_the_hooks,
        by_a_renorm_past_the_hooks,
    ],
)
def test_a_counted_change_beside_a_lookup_is_saved_whole_once(
    tmp_path: Path, optimizer: str, change: Callable[[Job], None]
) -> None:
    with job(tmp_path, optimizer) as run:
        change(run)
        assert run.save() == ROWS
        run.save()
        assert run.save() == 0


def test_updates_gathered_over_many_intervals_are_saved(tmp_path: Path) -> None:
    with job(tmp_path, "none") as run:
        for row in range(5):
            run.look(row)
            run.save()
        run.look(20)
        run.write(0, 1, 2, 3, 4)
        assert run.save() == ROWS


def test_rows_that_touch_tells_of_are_a_delta_without_an_optimizer_too(tmp_path: Path) -> None:
    with job(tmp_path, "none") as run:
        run.write(7, 9)
        run.checkpointer.touch("t", [7, 9])
        assert run.save() == 2


def by_its_data(weight: torch.Tensor) -> nn.Embedding:
    made: nn.Embedding = nn.Embedding.from_pretrained(weight.data, freeze=False, sparse=True)  # type: ignore[no-untyped-call]
    return made


def by_itself(weight: torch.Tensor) -> nn.Embedding:
    return nn.Embedding(ROWS, 3, _weight=weight, sparse=True)


def by_numpy(weight: torch.Tensor) -> nn.Embedding:
    rows = torch.from_numpy(weight.detach().numpy()[5:])
    return nn.Embedding(ROWS - 5, 3, _weight=rows, sparse=True)


@pytest.mark.slow
@pytest.mark.parametrize("make", [by_its_data, by_itself, by_numpy])
@pytest.mark.parametrize("optimizer", ["given", "none"])
@pytest.mark.parametrize("fused", [False, True])
def test_rows_that_the_optimizer_of_another_module_moves_are_saved(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[torch.Tensor], nn.Embedding],
    optimizer: str,
    fused: bool,
) -> None:
    with job(tmp_path, optimizer) as run:
        other = make(run.table.weight)
        other.sparse = not fused
        own = SGD(other.parameters(), lr=0.1, fused=fused)
        for row in (20, 21, 22):
            run.train(row)
            assert run.save() in (1, 2)
            backward(other(ids(3)).sum())
            own.step()
            own.zero_grad()
            run.train(row)
            assert run.save() == ROWS
    assert "over its memory" in caplog.text


def test_a_module_that_gets_the_memory_of_a_table_later_makes_it_whole(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        out: Any = nn.Linear(3, ROWS)
        run.model["out"] = out
        run.train(1)
        assert run.save() == 1
        out.weight.data = run.table.weight.data
        for row in (7, 8):
            with torch.no_grad():
                out.weight[row] += 1  # counted for the layer's weight alone
            assert run.save() == ROWS


def test_a_parameter_that_gets_the_memory_between_two_steps_makes_it_whole(tmp_path: Path) -> None:
    decoder = nn.Parameter(torch.zeros(ROWS, 3))
    decoder.grad = torch.zeros(ROWS, 3)
    optimizer = SGD([decoder], lr=1.0)
    with job(tmp_path) as run:
        optimizer.step()
        decoder.data = run.table.weight.data
        decoder.grad[9] = 1
        optimizer.step()
        assert run.save() == ROWS


def test_a_parameter_that_grows_over_a_table_makes_it_whole(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        memory = torch.zeros(10 + ROWS * 3)
        run.table.weight.data = memory[10:].view(ROWS, 3).copy_(run.table.weight.detach())
        head = nn.Parameter(memory[:10])
        head.grad = torch.zeros(10)
        optimizer = SGD([head], lr=1.0)
        run.save()
        optimizer.step()
        head.grad, head.data = None, memory
        head.grad = torch.zeros(10 + ROWS * 3)
        head.grad[10 + 9 * 3] = 1
        optimizer.step()
        assert run.save() == ROWS


def test_a_buffer_beside_the_state_dict_over_a_table_makes_it_whole(tmp_path: Path) -> None:
    table = nn.Embedding(ROWS, 3)
    table.register_buffer("view", table.weight.data[4:], persistent=False)
    with cnr_store.Checkpointer(
        tmp_path, table, policy="consecutive", bits=32, tracking=cnr_store.Tracking(audit=False)
    ) as checkpointer:
        checkpointer.save(1).result()
        table.get_buffer("view")[0] = 5
        assert checkpointer.save(2).result().rows == ROWS


def test_an_optimizer_that_replaced_the_given_one_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with job(tmp_path) as run:
        run.train(1)
        assert run.save() == 1
        other = SGD(run.model.parameters(), lr=0.1)
        for _ in range(2):
            run.train(2, optimizer=other)
            assert run.save() == ROWS
        assert "another SGD than the optimizer given" in logged(caplog)
        run.train(3)  # the given one goes on
        run.train(4, optimizer=other)
        assert run.save() == 2
