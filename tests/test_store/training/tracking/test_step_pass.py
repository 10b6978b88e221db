"""The pass over all tables of a step finds what a look at each of them finds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking import bitmap
from cnr_store.training.tracking.step_pass import StepPass
from cnr_store.training.tracking.tracker import Tracker
from tests.nightly import NIGHT
from tests.test_store.support.tracked_table import Bench, ids, listed

Seen = list[tuple[dict[str, list[int]], set[str]]]
MAKERS: dict[str, tuple[Callable[[Any], Optimizer], bool]] = {
    "sgd": (lambda p: SGD(p, lr=0.1), False),
    "sgd_sparse": (lambda p: SGD(p, lr=0.1), True),
    "sgd_fused": (lambda p: SGD(p, lr=0.1, fused=True), False),
    "adagrad": (lambda p: Adagrad(p, lr=0.1), False),
    "adagrad_sparse": (lambda p: Adagrad(p, lr=0.1), True),
    "sparse_adam": (lambda p: SparseAdam(p, lr=0.1), True),
    "adam": (lambda p: Adam(p, lr=0.1), False),
}


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """Until kernels are compiled, each table gets a closer look."""
    for _ in bitmap.compile_kernels():
        pass


class Many:
    """Tables of several sizes and types that train under one tracker."""

    def __init__(self, kind: str, given: bool) -> None:
        make, sparse = MAKERS[kind]
        torch.manual_seed(0)
        shapes = [(40, 3), (41, 4), (7, 1), (1, 2), (64, 16), (33, 5)]
        self.model = nn.ModuleDict(
            {f"t{number}": nn.EmbeddingBag(*shape, sparse=sparse) for number, shape in enumerate(shapes)}
        )
        self.model["bf16"] = nn.Embedding(30, 3, sparse=sparse).to(torch.bfloat16)
        self.model["still"] = nn.Embedding(20, 2, sparse=sparse).requires_grad_(False)
        if not sparse:
            self.model["net"] = nn.Linear(2, 2)
        self.tables: list[Any] = [table for name, table in self.model.items() if name != "net"]
        self.optimizer = make(list(self.model.parameters()))
        self.tracker = Tracker(find_tables(self.model), [self.optimizer] if given else [])
        self.random = torch.Generator().manual_seed(1)

    def draw(self, below: int, count: int = 1) -> torch.Tensor:
        return torch.randint(below, (count,), generator=self.random)

    def forward(self) -> Any:
        chosen = [table for table in self.tables if self.draw(3).item()]
        return sum(table(self.draw(len(table.weight), 3)[None]).float().square().sum() for table in chosen)

    def disturb(self, what: int) -> None:
        """Do something that no pass expects."""
        table: Any = self.tables[int(self.draw(len(self.tables)).item())]
        kept: Any = self.optimizer.state.get(table.weight, {})
        slot = next((key for key, value in kept.items() if getattr(value, "ndim", 0) == 2), None)
        with torch.no_grad():
            match what:
                case 0:
                    table.weight[0] += 1
                case 1:
                    table.weight.data = table.weight.data.clone()
                case 2 if table.weight.grad is not None:
                    table.weight.grad = None
                case 3 if table.weight.grad is not None and not table.weight.grad.is_sparse:
                    table.weight.grad.data[-1] = 1
                case 4 if slot is not None:
                    kept[slot][0] += 1
                case 5 if slot is not None:
                    kept[slot] = kept[slot].clone()
                case 6:
                    self.optimizer.load_state_dict(self.optimizer.state_dict())
                case 7 if table.weight.grad is not None:
                    whole = table.weight.grad.to_dense()
                    table.weight.grad = whole.t().contiguous().t()
                case 8:
                    self.optimizer.param_groups[0]["lr"] = 0.05
                case 9:
                    self.tracker.mark("t0", [1])
                case 10:
                    self.optimizer.zero_grad()

    def swap(self) -> tuple[dict[str, list[int]], set[str]]:
        whole = set(self.tracker.whole_reasons())
        rows = {table.name: table.rows for table in find_tables(self.model)}
        return {name: listed(bits, rows[name]) for name, bits in self.tracker.swap().items()}, whole


def history(kind: str, given: bool, seed: int) -> Seen:
    many = Many(kind, given)
    many.random.manual_seed(seed)
    seen = []
    for _ in range(12):
        loss = many.forward()
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            torch.autograd.backward(loss)
        if many.draw(3).item() == 0:
            many.disturb(int(many.draw(11).item()))
        if many.draw(4).item() == 0:
            seen.append(many.swap())
        if kind != "sparse_adam" or all(
            table.weight.grad is None or table.weight.grad.is_sparse for table in many.tables
        ):
            many.optimizer.step()
        if many.draw(2).item():
            many.optimizer.zero_grad()
    many.tracker.close()
    return [*seen, many.swap()]


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", MAKERS)
def test_any_history_flags_what_a_closer_look_at_each_table_flags(
    kind: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(4 if NIGHT else 2)
    ours = [history(kind, given, seed) for seed in seeds]
    monkeypatch.setattr(StepPass, "before", lambda self, _: self.stepped)
    monkeypatch.setattr(StepPass, "after", lambda self, *_: self.stepped)
    assert ours == [history(kind, given, seed) for seed in seeds]


def train_all(kind: str) -> list[dict[str, list[int]]]:
    """Rows flagged by each of some steps, which have gradients of all tables, or of the first ones alone."""
    many, seen = Many(kind, given=True), []
    for turn in range(6):
        looked_up = many.tables[:-1] if turn < 3 else many.tables[:turn]
        many.optimizer.zero_grad()
        for table in looked_up:
            table(many.draw(len(table.weight), 3)[None]).float().square().sum().backward()
        many.swap()
        many.optimizer.step()
        seen.append(many.swap()[0])
    many.tracker.close()
    return seen


@pytest.mark.parametrize("kind", ["sgd", "sgd_sparse", "adagrad", "adagrad_sparse"])
def test_gradients_of_one_kind_flag_what_a_look_at_each_of_them_flags(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = train_all(kind)
    assert any(rows for seen in ours for rows in seen.values())
    monkeypatch.setattr(StepPass, "after", lambda self, *_: self.stepped)
    assert ours == train_all(kind)


def test_gradients_of_several_kinds_flag_their_rows_and_few_need_a_closer_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model with dense and sparse tables, of which one gets no ids, and one a gradient that is not contiguous."""
    model = nn.ModuleList(nn.EmbeddingBag(40, 4, mode="sum", sparse=number > 1) for number in range(4))
    optimizer = Adagrad(model.parameters(), lr=0.1)
    tracker, left, real = Tracker(find_tables(model), [optimizer]), list[Any](), StepPass.after

    def after(self: StepPass, *args: Any) -> Any:
        found = real(self, *args)
        if self.stepped:  # trackers of other tests may not be collected yet
            left.append(found)
        return found

    left = note_closer_looks(monkeypatch)
    for turn in range(3):
        optimizer.zero_grad()
        rows = [[turn], [turn + 9], [turn, 39], []]
        for table, own in zip(model, rows, strict=True):
            found: Any = table(torch.tensor(own, dtype=torch.int64), torch.tensor([0]))
            found.sum().backward()
        optimizer.step()
        assert [listed(bits) for bits in tracker.swap().values()] == rows
    assert [len(each) for each in left] == [1, 1, 1]
    weight = model.get_parameter("1.weight")
    weight.grad = torch.zeros(4, 40).t().index_fill(0, ids(7), 1)
    optimizer.step()
    assert listed(tracker.swap()["1"]) == [7]


