"""Rows that steps change are flagged and saved where code is compiled, whether or not it may leave the graph."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

import cnr_store
from cnr_store.policies.policy import PolicyName
from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking.tracker import Tracker
from tests.nightly import at_night
from tests.test_store.support.tracked_table import ROWS, backward, listed

pytestmark = [
    # The compiler itself looks at every tensor's gradient where it leaves compiled code.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Of the compiler's own modules, when it is first used.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
BACKENDS = [*product(["eager", "aot_eager"], [True, False], [True, False])]
INDUCTOR = [at_night("inductor", None, False), at_night("inductor", None, True)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


class Net(nn.Module):
    """A table, a bag over another one, and a layer on top."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 3, **options)
        self.bag = nn.EmbeddingBag(ROWS, 3, mode="sum")
        self.top = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.top(self.table(ids) + self.bag(ids.view(-1, 1))).square().sum())


class Job:
    """A `Net` that trains compiled, under a tracker."""

    def __init__(self, given: bool = True, net: Net | None = None, **compiled: Any) -> None:
        torch.manual_seed(0)
        self.net = Net() if net is None else net
        self.optimizer: Optimizer = SGD(self.net.parameters(), lr=0.1)
        self.tracker = Tracker(find_tables(self.net), [self.optimizer] if given else [])
        self.forward: Callable[..., Any] = torch.compile(self.net, **compiled)

    def looked_up(self, *rows: int) -> torch.Tensor:
        return torch.as_tensor(self.forward(torch.tensor(rows)))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def swap(self) -> list[int]:
        """Rows flagged, the same of both tables, none of which is whole."""
        assert self.tracker.whole_reasons() == {}
        first, second = (listed(rows) for rows in self.tracker.swap().values())
        assert first == second
        return first


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize(("backend", "dynamic", "fullgraph"), [*BACKENDS, *INDUCTOR])
def test_steps_flag_the_same_rows_as_in_eager_code(
    backend: str, dynamic: bool | None, fullgraph: bool
) -> None:
    job = Job(backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    for rows in ([1, 2], [5, 6, 7], [8, 9, 10, 11]):
        loss = job.looked_up(*rows)
        assert job.swap() == []
        backward(loss)
        job.step()
        assert job.swap() == rows


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_without_an_optimizer_gradients_tell_of_steps_that_nobody_sees(backend: str, fullgraph: bool) -> None:
    job = Job(given=False, backend=backend, fullgraph=fullgraph)
    for rows in ([1, 2], [5, 6]):
        backward(job.looked_up(*rows))
        for parameter in job.net.parameters():
            parameter.data.sub_(torch.as_tensor(parameter.grad), alpha=0.1)  # which torch does not count
        assert job.tracker.whole_reasons().keys() == {"table", "bag"}
        job.tracker.swap()


class Again(nn.Module):
    """Computes the activations of a net again in the backward pass."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor) -> object:
        return checkpoint(self.net, ids, use_reentrant=False)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_activations_that_are_computed_again_in_compiled_code(backend: str, fullgraph: bool) -> None:
    job = Job()
    job.forward = torch.compile(Again(job.net), backend=backend, fullgraph=fullgraph)
    for rows in ([1, 2], [5, 6]):
        backward(job.looked_up(*rows))
        job.step()
        assert job.swap() == rows


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_gradients_that_gather_over_saves_under_autocast(fullgraph: bool) -> None:
    job = Job(backend="aot_eager", fullgraph=fullgraph)
    for rows in ([1, 2], [5, 6]):
        with torch.autocast("cpu", torch.bfloat16):
            loss = job.looked_up(*rows)
        backward(loss)
        assert job.swap() == []
    job.step()
    assert job.swap() == [1, 2, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["optimizer's step", "training step"])
def test_compiled_steps_flag_rows(part: str) -> None:
    job = Job()

    def train(ids: torch.Tensor) -> None:
        backward(job.net(ids))
        job.tracker.swap()
        job.optimizer.step()

    run: Callable[..., object] = train
    if part == "training step":
        run = torch.compile(train, backend="eager")
    else:
        job.optimizer.step = torch.compile(job.optimizer.step, backend="eager")  # type: ignore[assignment]
    for rows in ([1, 2], [5, 6]):
        job.optimizer.zero_grad()
        run(torch.tensor(rows))
        assert job.swap() == rows


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
def test_what_a_full_graph_trains_is_restored(tmp_path: Path, policy: PolicyName) -> None:
    job = Job(backend="aot_eager", fullgraph=True)
    with cnr_store.Checkpointer(tmp_path, job.net, job.optimizer, policy=policy, bits=32) as ckpt:
        for step, rows in enumerate(([1, 2], [5, 6], [2, 39])):
            backward(job.looked_up(*rows))
            job.step()
            info = ckpt.save(step).result()
    assert info.kind == "delta"
    other = Job()
    cnr_store.load(tmp_path, other.net, other.optimizer)
    for name, value in job.net.state_dict().items():
        assert torch.equal(value, other.net.state_dict()[name])
