"""Settings and state of optimizers that are no plain values: they come back as they were, or are refused by name."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import cnr_store
from cnr_store import ModelMismatchError, StateError


class Norm(enum.Enum):
    SPECTRAL = 1
    COLUMNS = ("columns", 2)


class Lesser(enum.Enum):
    """What has become of `Norm`."""

    __qualname__ = "Norm"
    SPECTRAL = 1


class Kind(enum.StrEnum):
    SLOW = "slow"
    FAST = "fast"


class Way(enum.IntFlag):
    UP = 1
    LEFT = 2


class Betas(NamedTuple):
    first: float
    norm: Norm


SETTINGS: dict[str, tuple[Any, Any]] = {
    "type": (torch.bfloat16, None),
    "device": (torch.device("cuda:3"), torch.device("cpu")),
    "shape": (torch.Size([2, 3]), ()),
    "enum": (Norm.COLUMNS, Norm.SPECTRAL),
    "text enum": (Kind.FAST, Kind.SLOW),
    "flags": (Way.UP | Way.LEFT, Way.UP),
    "named tuple": (Betas(0.5, Norm.COLUMNS), Betas(0.1, Norm.SPECTRAL)),
    "nested": ({"of": [(1, Norm.COLUMNS), torch.int8]}, {"of": [(2, Norm.SPECTRAL), torch.int64]}),
    "queue": (deque([1.5, (2, None)], maxlen=5), deque()),
    "endless queue": (deque([torch.float16]), ()),
    "scalar": (np.float32(0.1), 0),
    "count": (np.int64(1 << 62), 0),
}
"""What was saved, and what an optimizer has before the load."""


def _model() -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({"users": nn.Embedding(30, 4), "top": nn.Linear(4, 1)})


def _with_settings(position: int) -> tuple[Any, Optimizer]:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0].update({key: values[position] for key, values in SETTINGS.items()})
    return model, optimizer


def test_settings_come_back_in_their_classes(tmp_path: Path) -> None:
    cnr_store.save(tmp_path, *_with_settings(0))
    model, optimizer = _with_settings(1)
    cnr_store.load(tmp_path, model, optimizer)
    for key, (saved, _) in SETTINGS.items():
        _assert_same(optimizer.param_groups[0][key], saved)


def test_a_setting_whose_class_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    cnr_store.save(tmp_path, *_with_settings(0))
    for key, other in (("enum", Kind.FAST), ("enum", None), ("named tuple", (1, 2)), ("flags", "UP")):
        model, optimizer = _with_settings(1)
        with torch.no_grad():
            model["top"].weight.fill_(7)
        optimizer.param_groups[0][key] = other
        with pytest.raises(
            ModelMismatchError, match=rf"param_groups of optimizer 0\[0\]\['{key}'\] was a .*set it to"
        ):
            cnr_store.load(tmp_path, model, optimizer)
        assert (model["top"].weight == 7).all()
        restored = cnr_store.load(tmp_path, model, optimizer, strict="ignore")
        assert restored.missing == ("settings of optimizer 0",)
        assert optimizer.param_groups[0]["nested"] == SETTINGS["nested"][1]


def test_a_member_that_an_enum_has_lost(tmp_path: Path) -> None:
    model, optimizer = _with_settings(0)
    cnr_store.save(tmp_path, model, optimizer)
    optimizer.param_groups[0]["enum"] = Lesser.SPECTRAL
    with pytest.raises(
        ModelMismatchError, match=r"\['enum'\] was a .*Norm of .*'columns', 2.* is not a valid Norm"
    ):
        cnr_store.load(tmp_path, model, optimizer)


@pytest.mark.parametrize("value", [len, {"of": [object()]}, slice(3), 1 + 2j, {1, 2}])
def test_a_setting_that_cannot_be_stored_is_refused_at_once(tmp_path: Path, value: Any) -> None:
    model, optimizer = _with_settings(0)
    optimizer.param_groups[0]["odd"] = value
    with pytest.raises(
        StateError, match=r"state\['optimizers'\]\[0\]\['param_groups'\]\[0\]\['odd'\].*post_hook"
    ):
        cnr_store.Checkpointer(tmp_path, model, optimizer)


def test_the_way_out_of_a_setting_that_cannot_be_stored(tmp_path: Path) -> None:
    def made(lr: float) -> tuple[Any, Optimizer]:
        model = _model()
        optimizer = SGD(model.parameters(), lr=lr)
        optimizer.param_groups[0]["measure"] = len
        optimizer.register_state_dict_post_hook(
            lambda _, state: state["param_groups"][0].pop("measure") and None
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: state["param_groups"][0].update(measure=len)
        )
        return model, optimizer

    with cnr_store.Checkpointer(tmp_path, *made(0.5)) as checkpointer:
        checkpointer.save(1)
    model, optimizer = made(0.1)
    with cnr_store.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        assert checkpointer.resume() == 1
    assert optimizer.param_groups[0]["measure"] is len
    assert optimizer.param_groups[0]["lr"] == 0.5


class ByQueue(SGD):
    """Steps by the oldest of the last three gradients, and keeps things of many classes besides."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                queue = state.setdefault("queue", deque(maxlen=3))
                queue.append(parameter.grad.double())
                state["kept"] = {"in": [deque([(parameter.grad.half(), 3)]), torch.int32]}
                state["counts"] = Counter(seen=len(queue))
                state["order"] = OrderedDict(b=parameter.grad.bool(), a=b"x")
                state["plain"] = np.arange(6, dtype=np.int16).reshape(2, 3)
                state["scalar"] = np.float64(0.1)
                state["like"] = (parameter.shape, parameter.dtype, "text")
                with torch.no_grad():
                    parameter.sub_(queue[0].to(parameter.dtype))