def note_closer_looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each pass from here on leaves to a closer look."""
    left: list[Any] = []
    real = StepPass.after

    def after(self: StepPass, *args: Any) -> Any:
        found = real(self, *args)
        if self.stepped:  # trackers of other tests may not be collected yet
            left.append(found)
        return found

    monkeypatch.setattr(StepPass, "after", after)
    return left


@pytest.mark.parametrize("kind", ["sgd", "sgd_sparse", "adagrad", "adagrad_sparse"])
def test_ordinary_steps_need_no_closer_look(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(kind)
    bench.train(1)
    bench.train(2)
    left = note_closer_looks(monkeypatch)
    bench.train(3)
    bench.swap()
    bench.train(4)
    assert len(left) >= 2
    assert not any(left)
    assert bench.swap() == [4]


def test_a_table_in_other_memory_needs_a_closer_look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("adagrad")
    bench.train(1)
    left = note_closer_looks(monkeypatch)
    bench.table.weight.data = bench.table.weight.data.clone()
    bench.train(2)
    bench.swap()
    bench.train(3)
    assert [len(each) for each in left] == [1, 0]
    assert bench.swap() == [3]


@pytest.mark.parametrize("kind", ["sgd", "adagrad_sparse"])
def test_slots_that_were_replaced_are_not_kept_alive(kind: str) -> None:
    bench = Bench("adagrad_sparse" if kind == "adagrad_sparse" else "adagrad")
    bench.train(1)
    bench.train(1)
    slot = weakref.ref(bench.slot())
    bench.optimizer.load_state_dict(bench.optimizer.state_dict())
    bench.optimizer.state[bench.table.weight]["sum"] = bench.slot().clone()
    assert slot() is None


def test_ids_that_change_in_place_after_the_lookup_hide_no_row() -> None:
    bench = Bench("adagrad")
    rows = np.array([3, 4])
    loss = bench.table(torch.from_numpy(rows)).square().sum()
    rows[:] = 9  # torch counts no change: the gradient is that of row 9
    loss.backward()
    bench.step()
    assert bench.swap() == [9]


@pytest.mark.parametrize("kind", ["sgd", "adagrad_sparse"])
def test_a_forward_that_fails_after_its_lookup_hides_no_row_of_later_steps(kind: str) -> None:
    bench = Bench(kind)
    bench.train(1)
    bench.swap()
    with pytest.raises(IndexError):
        bench.table(ids(2, 40))
    bench.train(6)
    assert bench.swap() == [6]


@pytest.mark.parametrize("kind", ["sgd", "adagrad_sparse"])
def test_a_save_between_forward_and_step_loses_no_row(kind: str) -> None:
    bench = Bench(kind)
    bench.train(1)
    bench.swap()
    loss = bench.forward(8)
    assert bench.swap() == []
    loss.backward()
    assert bench.swap() == []
    bench.step()
    assert bench.swap() == [8]


def test_the_only_row_of_a_padded_table_is_seen_to_its_end() -> None:
    table = nn.Embedding(1, 3)
    table.weight = nn.Parameter(torch.zeros(1, 4, dtype=torch.float16)[:, :3])
    optimizer = SGD(table.parameters(), lr=0.1)
    tracker = Tracker(find_tables(nn.ModuleDict({"t": table})), [optimizer])
    for _ in range(2):
        tracker.swap()
        table.weight.grad = torch.tensor([[0, 0, 1]], dtype=torch.float16)
        optimizer.step()
        assert listed(tracker.swap()["t"], 1) == [0]
