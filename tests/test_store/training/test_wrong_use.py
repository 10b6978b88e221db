"""Calls that can't be meant have one clear error, and what can be meant works: state made by a load, odd integers."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

import cnr_store
from cnr_backends import BackendError
from cnr_store import (
    BusyError,
    Checkpointer,
    CheckpointError,
    ClosedError,
    ModelMismatchError,
    OptionError,
    StateError,
    SupersededError,
    VersionNotFoundError,
)
from cnr_store.training.process.threads import ReentrantGuard
from tests.test_store.support.lasting_store import ROWS, assert_newest, change, make_model, weight
from tests.test_store.support.tracked_table import Bench


@pytest.mark.parametrize("url", [None, "", 3, b"x"])
def test_url_that_is_none(url: Any) -> None:
    with pytest.raises((CheckpointError, BackendError)) as caught:
        Checkpointer(url, make_model())
    assert "url" in str(caught.value).lower() or "place" in str(caught.value)


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, np.float32(1), [1]])
def test_step_that_is_none(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path, make_model()) as checkpointer:
        with pytest.raises(OptionError, match=r"step=.*: give an integer of at least 0"):
            checkpointer.save(step)
    assert cnr_store.versions(tmp_path) == []


def test_integers_of_numpy_are_integers(tmp_path: Path) -> None:
    one: Any = np.int8(1)
    step: Any = np.int64(7)
    with Checkpointer(tmp_path, make_model(), limits=cnr_store.Limits(workers=one)) as checkpointer:
        info = checkpointer.save(step).result()
        assert type(info.step) is int
        assert checkpointer.load(step).step == 7
        checkpointer.touch("t", np.array([3, ROWS - 1], np.uint16))


def test_a_step_as_text_is_no_version(tmp_path: Path) -> None:
    cnr_store.save(tmp_path, make_model(), step=10)
    with pytest.raises(
        VersionNotFoundError, match="give an id as `versions` lists them, a step, a tag, or 'latest'"
    ):
        cnr_store.load(tmp_path, make_model(), version="10")


def test_loading_twice_loads_twice(tmp_path: Path) -> None:
    model = make_model()
    first = cnr_store.save(tmp_path, model, step=1, bits=32)
    other = make_model(1)
    with Checkpointer(tmp_path, other, SGD(other.parameters(), lr=0.1), bits=32) as checkpointer:
        with pytest.raises(ModelMismatchError):  # it was saved without an optimizer
            checkpointer.load()
    with Checkpointer(tmp_path, other, bits=32) as checkpointer:
        assert checkpointer.load().version == first
        change(checkpointer, other, [4])
        assert checkpointer.load().version == first
        assert torch.equal(weight(other), weight(model))
        assert checkpointer.save(2).result().previous == first.id
    assert_newest(tmp_path, other)


@pytest.mark.parametrize("mask", [np.ones(ROWS, bool), torch.zeros(ROWS, dtype=torch.bool), [True, False]])
def test_a_mask_is_no_list_of_rows(tmp_path: Path, mask: Any) -> None:
    with Checkpointer(tmp_path, make_model()) as checkpointer:
        with pytest.raises(ModelMismatchError, match=r"ids are a mask of torch\.bool; give row numbers"):
            checkpointer.touch("t", mask)


def test_a_generator_is_no_reader(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, make_model()) as checkpointer:
        with pytest.raises(
            cnr_store.StateError, match=r"state\['reader'\]: a builtins.generator can't be stored"
        ):
            checkpointer.save(1, reader=(batch for batch in range(3)))


@pytest.mark.parametrize("kind", [SparseAdam, Adagrad])
def test_loading_makes_state_that_is_not_there_yet(tmp_path: Path, kind: type[Optimizer]) -> None:
    def make(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.EmbeddingBag(500, 8, mode="sum", sparse=True)
        return model, kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]

    def step(model: nn.Module, optimizer: Any, ids: list[int]) -> None:
        optimizer.zero_grad()
        model(torch.tensor([ids])).sum().backward()
        optimizer.step()

    model, optimizer = make(0)
    with Checkpointer(tmp_path, model, optimizer, bits=32) as checkpointer:
        step(model, optimizer, [1, 2, 3])
        checkpointer.save(1).result()
    fresh, made = make(1)
    cnr_store.load(tmp_path, fresh, made)
    for pair in ((model, optimizer), (fresh, made)):
        step(*pair, [2, 4])
    assert torch.equal(fresh.get_parameter("weight"), model.get_parameter("weight"))


class Mean:
    """A metric as users have them: sums in tensors, with a state of its own."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.seen = state["total"], state["seen"]


def test_scheduler_scaler_and_metric_go_along(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Any, dict[str, Any]]:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return (
            model,
            optimizer,
            {"scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu"), "mean": Mean()},
        )

    model, optimizer, state = make()
    with Checkpointer(tmp_path, model, optimizer, state=state, bits=32) as checkpointer:
        for _ in range(3):
            optimizer.zero_grad()
            state["scaler"].scale(
                weight(model).new_ones(()) * model.get_parameter("t.weight").sum()
            ).backward()
            state["scaler"].step(optimizer)
            state["scaler"].update(4096.0)
            state["scheduler"].step()
            state["mean"].total, state["mean"].seen = state["mean"].total + 0.1, state["mean"].seen + 1
        checkpointer.save(3).result()
    other, other_optimizer, found = make()
    cnr_store.load(tmp_path, other, other_optimizer, state=found)
    assert found["scheduler"].state_dict() == state["scheduler"].state_dict()
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.0625
    assert found["scaler"].state_dict() == state["scaler"].state_dict()
    assert found["mean"].state_dict() == state["mean"].state_dict()


