"""Ways to change rows that once went unseen, each told by the rows that a save then flags or a load returns."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_pre_hook

import cnr_store
from cnr_store import Checkpointer
from cnr_store.policies.policy import PolicyName
from cnr_store.training.model.tables import find_tables
from cnr_store.training.model.tensors import assign_rows
from cnr_store.training.tracking.bitmap import count, full_bitmap
from cnr_store.training.tracking.tracker import Tracker
from tests.nightly import NIGHT, TODAY
from tests.test_store.support.tracked_table import ALL, ROWS, TRUSTED, Bench, gather, ids, listed


@pytest.mark.parametrize("policy", ["one-shot", "consecutive", "intermittent"])
def test_a_load_by_another_checkpointer_is_seen(tmp_path: Path, policy: PolicyName) -> None:
    bench = Bench("adagrad")
    bench.train(7)
    cnr_store.save(tmp_path / "other", bench.model, bench.optimizer, bits=32)
    with Checkpointer(
        tmp_path / "store", bench.model, bench.optimizer, policy=policy, bits=32
    ) as checkpointer:
        bench.train(*ALL)
        checkpointer.save(0).result()
        cnr_store.load(tmp_path / "other", bench.model, bench.optimizer)
        bench.train(3)
        checkpointer.save(1).result()
        saved = Bench("adagrad")
        cnr_store.load(tmp_path / "store", saved.model, saved.optimizer)
        assert torch.equal(saved.table.weight, bench.table.weight)
        assert torch.equal(saved.slot(), bench.slot())


def test_a_load_of_its_own_leaves_nothing_to_save(tmp_path: Path) -> None:
    bench = Bench("adagrad")
    with Checkpointer(tmp_path, bench.model, bench.optimizer, policy="consecutive", bits=32) as checkpointer:
        bench.train(1)
        checkpointer.save(0).result()
        checkpointer.load()
        bench.train(2)
        version = checkpointer.save(1).result()
        assert version.rows == 1


class Averaged(nn.Module):
    """A student that trains, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Embedding(ROWS, 3), nn.Embedding(ROWS, 3)

    def forward(self, *rows: int) -> Any:
        return (self.student(ids(*rows)) - self.teacher(ids(*rows))).square().sum()

    def follow(self) -> None:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_average_of_a_table_is_whole_although_rows_were_looked_up(frozen: bool) -> None:
    model = Averaged()
    model.teacher.weight.requires_grad_(not frozen)
    optimizer = SGD(model.student.parameters(), lr=0.1)
    tracker = Tracker(find_tables(model), [optimizer])
    for _ in range(2):
        model(5, 6).backward()
        optimizer.step()
        model.follow()
        swapped = tracker.swap()
        assert listed(swapped["student"]) == [5, 6]
        assert listed(swapped["teacher"]) == ALL


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, 1000, 100_000])
def test_memory_that_comes_back_at_the_same_address_is_other_memory(rows: int) -> None:
    table = nn.Embedding(rows, 3)
    tracker = Tracker(find_tables(table), [SGD(table.parameters(), lr=0.1)])
    for _ in range(10):
        for _ in range(2):
            table.weight.data = table.weight.data * 0.5
        assert len(listed(tracker.swap()["weight"], rows)) == rows
        assert not tracker.swap()["weight"].any()


def test_values_laid_out_otherwise_in_the_same_memory_are_noticed() -> None:
    table = nn.Embedding(3, 3)
    tracker = Tracker(find_tables(table), [SGD(table.parameters(), lr=0.1)])
    table.weight.data = table.weight.data.t()
    assert listed(tracker.swap()["weight"], 3) == [0, 1, 2]


def test_a_model_made_in_inference_mode_is_whole_and_can_be_loaded(tmp_path: Path) -> None:
    saved = nn.Embedding(ROWS, 3)
    cnr_store.save(tmp_path, saved, bits=32)
    with torch.inference_mode():
        model = nn.Embedding(ROWS, 3)
        cnr_store.load(tmp_path, model)
        tracker = Tracker(find_tables(model))
        for _ in range(2):
            model(ids(1))
            assert "inference mode" in tracker.whole_reasons()["weight"]
            assert listed(tracker.swap()["weight"]) == ALL
    assert torch.equal(model.weight, saved.weight)


def by_loading_state(bench: Bench) -> None:
    bench.optimizer.load_state_dict(copy.deepcopy(bench.optimizer.state_dict()))


def by_loading_state_twice(bench: Bench) -> None:
    for _ in range(2):
        by_loading_state(bench)


def by_writing_a_slot(bench: Bench) -> None:
    bench.slot()[7].zero_()


def by_other_memory_of_a_slot(bench: Bench) -> None:
    bench.slot().data = bench.slot() + 1


def by_another_tensor(bench: Bench) -> None:
    kept = bench.optimizer.state[bench.table.weight]
    kept.update({key: value * 2 for key, value in kept.items() if value is bench.slot()})


def by_forgetting_state(bench: Bench) -> None:
    bench.optimizer.state[bench.table.weight].clear()


