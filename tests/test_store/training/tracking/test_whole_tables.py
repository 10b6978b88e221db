"""Changes that make a table whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking.tracker import Tracker
from tests.test_store.support.tracked_table import ALL, ROWS, Bench, ids, listed


def by_hand(bench: Bench) -> None:
    bench.write(4)


def by_hand_then_a_step(bench: Bench) -> None:
    bench.write(4)
    bench.train(1)


def by_loading(bench: Bench) -> None:
    bench.model.load_state_dict({"t.weight": torch.ones(ROWS, 3)})


def by_other_memory(bench: Bench) -> None:
    bench.table.weight.data = torch.ones(ROWS, 3)


def by_renorm_elsewhere(bench: Bench) -> None:
    nn.functional.embedding(ids(3), bench.table.weight, max_norm=0.01)


def by_a_step_hook(bench: Bench) -> None:
    def clamp(*_: object) -> None:
        with torch.no_grad():
            bench.table.weight.clamp_(-0.1, 0.1)

    bench.optimizer.register_step_post_hook(clamp)
    bench.train(1)


def by_settings_of_one_step(bench: Bench) -> None:
    bench.optimizer.param_groups[0]["momentum"] = 0.9
    bench.train(1)
    bench.optimizer.param_groups[0]["momentum"] = 0


@pytest.mark.parametrize(
    "change",
    [
        by_hand,
        by_hand_then_a_step,
        by_loading,
        by_other_memory,
        by_renorm_elsewhere,
        by_a_step_hook,
        by_settings_of_one_step,
    ],
)
def test_changes_that_no_lookup_explains_make_the_table_whole_once(change: Callable[[Bench], None]) -> None:
    bench = Bench()
    change(bench)
    assert bench.tracker.whole_reasons().keys() == {"t"}
    assert bench.swap() == ALL
    assert bench.tracker.whole_reasons() == {}
    assert bench.swap() == []


@pytest.mark.parametrize("change", [by_hand, by_loading, by_other_memory])
def test_without_an_optimizer_changes_without_any_lookup_make_the_table_whole(
    change: Callable[[Bench], None],
) -> None:
    bench = Bench(given=False)
    change(bench)
    assert bench.swap() == ALL


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1, momentum=0.9),
        lambda p: SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: SGD(p, lr=0.1, fused=True),
        lambda p: Adam(p),
    ],
)
def test_optimizers_that_move_every_row_make_the_table_whole(make: Callable[[Any], Optimizer]) -> None:
    model = nn.ModuleDict({"t": nn.Embedding(ROWS, 3), "frozen": nn.Embedding(4, 2)})
    model["frozen"].weight.requires_grad_(False)
    optimizer = make(model.parameters())
    tracker = Tracker(find_tables(model), [optimizer])
    for _ in range(2):
        model["t"](ids(1)).sum().backward()
        optimizer.step()
        assert tracker.whole_reasons().keys() == {"t"}
        swapped = tracker.swap()
        assert listed(swapped["t"]) == ALL
        assert not swapped["frozen"].any()


def test_a_tied_output_layer_makes_the_table_whole() -> None:
    model = nn.ModuleDict({"t": nn.Embedding(ROWS, 3), "out": nn.Linear(3, ROWS)})
    model["out"].weight = model["t"].weight
    tracker = Tracker(find_tables(model), [SGD(model.parameters(), lr=0.1)])
    assert "shared with out" in tracker.whole_reasons()["t"]


class Hashing(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's own name
        return super().forward(input % self.num_embeddings)


def test_a_forward_of_its_own_is_left_to_the_steps() -> None:
    model = nn.ModuleDict({"t": Hashing(ROWS, 3, sparse=True)})
    optimizer = SGD(model.parameters(), lr=0.1)
    tracker = Tracker(find_tables(model), [optimizer])
    model["t"](ids(ROWS + 3, 10 * ROWS)).sum().backward()
    optimizer.step()
    assert tracker.whole_reasons() == {}
    assert listed(tracker.swap()["t"]) == [0, 3]