def test_messages_say_how_to_make_numbers_of_tensors(tmp_path: Path) -> None:
    step: Any = torch.tensor(3)
    with Checkpointer(tmp_path, make_model()) as checkpointer:
        with pytest.raises(OptionError, match=r"as with step\.item\(\)"):
            checkpointer.save(step)
        mask = torch.arange(ROWS) < 2
        with pytest.raises(ModelMismatchError, match=r"mask .* give row numbers, as with mask\.nonzero\(\)"):
            checkpointer.touch("t", mask)
        checkpointer.touch("t", mask.nonzero())
        assert checkpointer.save(step.item()).result().step == 3


def test_a_closed_checkpointer_is_not_entered(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, make_model())
    checkpointer.close()
    with pytest.raises(ClosedError, match="make a new one"):
        with checkpointer:
            raise AssertionError


def test_a_writer_beside_it_in_the_same_process_is_told_of_as_what_it_is(tmp_path: Path) -> None:
    first, second = (Checkpointer(tmp_path, make_model()) for _ in range(2))
    first.save(1).result()
    second.save(2).result()
    pending = first.save(3)
    with pytest.raises(
        SupersededError, match="another checkpointer, so it can't save any more; stop this job"
    ):
        pending.result()
    first.close()
    second.close()


def grown(bench: Bench) -> torch.Tensor:
    """Give the table twice the rows, as a new parameter in the old one's place; the optimizer's state stays."""
    old = bench.table.weight
    new = bench.table.weight = nn.Parameter(torch.cat([old.detach(), old.detach()]))
    bench.table.num_embeddings = len(new)
    bench.optimizer.param_groups[0]["params"] = [new]
    return old


def test_a_state_dict_that_changes_a_slot(tmp_path: Path) -> None:
    def change(
        _optimizer: object, told: dict[str, Any], by: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, Any]:
        state = {key: {**values, "sum": by(values["sum"])} for key, values in told["state"].items()}
        return told | {"state": state}

    bench = Bench("adagrad")
    bench.train(1)
    with Checkpointer(tmp_path, bench.model, bench.optimizer, bits=32) as checkpointer:
        hook = bench.optimizer.register_state_dict_post_hook(partial(change, by=torch.clone))
        checkpointer.save(1).result()
        hook.remove()
        bench.optimizer.register_state_dict_post_hook(partial(change, by=torch.sqrt))
        with pytest.raises(StateError, match=r"state_dict of Adagrad returns other values of 'sum'"):
            checkpointer.save(2)
    other = Bench("adagrad")
    cnr_store.load(tmp_path, other.model, other.optimizer)
    assert torch.equal(other.slot(), bench.slot())


def test_a_parameter_that_grew_without_its_state(tmp_path: Path) -> None:
    bench = Bench("adagrad")
    with Checkpointer(tmp_path, bench.model, bench.optimizer, bits=32) as checkpointer:
        bench.train(1)
        checkpointer.save(1).result()
        old = grown(bench)
        with pytest.raises(StateError, match=r"Adagrad .*in none of its groups.*pop\(old\)"):
            checkpointer.save(2)
        state = bench.optimizer.state
        state[bench.table.weight] = {
            key: torch.cat([value, value]) if key == "sum" else value for key, value in state.pop(old).items()
        }
        bench.train(79)
        checkpointer.save(2).result()
    other = Bench("adagrad")
    other.optimizer.state.pop(grown(other))
    cnr_store.load(tmp_path, other.model, other.optimizer)
    assert torch.equal(other.table.weight, bench.table.weight)
    assert torch.equal(other.slot(), bench.slot())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_checkpointer_is_not_duplicated(tmp_path: Path, duplicate: Callable[[object], object]) -> None:
    with Checkpointer(tmp_path, make_model()) as checkpointer:
        with pytest.raises(
            TypeError, match=r"a Checkpointer can't be copied or pickled.*make a new one"
        ) as caught:
            duplicate(checkpointer)
        assert isinstance(caught.value, CheckpointError)
        checkpointer.save(1).result()


@pytest.mark.parametrize("optimizer", [object(), object, [SGD]])
def test_an_optimizer_that_is_none(tmp_path: Path, optimizer: Any) -> None:
    with pytest.raises(StateError, match=r"give a torch\.optim\.Optimizer or several"):
        Checkpointer(tmp_path, make_model(), optimizer)


def test_an_owner_that_an_interrupt_left_refuses_nobody() -> None:
    guard = ReentrantGuard()
    guard._owner = threading.get_ident()
    with (
        guard.enter("save"),
        pytest.raises(BusyError, match="inside the same checkpointer"),
        guard.enter("load"),
    ):
        pass
