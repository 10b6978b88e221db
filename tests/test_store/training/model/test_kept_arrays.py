"""Arrays of small tables stay the same objects from save to save, until their tensors are others or lie elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim import Adagrad

import cnr_store
from cnr_store import Checkpointer
from cnr_store.training.model.row_arrays import MOST_ROWS_KEPT, RowArray
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.tracking.small_tables import SmallTables


def trained(rows: int = 20) -> tuple[nn.Embedding, Adagrad, TrainedModel]:
    table = nn.Embedding(rows, 4)
    optimizer = Adagrad(table.parameters())
    return table, optimizer, TrainedModel.from_arguments(table, optimizer)


def are_same(before: list[RowArray], now: list[RowArray]) -> list[bool]:
    return [one is other for one, other in zip(before, now, strict=True)]


def test_steps_keep_the_arrays_and_what_is_known_of_small_tables() -> None:
    table, optimizer, model = trained()
    before = model.row_arrays()
    small = SmallTables.among(before)
    table(torch.arange(3)).sum().backward()
    optimizer.step()
    now = model.row_arrays()
    assert are_same(before, now) == [True, True]
    assert SmallTables.among(now, small) is small


def test_a_slot_that_was_replaced_makes_new_arrays() -> None:
    table, optimizer, model = trained()
    before = model.row_arrays()
    small = SmallTables.among(before)
    state = optimizer.state[table.weight]
    state["sum"] = state["sum"] + 1
    now = model.row_arrays()
    assert are_same(before, now) == [False, False]
    assert now[1].parts[0].tensor is state["sum"]
    assert SmallTables.among(now, small) is not small


def test_memory_that_was_replaced_makes_new_arrays() -> None:
    table, _, model = trained()
    before = model.row_arrays()
    assert before[0].memory is not None
    table.weight.data = torch.zeros(20, 4)
    (weight, _) = model.row_arrays()
    assert weight is not before[0]
    assert weight.memory is not None
    assert not weight.memory.any()


def test_rows_that_were_added_make_new_arrays() -> None:
    table, optimizer, model = trained()
    before = model.row_arrays()
    table.weight.data = torch.zeros(30, 4)
    optimizer.state[table.weight]["sum"] = torch.zeros(30, 4)
    now = model.row_arrays()
    assert are_same(before, now) == [False, False]
    assert [array.shape for array in now] == [(30, 4), (30, 4)]


def test_memory_that_got_the_other_sign_makes_new_arrays() -> None:
    table, _, model = trained()
    before = model.row_arrays()
    small = SmallTables.among(before)
    table.weight.data = torch._neg_view(table.weight.data)  # at the same address
    now = model.row_arrays()
    assert are_same(before, now) == [False, False]
    assert SmallTables.among(now, small) is not small


def test_arrays_of_large_tables_are_not_kept() -> None:
    _, _, model = trained(MOST_ROWS_KEPT + 1)
    assert are_same(model.row_arrays(), model.row_arrays()) == [False, False]


def test_a_small_table_whose_memory_has_the_other_sign_is_saved_as_it_is(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Embedding(8, 4, sparse=True)})
    table = model.get_parameter("a.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer, policy="consecutive", bits=32) as checkpointer:
        table.data = torch._neg_view(torch.randn(8, 4))
        for step in range(3):
            model["a"](torch.tensor([step])).sum().backward()
            optimizer.step()
            checkpointer.save(step).result()
    loaded = nn.ModuleDict({"a": nn.Embedding(8, 4)})
    cnr_store.load(tmp_path, loaded)
    assert torch.equal(loaded.get_parameter("a.weight"), table)