def test_state_comes_back_in_its_classes_and_trains_on(tmp_path: Path) -> None:
    def made() -> tuple[Any, Optimizer]:
        model = _model().bfloat16()
        return model, ByQueue(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model["top"](model["users"](torch.tensor([step, 5]))).square().sum().backward()
            optimizer.step()

    model, optimizer = made()
    train(model, optimizer, range(5))
    cnr_store.save(tmp_path, model, optimizer, bits=32)
    again, other = made()
    cnr_store.load(tmp_path, again, other)
    for _ in range(2):
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)
            _assert_same(optimizer.state[one], other.state[two])
        train(model, optimizer, range(5, 9))
        train(again, other, range(5, 9))


@pytest.mark.parametrize("value", [Norm.SPECTRAL, Betas(0.1, Norm.COLUMNS)])
def test_other_classes_in_state_are_refused_with_their_path(tmp_path: Path, value: Any) -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model["top"].bias]["odd"] = [value]
    with pytest.raises(StateError, match=r"\['state'\]\['top.bias'\]\['odd'\]\[0\]: a .*an enum's value"):
        cnr_store.save(tmp_path, model, optimizer)
    with pytest.raises(StateError, match=r"state\['reader'\]\['at'\]: a "):
        with cnr_store.Checkpointer(tmp_path, model) as checkpointer:
            checkpointer.save(1, reader={"at": value})


def test_types_and_queues_of_readers_and_objects(tmp_path: Path) -> None:
    value = {"type": torch.bool, torch.int8: deque([b"x"], maxlen=1), "shape": torch.Size([])}

    class Own:
        kept: Any = None

        def state_dict(self) -> Any:
            return value

        def load_state_dict(self, state: Any) -> None:
            self.kept = state

    with cnr_store.Checkpointer(tmp_path, _model(), state={"own": Own()}) as checkpointer:
        checkpointer.save(1, reader=value)
    own = Own()
    restored = cnr_store.load(tmp_path, _model(), state={"own": own})
    _assert_same(own.kept, value)
    _assert_same(restored.reader, value)
    with pytest.raises(StateError, match=r"state\['metadata'\]\['type'\]: a torch.dtype can't be stored"):
        cnr_store.save(tmp_path, _model(), metadata={"type": torch.bool})


BIG = torch.tensor(2.0**24 + 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "saved", "wanted"),
    [
        ({"capturable": True, "foreach": False}, BIG, BIG),
        ({"capturable": True, "foreach": True}, BIG.long(), BIG.long()),
        ({}, BIG, BIG),
        (
            {"fused": True},
            torch.tensor(7.0, dtype=torch.float64),
            torch.tensor(7.0),
        ),  # kernels take no other type
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_counted_in_the_type_that_they_had(
    tmp_path: Path, options: dict[str, Any], saved: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype
) -> None:
    def made() -> tuple[Any, Optimizer]:
        model = _model().to(dtype)
        return model, Adam(model.parameters(), **options)

    model, optimizer = made()
    for one in model.parameters():
        optimizer.state[one] = {
            "step": saved.clone(),
            "exp_avg": torch.zeros_like(one),
            "exp_avg_sq": one.square(),
        }
        optimizer.state[one]["nested"] = {"step": saved.clone()}
    cnr_store.save(tmp_path, model, optimizer, bits=32)
    model, optimizer = made()
    cnr_store.load(tmp_path, model, optimizer)
    for one in model.parameters():
        _assert_same(optimizer.state[one]["step"], wanted)
        _assert_same(optimizer.state[one]["nested"]["step"], wanted)


def test_hooks_see_state_in_its_classes(tmp_path: Path) -> None:
    seen: list[Callable[[], Any]] = []
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model["top"].bias]["queue"] = deque([torch.ones(1, dtype=torch.float64)], maxlen=2)
    cnr_store.save(tmp_path, model, optimizer)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["state"][2]["queue"]))
    optimizer.register_load_state_dict_post_hook(
        lambda one: seen.append(one.state[model["top"].bias]["queue"])
    )
    cnr_store.load(tmp_path, model, optimizer)
    for queue in seen:
        _assert_same(queue, deque([torch.ones(1, dtype=torch.float64)], maxlen=2))
    assert len(seen) == 2


def _assert_same(left: Any, right: Any) -> None:
    """Values and classes of two trees, bit for bit."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor | np.ndarray | np.generic):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert (left == right).all()
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            _assert_same(left[key], right[key])
    elif isinstance(left, list | tuple | deque):
        assert len(left) == len(right)
        assert getattr(left, "maxlen", None) == getattr(right, "maxlen", None)
        for one, other in zip(left, right, strict=True):
            _assert_same(one, other)
    else:
        assert left == right