def by_a_hook_before_a_step(bench: Bench) -> None:
    handle = bench.optimizer.register_step_pre_hook(lambda *_: by_writing_a_slot(bench))
    bench.train(1)
    handle.remove()


def by_a_hook_after_a_step(bench: Bench) -> None:
    handle = bench.optimizer.register_step_post_hook(lambda *_: by_writing_a_slot(bench))
    bench.train(1)
    handle.remove()


def by_a_hook_at_a_step_without_gradients(bench: Bench) -> None:
    handle = bench.optimizer.register_step_post_hook(lambda *_: by_writing_a_slot(bench))
    bench.step()
    handle.remove()


CHANGES_OF_STATE = (
    by_loading_state,
    by_loading_state_twice,
    by_writing_a_slot,
    by_other_memory_of_a_slot,
    by_another_tensor,
    by_forgetting_state,
    by_a_hook_before_a_step,
    by_a_hook_after_a_step,
    by_a_hook_at_a_step_without_gradients,
)
KINDS_WITH_STATE = [kind for kind in TRUSTED if "ada" in kind]


@pytest.mark.parametrize("kind", KINDS_WITH_STATE)
@pytest.mark.parametrize("change", CHANGES_OF_STATE)
@pytest.mark.parametrize("goes_on", [False, True])
def test_state_changed_outside_steps_makes_the_table_whole_once(
    kind: str, change: Callable[[Bench], None], goes_on: bool
) -> None:
    bench = Bench(kind)
    bench.train(1, 7)
    assert bench.swap() == [1, 7]
    change(bench)
    if goes_on and (change is not by_forgetting_state or kind == "sparse_adam"):  # Adagrad makes none anew
        bench.train(2)
    assert bench.swap() == ALL
    assert bench.swap() == []


def test_state_that_a_step_makes_or_that_no_save_keeps_leaves_its_table_alone() -> None:
    bench = Bench("sparse_adam")
    bench.train(3)
    bench.optimizer.load_state_dict(bench.optimizer.state_dict())  # the same tensors
    assert bench.swap() == [3]
    other = Bench("adagrad", given=False)
    other.train(3)
    by_loading_state(other)
    assert other.swap() == [3]


def test_rows_of_state_changed_by_hand_can_be_told() -> None:
    bench = Bench("adagrad")
    by_writing_a_slot(bench)
    bench.tracker.mark("t", [7])
    assert bench.swap() == [7]


def by_other_memory(bench: Bench) -> None:
    bench.table.weight.data = bench.table.weight.data + 1


@pytest.mark.parametrize("change", [by_loading_state, by_another_tensor, by_other_memory])
def test_telling_rows_does_not_explain_a_tensor_that_was_replaced(change: Callable[[Bench], None]) -> None:
    bench = Bench("adagrad")
    change(bench)
    bench.tracker.mark("t", [7])
    assert "replaced" in bench.tracker.whole_reasons()["t"]
    assert bench.swap() == ALL
    assert bench.swap() == []


@pytest.mark.slow
@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("kind", ["adagrad", "sparse_adam"])
@pytest.mark.parametrize("policy", ["one-shot", "consecutive", "intermittent"])
def test_state_changed_outside_steps_is_saved(tmp_path: Path, policy: PolicyName, kind: str) -> None:
    bench = Bench(kind)
    with Checkpointer(tmp_path, bench.model, bench.optimizer, policy=policy, bits=32) as checkpointer:
        bench.train(*ALL)
        for step, change in enumerate(CHANGES_OF_STATE):
            checkpointer.save(step).result()
            if change is by_forgetting_state:
                continue
            change(bench)
            bench.train(step)
            checkpointer.save(step).result()
            saved = Bench(kind)
            cnr_store.load(tmp_path, saved.model, saved.optimizer)
            assert torch.equal(saved.slot(), bench.slot())
            assert torch.equal(saved.table.weight, bench.table.weight)


