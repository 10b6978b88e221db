"""Code of the caller that a load runs after it has read the rows may change them: the next save has these changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from cnr_store import Checkpointer

ROWS = 1000
OUTSIDE = "it was changed outside lookups and optimizer steps"
STATE_OUTSIDE = "what an optimizer keeps for its rows was changed outside steps"


class Model(nn.Module):
    """A table, and extra state; `on_load` runs when that is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Embedding(ROWS, 4, sparse=True)
        self.on_load: Callable[[], object] | None = None

    def get_extra_state(self) -> dict[str, int]:
        return {"cold": 7}

    def set_extra_state(self, _state: object) -> None:
        if self.on_load is not None:
            self.on_load()


class Pruner:
    """An object whose state is saved with the model; `on_load` runs when that is loaded."""

    def __init__(self) -> None:
        self.on_load: Callable[[], object] | None = None

    def state_dict(self) -> dict[str, int]:
        return {"cold": 7}

    def load_state_dict(self, _state: object) -> None:
        if self.on_load is not None:
            self.on_load()


class Job:
    """A model in training, and its checkpointer."""

    def __init__(self, store: Path, kind: type[Optimizer] = Adagrad, policy: Any = "consecutive") -> None:
        self.model, self.pruner = Model(), Pruner()
        self.optimizer: Any = kind(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.checkpointer = Checkpointer(
            store, self.model, self.optimizer, policy=policy, bits=32, state={"pruner": self.pruner}
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpointer.close()

    def train(self, *rows: int) -> None:
        self.model.t(torch.tensor(rows)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def kept(self) -> dict[str, torch.Tensor]:
        """The table and what the optimizer keeps for its rows."""
        state = self.optimizer.state[self.model.t.weight]
        slots = {key: value for key, value in state.items() if torch.is_tensor(value) and value.ndim == 2}
        return {"weight": self.model.t.weight.detach(), **slots}

    def clear_row(self) -> None:
        with torch.no_grad():
            self.model.t.weight[7] = 0

    def raise_slot(self) -> None:
        with torch.no_grad():
            self.optimizer.state[self.model.t.weight]["sum"][7] = 5


def assert_loads_alike(store: Path, job: Job, kind: type[Optimizer] = Adagrad) -> None:
    """Check that the newest version is what `job` holds."""
    with Job(store, kind) as loaded:
        loaded.checkpointer.load()
        found, expected = loaded.kept(), job.kept()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


def in_extra_state(job: Job) -> None:
    job.model.on_load = job.clear_row


def in_load_hook(job: Job) -> None:
    hooked: Any = job.model.t
    hooked.register_load_state_dict_post_hook(lambda *_: job.clear_row())


def in_object(job: Job) -> None:
    job.pruner.on_load = job.clear_row


def in_weight_by_optimizer(job: Job) -> None:
    job.optimizer.register_load_state_dict_post_hook(lambda _optimizer: job.clear_row())


def in_slot_by_optimizer(job: Job) -> None:
    job.optimizer.register_load_state_dict_post_hook(lambda _optimizer: job.raise_slot())


def in_slot_by_object(job: Job) -> None:
    job.pruner.on_load = job.raise_slot


def in_slot_before_it_is_taken(job: Job) -> None:
    def change(_optimizer: Optimizer, state: dict[str, Any]) -> None:
        state["state"][0]["sum"][7] = 5

    job.optimizer.register_load_state_dict_pre_hook(change)


def in_slot_by_replacement(job: Job) -> None:
    def replace(optimizer: Optimizer) -> None:
        state = optimizer.state[job.model.t.weight]
        state["sum"] = state["sum"] + 1

    job.optimizer.register_load_state_dict_post_hook(replace)


def in_weight_by_replacement(job: Job) -> None:
    def replace() -> None:
        job.model.t.weight.data = job.model.t.weight.data * 0.5

    job.model.on_load = replace


@pytest.mark.some_by_day(14)
@pytest.mark.parametrize("policy", ["consecutive", "intermittent", "one-shot"])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (in_extra_state, None),
        (in_load_hook, None),
        (in_object, None),
        (in_weight_by_optimizer, None),
        (in_weight_by_replacement, OUTSIDE),
        (in_slot_by_optimizer, STATE_OUTSIDE),
        (in_slot_by_object, STATE_OUTSIDE),
        (in_slot_before_it_is_taken, STATE_OUTSIDE),
        (in_slot_by_replacement, STATE_OUTSIDE),
    ],
)
def test_what_it_changes_is_in_the_next_save(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    fresh: bool,
    changes: Callable[[Job], None],
    reason: str | None,
) -> None:
    with Job(tmp_path, policy=policy) as job:
        job.train(3)
        job.checkpointer.save(1).result()
        if fresh:
            job.checkpointer.close()
        with Job(tmp_path, policy=policy) if fresh else job as resumed:
            changes(resumed)
            resumed.checkpointer.load()
            resumed.train(50)
            version = resumed.checkpointer.save(2).result()
            if reason is None:  # the rows that changed are found by comparison
                assert (version.kind, version.rows) == ("delta", 2)
                assert "whole" not in caplog.text
            else:
                assert version.rows == ROWS
                assert f"table 't' is compared with what is stored: {reason}" in caplog.text
            assert_loads_alike(tmp_path, resumed)


def test_steps_that_it_makes_are_in_the_next_save(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.train(3)
        job.checkpointer.save(1).result()
        job.pruner.on_load = lambda: job.train(7)
        job.checkpointer.load()
        version = job.checkpointer.save(2).result()
        assert version.rows == 1
        assert_loads_alike(tmp_path, job)


def test_a_parameter_that_it_replaces_is_in_the_next_save(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.checkpointer.save(1).result()

        def replace() -> None:
            job.optimizer.state.clear()
            job.model.t.weight = nn.Parameter(torch.ones(ROWS, 4))
            job.optimizer.param_groups[0]["params"] = [job.model.t.weight]

        job.pruner.on_load = replace
        job.checkpointer.load()
        job.train(50)
        job.checkpointer.save(2).result()
        assert_loads_alike(tmp_path, job)


@pytest.mark.parametrize("kind", [SGD, Adagrad, SparseAdam])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_an_ordinary_load_leaves_a_delta(
    tmp_path: Path, kind: type[Optimizer], fresh: bool, trained: bool
) -> None:
    with Job(tmp_path, kind) as job:
        if trained:
            job.train(3)
        job.checkpointer.save(1).result()
        job.train(4, 5)  # makes state that a version from before the first step has not
        if fresh:
            job.checkpointer.close()
        with Job(tmp_path, kind) if fresh else job as resumed:
            resumed.checkpointer.load()
            if trained or kind is not SparseAdam:
                resumed.train(50)
            version = resumed.checkpointer.save(2).result()
            assert version.kind == "delta"
            assert version.rows == (trained or kind is not SparseAdam)
            assert_loads_alike(tmp_path, resumed, kind)


def test_a_loaded_table_of_another_element_type_tells_no_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path) as job:
        job.train(3)
        job.checkpointer.save(1).result()
    model = Model().to(torch.bfloat16)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer, bits=32, state={"pruner": Pruner()}) as checkpointer:
        checkpointer.load(strict="ignore")
        assert checkpointer.save(2).result().rows == ROWS
    assert "outside" not in caplog.text
