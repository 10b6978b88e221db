"""Every way of looking rows up and training on them flags the rows that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking.tracker import Tracker
from tests.test_store.support.tracked_table import ALL, ROWS, backward, listed

_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=_GPU)]


class Net(nn.Module):
    """A bag and an embedding over one table each, and a layer on top."""

    def __init__(self, device: str, sparse: bool, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=sparse, device=device, **options)
        self.table = nn.Embedding(ROWS, 4, padding_idx=0, sparse=sparse, device=device)
        self.again = nn.Embedding(ROWS, 4, padding_idx=0, sparse=sparse, device=device)
        self.again.weight = self.table.weight
        self.top = nn.Linear(4, 1, device=device)

    def forward(self, ids: torch.Tensor, *of_bag: torch.Tensor) -> torch.Tensor:
        last = self.bag.include_last_offset
        offsets = torch.tensor([0, 2, 3] if last else [0, 2], device=ids.device)
        bags = self.bag(ids[:3], offsets, *of_bag)
        looked_up = self.table(ids[3:5]) + self.again(ids[5:7])
        return torch.as_tensor(self.top(bags + looked_up))


class Training:
    """A `Net` with its optimizer and a tracker, beside a copy of the tables as they were at the last swap."""

    def __init__(self, device: str = "cpu", sparse: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net(device, sparse, **options)
        self.optimizer: Optimizer = Adagrad(self.net.parameters(), lr=0.1)
        self.tracker = Tracker(find_tables(self.net), [self.optimizer])
        self.device = device
        self.before = self.copies()

    def copies(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self.net, name).weight.detach().clone() for name in ("bag", "table")}

    def ids(self, *rows: int) -> torch.Tensor:
        return torch.tensor(rows, device=self.device)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def swap(self) -> tuple[list[int], list[int]]:
        """Rows flagged of the bag's table and of the other. All that changed are among them, and none is whole."""
        assert self.tracker.whole_reasons() == {}
        swapped, now = self.tracker.swap(), self.copies()
        for name, before in self.before.items():
            changed = (before != now[name]).any(dim=1).nonzero().flatten().tolist()
            assert {*changed} <= {*listed(swapped[name])}
        self.before = now
        return listed(swapped["bag"]), listed(swapped["table"])


FIRST = (1, 2, 3, 4, 5, 6, 0)
SECOND = (11, 12, 13, 14, 15, 16, 17)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("options", [{}, {"include_last_offset": True}, {"padding_idx": 2}])
def test_bags_padding_and_tables_that_two_modules_share(
    device: str, sparse: bool, options: dict[str, Any]
) -> None:
    job = Training(device, sparse, **options)
    for rows in (FIRST, SECOND):
        backward(job.net(job.ids(*rows)).square().sum())
        job.step()
        bag, table = job.swap()
        padding = {0, options.get("padding_idx", 0)}
        assert {*bag} == {*rows[:3]} - padding
        assert {*table} == {*rows[3:]} - {0}


@pytest.mark.parametrize("device", DEVICES)
def test_weights_of_samples(device: str) -> None:
    job = Training(device)
    weights = torch.tensor([0.5, 0.0, 2.0], device=device, requires_grad=True)
    backward(job.net(job.ids(*FIRST), weights).sum())
    job.step()
    assert job.swap() == ([1, 2, 3], [4, 5, 6])


@pytest.mark.slow
@pytest.mark.some_by_day(2)
# The compiler itself looks at every tensor's gradient where it leaves compiled code.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(backend: str) -> None:
    torch.compiler.reset()
    job = Training(sparse=False)
    compiled: Any = torch.compile(job.net, backend=backend)
    for rows in (FIRST, SECOND):
        backward(compiled(job.ids(*rows)).square().sum())
        job.step()
        bag, table = job.swap()
        assert {*bag} == {*rows[:3]}
        assert {*table} == {*rows[3:]} - {0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("norm", [None, 0.1])
def test_a_model_that_was_compiled_before_it_is_tracked(given: bool, norm: float | None) -> None:
    torch.compiler.reset()
    table = nn.Embedding(ROWS, 3, max_norm=norm)
    net = nn.Sequential(table, nn.Linear(3, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    compiled: Any = torch.compile(net, backend="eager")

    def train(*rows: int) -> None:
        backward(compiled(torch.tensor(rows)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    train(1, 2)  # compiled code has no hooks, and need not look for new ones
    tracker = Tracker(find_tables(net), [optimizer] if given else [])
    for rows in ((5, 6), (7, 8)):
        before = table.weight.detach().clone()
        train(*rows)
        flagged = listed(tracker.swap()["0"])
        changed = (before != table.weight.detach()).any(dim=1).nonzero().flatten().tolist()
        assert {*changed} <= {*flagged}
        assert norm is not None or len(flagged) <= 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sparse", [True, False])
def test_under_autocast(device: str, sparse: bool) -> None:
    job = Training(device, sparse)
    with torch.autocast(device, torch.bfloat16):
        loss = job.net(job.ids(*FIRST)).square().sum()
    backward(loss)
    job.step()
    assert job.swap() == ([1, 2, 3], [4, 5, 6])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again(device: str, reentrant: bool) -> None:
    job = Training(device)
    for rows in (FIRST, SECOND):
        # Reentrant checkpoints need an input that takes a gradient.
        weights = torch.ones(3, device=device, requires_grad=True)
        out: Any = checkpoint(job.net, job.ids(*rows), weights, use_reentrant=reentrant)
        assert job.swap() == ([], [])
        backward(out.square().sum())
        job.step()
        bag, table = job.swap()
        assert {*bag} == {*rows[:3]}
        assert {*table} == {*rows[3:]} - {0}


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_wait_over_saves(device: str) -> None:
    job = Training(device)
    for rows in (FIRST, SECOND):
        backward(job.net(job.ids(*rows)).square().sum())
        job.swap()
    assert job.swap() == ([], [])
    job.step()
    # Not row 0: it is padding, which takes no gradient.
    assert job.swap() == ([1, 2, 3, 11, 12, 13], [4, 5, 6, 14, 15, 16, 17])


@pytest.mark.parametrize("device", DEVICES)
def test_an_interval_may_begin_in_inference_mode(device: str) -> None:
    job = Training(device)
    for rows in (FIRST, SECOND):
        with torch.inference_mode():
            job.swap()
        backward(job.net(job.ids(*rows)).square().sum())
        job.step()
    assert job.swap() == ([11, 12, 13], [14, 15, 16, 17])


@pytest.mark.parametrize("given", [True, False])
def test_the_average_of_a_model_is_whole_and_the_model_is_not(given: bool) -> None:
    net = nn.ModuleDict({"live": nn.Embedding(ROWS, 3, sparse=True)})
    average = AveragedModel(net["live"], multi_avg_fn=None)
    both = nn.ModuleDict({"live": net["live"], "average": average})
    optimizer = SGD(net.parameters(), lr=0.1)
    tracker = Tracker(find_tables(both), [optimizer] if given else [])
    for step in range(3):
        backward(net["live"](torch.tensor([step])).sum())
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net["live"])
        flagged = {name: listed(rows) for name, rows in tracker.swap().items()}
        assert flagged["average"] == ALL
        assert step in flagged["live"]
        assert len(flagged["live"]) <= 2