class InterruptedLine:
    """Raises KeyboardInterrupt at the n-th line that a function and all that it calls come to."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: object) -> InterruptedLine:
        if event == "line" and "training" in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def run(self, call: Callable[[], object]) -> bool:
        """Whether the call ended before that line."""
        former = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return False
        finally:
            sys.settrace(former)
        return True


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False])
def test_a_swap_interrupted_anywhere_forgets_no_row(given: bool) -> None:
    for line in itertools.count(1) if NIGHT else itertools.count(1 + TODAY % 2, 2):
        model = nn.ModuleDict({name: nn.Embedding(ROWS, 3, sparse=True) for name in "abc"})
        optimizer = SGD(model.parameters(), lr=0.1)
        tracker = Tracker(find_tables(model), [optimizer] if given else [])
        total = model["a"](ids(1)).sum() + model["b"](ids(2)).sum() + model["c"](ids(3)).sum()
        total.backward()
        optimizer.step()
        with torch.no_grad():
            model["c"].get_parameter("weight").add_(1)
        if not given:
            tracker.restore({"c": full_bitmap(ROWS)})
        if InterruptedLine(line).run(tracker.swap):
            assert line > 30
            return
        swapped = {name: listed(flagged) for name, flagged in tracker.swap().items()}
        assert swapped == {"a": [1], "b": [2], "c": ALL}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("rows", "other"), [(7, 9), (33, 40), (40, 33), (40, 41), (9, 7), (40, 400)])
def test_flags_follow_a_table_that_gets_other_rows(given: bool, rows: int, other: int) -> None:
    table = nn.Embedding(rows, 3)
    every, now = list(range(rows)), list(range(other))
    tracker = Tracker(find_tables(table), [SGD(table.parameters(), lr=0.1)] if given else [])
    failed = [tracker.swap()]
    table(ids(1))
    failed.append(tracker.swap())
    table.weight.grad = None
    with torch.no_grad():
        table.weight.add_(1)
    failed.append(tracker.swap())
    assert listed(failed[1]["weight"], rows) == []
    assert listed(failed[2]["weight"], rows) == every
    table.weight = nn.Parameter(torch.ones(other, 3))
    tracker.mark("weight", [other - 1])
    for flagged in failed:
        tracker.restore(flagged)
    assert listed(tracker.swap()["weight"], other) == now
    for flagged in failed:
        tracker.restore(flagged)
    last = tracker.swap()["weight"]
    assert len(last) == (other + 7) // 8
    assert count(last) == len(listed(last, other)) >= min(rows, other)
    if (rows + 7) // 8 != (other + 7) // 8:
        assert listed(last, other) == now
    assert not given or not tracker.swap()["weight"].any()


def test_rows_marked_in_a_table_with_other_rows_than_flags_make_it_whole() -> None:
    bench = Bench()
    bench.table.weight.data = torch.ones(ROWS + 20, 3)
    bench.tracker.mark("t", [ROWS + 19])
    assert listed(bench.tracker.swap()["t"], ROWS + 20) == list(range(ROWS + 20))
    bench.tracker.mark("t", [ROWS + 19])
    assert listed(bench.tracker.swap()["t"], ROWS + 20) == [ROWS + 19]


def bfloat16_patterns() -> torch.Tensor:
    """Every bfloat16 there is, (2**13, 8)."""
    return (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 8)
    )


def test_every_bfloat16_survives_gathering_and_assigning() -> None:
    patterns = bfloat16_patterns()
    order = torch.randperm(len(patterns)).numpy()
    other = torch.zeros_like(patterns)
    assign_rows(other, 0, gather(patterns, order))
    assert torch.equal(other.view(torch.int16), patterns[order].view(torch.int16))


def test_float32_is_rounded_to_bfloat16_as_torch_does_and_stays_nan() -> None:
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 1 << 32, (4096, 8), dtype=np.uint32)
    bits[0] = (0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x80000001)
    values = bits.view(np.float32)
    out = torch.zeros(values.shape, dtype=torch.bfloat16)
    assign_rows(out, 0, values)
    finite = ~np.isnan(values)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert torch.equal(out[finite].view(torch.int16), expected[finite].view(torch.int16))
    assert np.array_equal(out.isnan().numpy(), ~finite)
    assert np.array_equal(out.signbit().numpy(), np.signbit(values))


def test_a_bfloat16_table_keeps_every_bit_with_lossless_rows(tmp_path: Path) -> None:
    table, other = (
        nn.Embedding(1 << 13, 8, dtype=torch.bfloat16),
        nn.Embedding(1 << 13, 8, dtype=torch.bfloat16),
    )
    with torch.no_grad():
        table.weight.copy_(bfloat16_patterns())
    cnr_store.save(tmp_path, table, bits=32)
    cnr_store.load(tmp_path, other)
    assert torch.equal(other.weight.view(torch.int16), table.weight.view(torch.int16))


def test_max_norm_that_is_set_later_makes_the_table_whole() -> None:
    bench = Bench()
    bench.train(1)
    bench.table.max_norm = 0.01
    bench.forward(2)
    assert bench.swap() == ALL


@pytest.mark.parametrize("fresh", [True, False])
def test_a_step_that_passes_an_empty_gradient_over_explains_no_change(fresh: bool) -> None:
    bench = Bench("sparse_adam")
    if not fresh:
        bench.train(3)
        assert bench.swap() == [3]
    bench.optimizer.zero_grad()
    bench.table(torch.empty(0, dtype=torch.int64)).sum().backward()
    bench.optimizer.step()
    assert bench.swap() == []

    def change_once(*_: object) -> None:
        bench.table.weight.detach()[7] = 5

    handle = bench.optimizer.register_step_pre_hook(change_once)
    bench.optimizer.step()
    handle.remove()
    assert bench.swap() == ALL


def test_a_tracker_may_be_collected_within_a_step() -> None:
    bench, other = Bench(), Bench()

    def collect(*_: object) -> None:
        del other.tracker

    handle = register_optimizer_step_pre_hook(collect)
    try:
        bench.train(1)
    finally:
        handle.remove()
    assert bench.swap() == [1]
    assert not other.table._forward_hooks
