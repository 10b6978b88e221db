"""A version holds one moment, although code of the caller that a save runs changes the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad

from cnr_store import Checkpointer, load

ROWS = 1000


class Model(nn.Module):
    """A table, a dense layer, and extra state; `on_save` runs when that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.top = nn.Embedding(ROWS, 4), nn.Linear(2, 2)
        self.on_save: Callable[[], object] | None = None

    def get_extra_state(self) -> dict[str, int]:
        if self.on_save is not None:
            self.on_save()
        return {"seen": 1}

    def set_extra_state(self, _state: object) -> None:
        pass


class Held:
    """An object, or a reader, that holds a tensor; `on_save` runs when its state is taken."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3)
        self.on_save: Callable[[], object] | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.on_save is not None:
            self.on_save()
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["tensor"])


class Job:
    """A model in training, with objects, a reader, and a checkpointer."""

    def __init__(self, store: Path) -> None:
        self.model, self.first, self.second, self.reader = Model(), Held(), Held(), Held()
        self.optimizer = Adagrad(self.model.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(
            store,
            self.model,
            self.optimizer,
            policy="consecutive",
            bits=32,
            state={"first": self.first, "second": self.second},
        )

    def change_everything(self) -> None:
        """Change all that a save holds."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter[1] += 1
                self.optimizer.state[parameter]["sum"][1] += 1
        for held in (self.first, self.second, self.reader):
            held.tensor += 1
        torch.rand(1)

    def everything(self) -> list[torch.Tensor]:
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        sums = [self.optimizer.state[parameter]["sum"] for parameter in self.model.parameters()]
        return [*parameters, *sums, self.first.tensor, self.second.tensor, self.reader.tensor]


def in_extra_state(job: Job) -> None:
    job.model.on_save = job.change_everything


def in_first_object(job: Job) -> None:
    job.first.on_save = job.change_everything


def in_second_object(job: Job) -> None:
    job.second.on_save = job.change_everything


def in_reader(job: Job) -> None:
    job.reader.on_save = job.change_everything


def in_optimizer(job: Job) -> None:
    job.optimizer.register_state_dict_pre_hook(lambda _optimizer: job.change_everything())


def in_model(job: Job) -> None:
    job.model.register_state_dict_pre_hook(lambda *_: job.change_everything())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "changes", [in_extra_state, in_first_object, in_second_object, in_reader, in_optimizer, in_model]
)
def test_code_that_a_save_runs_changes_the_model(tmp_path: Path, changes: Callable[[Job], None]) -> None:
    job, other = Job(tmp_path), Job(tmp_path)
    with job.checkpointer:
        job.checkpointer.save(1, reader=job.reader).result()
        changes(job)
        version = job.checkpointer.save(2, reader=job.reader).result()
        assert version.rows == ROWS  # of which rows changed, nobody told
        numbers = torch.get_rng_state()
        with other.checkpointer:
            restored = other.checkpointer.load()
            other.reader.load_state_dict(restored.reader)
        for found, expected in zip(other.everything(), job.everything(), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(torch.get_rng_state(), numbers)


def test_a_table_that_an_object_replaces_is_saved_as_it_is_then(tmp_path: Path) -> None:
    job, other = Job(tmp_path), Job(tmp_path)
    with job.checkpointer:
        job.checkpointer.save(1).result()

        def replace() -> None:
            old, new = job.model.t.weight, nn.Parameter(torch.rand(ROWS, 4))
            job.optimizer.state[new] = job.optimizer.state.pop(old)
            params = job.optimizer.param_groups[0]["params"]
            job.optimizer.param_groups[0]["params"] = [new if one is old else one for one in params]
            job.model.t.weight = new

        job.first.on_save = replace
        job.checkpointer.save(2).result()
        with other.checkpointer:
            other.checkpointer.load()
        for found, expected in zip(other.everything(), job.everything(), strict=True):
            assert torch.equal(found, expected)


def test_small_tables_are_written_as_they_were_when_save_returned(tmp_path: Path) -> None:
    table = nn.Embedding(50, 4, sparse=True)
    optimizer = Adagrad(table.parameters())
    go_on = threading.Event()
    with Checkpointer(tmp_path, table, optimizer, policy="consecutive", bits=32) as checkpointer:
        checkpointer.save(1).result()
        table(torch.tensor([3, 7])).sum().backward()
        optimizer.step()
        saved, sums = table.weight.detach().clone(), optimizer.state[table.weight]["sum"].clone()
        checkpointer._saves._executor.submit(go_on.wait)  # the thread that writes is late
        pending = checkpointer.save(2)
        with torch.no_grad():
            table.weight += 1
            optimizer.state[table.weight]["sum"] += 1
        table.weight.data = torch.zeros(90, 4)
        optimizer.state[table.weight]["sum"] = torch.zeros(90, 4)
        go_on.set()
        assert pending.result().rows == 2
    restored = nn.Embedding(50, 4, sparse=True)
    again = Adagrad(restored.parameters())
    load(tmp_path, restored, again)
    assert torch.equal(restored.weight, saved)
    assert torch.equal(again.state[restored.weight]["sum"], sums)
