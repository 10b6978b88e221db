"""Rows that changed are always among the rows flagged, or the table is whole."""

from __future__ import annotations

import copy
import gc
import io
import logging
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

from cnr_store.errors import ModelMismatchError
from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking.tracker import Tracker
from tests.test_store.support.tracked_table import ALL, ROWS, TRUSTED, Bench, backward, ids, listed


@pytest.mark.parametrize("kind", TRUSTED)
def test_a_trained_row_is_flagged_once(kind: str) -> None:
    bench = Bench(kind)
    bench.train(3, 7, 3)
    bench.train(39)
    assert bench.tracker.whole_reasons() == {}
    assert bench.swap() == [3, 7, 39]
    assert bench.swap() == []


@pytest.mark.parametrize("kind", TRUSTED)
def test_a_save_between_forward_and_step_loses_nothing(kind: str) -> None:
    bench = Bench(kind)
    loss = bench.forward(1, 2)
    assert bench.swap() == []
    loss.backward()
    assert bench.swap() == []
    bench.step()
    assert bench.swap() == [1, 2]
    assert bench.swap() == []


@pytest.mark.parametrize("kind", ["sgd", "sgd_sparse"])
def test_a_batch_looked_up_before_the_step_of_the_one_before_is_flagged_when_it_is_updated(kind: str) -> None:
    bench = Bench(kind)
    first, second = bench.forward(1, 2), bench.forward(8, 9)
    first.backward()
    bench.step()
    assert bench.swap() == [1, 2]
    second.backward()
    bench.step()
    assert bench.swap() == [8, 9]


def test_gradients_accumulated_over_saves_are_flagged_at_the_step() -> None:
    bench = Bench()
    for row in (1, 2, 3):
        bench.forward(row).backward()
        assert bench.swap() == []
    bench.step()
    assert bench.swap() == [1, 2, 3]


def test_a_closure_that_computes_gradients_in_the_step_is_seen() -> None:
    bench = Bench()

    def closure() -> float:
        bench.optimizer.zero_grad()
        loss = bench.forward(5)
        loss.backward()
        return float(loss.detach())

    bench.swap()
    bench.optimizer.step(closure)
    assert bench.swap() == [5]


@pytest.mark.parametrize("kind", ["sgd", "sgd_sparse"])
def test_gradients_that_come_past_the_module_are_seen(kind: str) -> None:
    bench = Bench(kind)
    bench.functional(4).backward()
    backward(bench.table.forward(ids(6)).sum())
    bench.step()
    assert bench.swap() == [4, 6]
    if kind == "sgd":
        backward(bench.forward(1) + bench.table.weight.square().sum())
        bench.step()
        assert bench.swap() == ALL


def test_without_an_optimizer_gradients_make_the_table_whole_until_a_step_is_seen() -> None:
    bench = Bench(given=False)
    bench.forward(1, 2)
    assert bench.swap() == []
    bench.forward(5).backward()
    assert "no step was seen" in bench.tracker.whole_reasons()["t"]
    assert bench.swap() == ALL
    bench.table.weight.data[5] = 0  # which torch does not count
    assert bench.swap() == ALL
    assert bench.swap() == []
    bench.train(7)
    assert bench.swap() == [5, 7]
    bench.train(8)
    assert bench.swap() == [8]


def test_a_parameter_that_is_unfrozen_or_replaced_is_watched_from_the_next_save_on() -> None:
    bench = Bench(given=False)
    for change in (False, True):
        bench.table.weight = nn.Parameter(torch.ones(ROWS, 3), requires_grad=change)
        bench.swap()
    assert bench.swap() == []
    bench.forward(5).backward()
    assert bench.swap() == ALL


def test_an_optimizer_that_was_not_given_is_noticed() -> None:
    bench = Bench(given=False)
    bench.train(3)
    bench.swap()
    bench.swap()
    bench.functional(4).backward()
    bench.step()
    assert bench.swap() == [4]
    other = Adam(bench.model.parameters())
    bench.table.weight.grad = torch.zeros_like(bench.table.weight)
    other.step()
    assert "Adam" in bench.tracker.whole_reasons()["t"]
    assert bench.swap() == ALL


def test_a_failed_save_gives_its_rows_back() -> None:
    bench = Bench()
    bench.train(1)
    failed = bench.tracker.swap()
    bench.train(2)
    bench.tracker.restore(failed)
    assert bench.swap() == [1, 2]
    assert bench.swap() == []


def test_a_failed_save_of_a_whole_table_stays_whole() -> None:
    bench = Bench()
    bench.write(4)
    failed = bench.tracker.swap()
    bench.tracker.restore(failed)
    assert bench.swap() == ALL
    with pytest.raises(ModelMismatchError, match=r"no table 'x'; there are \['t'\]"):
        bench.tracker.restore({"x": failed["t"]})


def test_a_table_whose_lookups_change_rows_is_whole() -> None:
    bench = Bench(max_norm=0.01)
    for _ in range(2):
        assert "max_norm" in bench.tracker.whole_reasons()["t"]
        assert bench.swap() == ALL


def test_ids_out_of_range_raise_what_torch_raises() -> None:
    bench = Bench()
    with pytest.raises(IndexError, match="out of range"):
        bench.forward(ROWS)
    with pytest.raises(TypeError):
        bench.table()
    assert bench.swap() == []


def test_rows_changed_by_hand_can_be_told() -> None:
    bench = Bench()
    bench.write(4)
    bench.tracker.mark("t", [4])
    bench.write(6)
    bench.tracker.mark("t", np.array([[6]]))
    bench.tracker.mark("t", [])
    assert bench.tracker.whole_reasons() == {}
    assert bench.swap() == [4, 6]


@pytest.mark.parametrize(
    ("name", "rows", "why"),
    [("x", [1], "no table 'x'"), ("t", [ROWS], "40 rows"), ("t", [-1], "-1"), ("t", [0.5], "integers")],
)
def test_marks_that_make_no_sense_are_refused(name: str, rows: object, why: str) -> None:
    bench = Bench()
    with pytest.raises(ModelMismatchError, match=why):
        bench.tracker.mark(name, rows)
    assert bench.swap() == []


def test_a_parameter_that_was_replaced_or_resized_is_followed() -> None:
    bench = Bench()
    bench.table.weight = nn.Parameter(torch.ones(ROWS, 3))
    assert bench.swap() == ALL
    assert bench.swap() == []
    bench.optimizer = SGD(bench.model.parameters(), lr=0.1)
    bench.train(3)
    assert bench.swap() == [3]
    failed = bench.tracker.swap()
    bench.table.weight.data = torch.ones(ROWS + 9, 3)
    bench.table.num_embeddings = ROWS + 9
    bench.train(ROWS + 8)
    assert "rows" in bench.tracker.whole_reasons()["t"]
    assert listed(bench.tracker.swap()["t"], ROWS + 9) == list(range(ROWS + 9))
    bench.tracker.swap()
    bench.train(ROWS + 8)
    assert listed(bench.tracker.swap()["t"], ROWS + 9) == [ROWS + 8]
    bench.tracker.restore(failed)
    assert listed(bench.tracker.swap()["t"], ROWS + 9) == list(range(ROWS + 9))


def test_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.WARNING, logger="cnr_store"):
        for _ in range(3):
            bench.write(1)
            bench.swap()
    (record,) = caplog.records
    assert "table 't' is compared with what is stored: it was changed outside" in record.getMessage()


def test_clear_forgets_everything() -> None:
    bench = Bench()
    bench.train(1)
    bench.tracker.restore(bench.tracker.swap())
    bench.model.load_state_dict({"t.weight": torch.ones(ROWS, 3)})
    bench.train(2)
    bench.tracker.clear()
    assert bench.tracker.whole_reasons() == {}
    assert bench.swap() == []


def test_close_takes_the_hooks_off() -> None:
    bench = Bench(given=False)
    bench.tracker.close()
    bench.tracker.close()
    bench.train(1)
    assert not bench.table._forward_hooks
    assert not getattr(bench.table.weight, "_post_accumulate_grad_hooks", None)


@pytest.mark.slow
def test_copied_and_pickled_models_are_not_tracked_and_keep_no_tracker_alive() -> None:
    bench = Bench()
    copied = copy.deepcopy(bench.model)
    file = io.BytesIO()
    torch.save(bench.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        other["t"](ids(1)).sum().backward()
        SGD(other.parameters(), lr=0.1).step()
    assert bench.swap() == []
    tracker = weakref.ref(bench.tracker)
    del bench.tracker
    gc.collect()
    assert tracker() is None
    bench.train(1)


# The compiler itself looks at every tensor's gradient where it leaves compiled code.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("given", [True, False])
def test_a_compiled_model_is_tracked(given: bool) -> None:
    bench = Bench("sgd", given)
    compiled: Any = torch.compile(nn.Sequential(bench.table, nn.Linear(3, 1)), backend="eager")
    for row in (1, 2):
        backward(compiled(ids(row, 5)).sum())
        bench.step()
        assert bench.tracker.whole_reasons() == {}
        assert bench.swap() == [row, 5]


def test_a_model_of_several_tables_and_optimizers() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(ROWS, 2, sparse=True), "b": nn.Embedding(ROWS, 2)})
    first: Optimizer = SparseAdam(model["a"].parameters())
    second = Adagrad(model["b"].parameters())
    tracker = Tracker(find_tables(model), [first, second])
    backward(model["a"](ids(1)).sum() + model["b"](ids(2)).sum())
    tracker.swap()
    first.step()
    swapped = tracker.swap()
    assert listed(swapped["a"]) == [1]
    assert not swapped["b"].any()
    second.step()
    assert listed(tracker.swap()["b"]) == [2]
