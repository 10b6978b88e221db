"""Which optimizers leave rows alone, and their state taken apart and put together again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam

import cnr_store
from cnr_store.errors import ModelMismatchError, StateError, UnsupportedModelError
from cnr_store.training.model.names import parameter_names
from cnr_store.training.model.optimizer_state import as_list, load_optimizer, optimizer_tree, row_slots
from cnr_store.training.model.tables import find_tables
from tests.test_store.support.rowwise_optimizers import RowWiseAdagrad
from tests.test_store.support.tracked_table import moves_untouched

Make = Callable[[Any], Optimizer]

MAKERS: dict[str, tuple[Make, bool]] = {
    "sgd": (lambda params: SGD(params, lr=0.1), True),
    "momentum": (lambda params: SGD(params, lr=0.1, momentum=0.9), False),
    "adagrad": (lambda params: Adagrad(params, lr=0.1, lr_decay=0.01), True),
    "rowwise_adagrad": (lambda params: RowWiseAdagrad(params, lr=0.1, lr_decay=0.01), False),
    "adagrad_fused": (lambda params: Adagrad(params, lr=0.1, fused=True), False),
    "sparse_adam": (lambda params: SparseAdam(params, lr=0.1), True),
    "adam": (lambda params: Adam(params, lr=0.1), False),
    "amsgrad": (lambda params: Adam(params, lr=torch.tensor(0.1), amsgrad=True), False),
    "adamw": (lambda params: AdamW(params, lr=0.1), False),
    "rmsprop": (lambda params: RMSprop(params, lr=0.1, centered=True), False),
}
TRUSTED = {"sgd", "adagrad", "rowwise_adagrad", "sparse_adam"}


def build(sparse: bool, seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"a": nn.Embedding(9, 3, sparse=sparse), "b": nn.Embedding(5, 3, sparse=sparse)})


def train(model: nn.Module, optimizer: Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        for table in find_tables(model):
            ids = torch.randint(table.rows, (4,), generator=generator)
            table.modules[0](ids).square().sum().backward()
        optimizer.step()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_optimizer_goes_on_bit_for_bit(name: str) -> None:
    make, sparse = MAKERS[name]
    model = build(sparse)
    optimizer = make(model.parameters())
    train(model, optimizer, 3, seed=1)
    tables = find_tables(model)
    tree = copy.deepcopy(optimizer_tree(optimizer, parameter_names(model), tables))
    slots = {
        table.name: {slot: value.clone() for slot, value in row_slots(optimizer, table.parameter).items()}
        for table in tables
    }

    other = build(sparse, seed=5)
    other.load_state_dict(model.state_dict())
    fresh = make(other.parameters())
    load_optimizer(fresh, parameter_names(other), find_tables(other), tree, slots)
    for table in find_tables(other):
        for slot, value in slots[table.name].items():
            assert fresh.state[table.parameter][slot].data_ptr() == value.data_ptr()
    train(model, optimizer, 3, seed=2)
    train(other, fresh, 3, seed=2)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert bits(ours) == bits(theirs)
        for slot, value in row_slots(optimizer, ours).items():
            assert bits(value) == bits(row_slots(fresh, theirs)[slot])


@pytest.mark.parametrize("name", MAKERS)
def test_rows_without_a_gradient_stay_where_they_surely_should(name: str) -> None:
    make, sparse = MAKERS[name]
    model = build(sparse)
    optimizer = make(model.parameters())
    (weight, _) = model.parameters()
    model["a"](torch.arange(9)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = weight.detach().clone()
    model["a"](torch.tensor([1])).square().sum().backward()
    optimizer.step()
    stayed = torch.equal(before[2:], weight.detach()[2:])
    assert stayed or moves_untouched(optimizer, weight) is not None
    assert (moves_untouched(optimizer, weight) is None) == (name in TRUSTED)


def changed(optimizer: Optimizer, **settings: object) -> Optimizer:
    """With settings that its constructor would refuse, as loaded ones may be."""
    optimizer.param_groups[0].update(settings)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda p: SGD(p, lr=0.1), None),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), r"SGD, parameter group 0: momentum=0\.9"),
        (lambda p: SGD(p, lr=0.1, weight_decay=0.5), r"weight_decay=0\.5"),
        (lambda p: SGD(p, lr=float("inf")), "lr=inf"),
        (lambda p: changed(SGD(p, lr=0.1), lr=-0.1), r"lr=-0\.1"),
        (lambda p: SGD(p, lr=torch.tensor(torch.inf)), r"lr=inf"),
        (lambda p: SGD(p, lr=0.1, maximize=True), r"maximize=1\.0"),
        (lambda p: SGD(p, lr=0.1, fused=True), r"no change that a fused step"),
        (lambda p: Adagrad(p, fused=True), r"no change that a fused step"),
        (lambda p: Adagrad(p), None),
        (lambda p: Adagrad(p, weight_decay=0.1), r"Adagrad, parameter group 0: weight_decay=0\.1"),
        (lambda p: Adagrad(p, eps=0), "eps=0"),
        (lambda p: Adagrad(p, eps=1e-60), "eps=1e-60"),
        (lambda p: changed(Adagrad(p), eps=math.nan), "eps=nan"),
        (lambda p: changed(Adagrad(p), eps=-1.0), r"eps=-1\.0"),
        (lambda p: changed(Adagrad(p), lr_decay=math.nan), "lr_decay=nan"),
        (lambda p: changed(Adagrad(p), lr_decay=-0.5), r"lr_decay=-0\.5"),
        (lambda p: changed(Adagrad(p), eps=torch.tensor(1e-3), lr_decay=0.5), None),
        (lambda p: SparseAdam(p), None),
        (lambda p: Adam(p), "Adam, parameter group 0: .*may move every row"),
        (lambda p: RMSprop(p), "RMSprop"),
    ],
)
def test_only_known_optimizers_are_trusted(optimizer: Make, why: str | None) -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    reason = moves_untouched(optimizer([weight]), weight)
    if why is None:
        assert reason is None
    else:
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(reason)


IMPLEMENTATIONS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}]
SETTINGS: dict[str, Make] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "sgd of no rate": lambda params: SGD(params, lr=0.0),
    "sgd of a tensor's rate": lambda params: SGD(params, lr=torch.tensor(0.1)),
    "sgd with dampening": lambda params: SGD(params, lr=0.1, dampening=0.5),
    "sgd of a negative rate": lambda params: SGD(params, lr=0.1),
    "sgd that maximizes": lambda params: SGD(params, lr=0.1, maximize=True),
    "adagrad": lambda params: Adagrad(params, lr=0.1, eps=1e-3),
    "adagrad with decay of its rate": lambda params: Adagrad(params, lr=0.1, lr_decay=0.01, eps=1e-3),
    "adagrad that began with sums": lambda params: Adagrad(
        params, lr=0.1, initial_accumulator_value=0.1, eps=1e-3
    ),
    "row-wise adagrad": lambda params: RowWiseAdagrad(params, lr=0.1, lr_decay=0.01, eps=1e-3),
    "row-wise adagrad that began with sums": lambda params: RowWiseAdagrad(
        params, lr=0.1, initial_accumulator_value=0.1, eps=1e-3
    ),
    "row-wise adagrad that maximizes": lambda params: RowWiseAdagrad(params, lr=0.1, maximize=True, eps=1e-3),
    "adagrad that maximizes": lambda params: Adagrad(params, lr=0.1, maximize=True, eps=1e-3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_bit_of_a_row_without_a_gradient_moves(
    name: str, implementation: dict[str, bool], dtype: torch.dtype
) -> None:
    weight = nn.Parameter(torch.randn(101, 16, generator=torch.Generator().manual_seed(1)).to(dtype))
    with torch.no_grad():
        weight[::3], weight[1::3] = -0.0, 0.0
        weight[2], weight[5], weight[8] = math.inf, -math.inf, 1e-40
    optimizer = SETTINGS[name]([weight])
    optimizer.param_groups[0].update(implementation)
    if "negative rate" in name:
        optimizer.param_groups[0]["lr"] = -0.1
    words = torch.int32 if dtype is torch.float32 else torch.int16
    kept = [weight.detach(), *row_slots(optimizer, weight).values()]
    before = [tensor.clone() for tensor in kept]
    for _ in range(3):
        weight.grad = torch.zeros_like(weight)
        weight.grad[4] = 1
        optimizer.step()
    moved = {
        row
        for old, new in zip(before, kept, strict=True)
        for row in (old.view(words) != new.view(words)).any(dim=1).nonzero().flatten().tolist()
    }
    may_move = "negative" in name or "maximizes" in name
    assert may_move or moved <= {4}
    assert (moves_untouched(optimizer, weight) is not None) == may_move


def test_steps_to_differentiate_through_are_refused_by_torch_itself() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = SGD([weight], lr=0.1, differentiable=True)
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        optimizer.step()


def test_a_subclass_is_not_trusted() -> None:
    class Mine(SGD):
        pass

    weight = nn.Parameter(torch.zeros(3, 2))
    assert "Mine" in str(moves_untouched(Mine([weight], lr=0.1), weight))


def test_settings_are_read_from_the_parameters_own_group_each_time() -> None:
    one, two = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))
    groups: list[dict[str, Any]] = [{"params": one}, {"params": two, "momentum": 0.5}]
    optimizer = SGD(groups, lr=0.1)
    assert moves_untouched(optimizer, one) is None
    assert "group 1: momentum=0.5" in str(moves_untouched(optimizer, two))
    optimizer.param_groups[0]["weight_decay"] = 0.25
    assert "group 0: weight_decay=0.25" in str(moves_untouched(optimizer, one))


def test_the_default_eps_of_adagrad_vanishes_in_half_precision() -> None:
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
    optimizer = Adagrad([weight])
    assert "eps" in str(moves_untouched(optimizer, weight))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.isnan().all()


def test_slots_follow_rows_and_steps_do_not() -> None:
    for rows in (1, 4):
        weight = nn.Parameter(torch.zeros(rows, 2))
        optimizer = Adagrad([weight])
        assert list(row_slots(optimizer, weight)) == ["sum"]
        state = optimizer.state[weight]
        state["step"] = torch.zeros(1)
        state["norm"] = torch.zeros(rows)
        state["wide"] = torch.zeros(rows, 5)
        state["scalar"] = torch.zeros(())
        state["one"] = torch.zeros(1)
        state["half"] = torch.zeros(rows, 2, dtype=torch.float64)
        state["mapped"] = {"x": torch.zeros(rows, 2)}
        wanted = {"sum", "wide"} if rows == 1 else {"sum", "wide", "norm"}
        assert row_slots(optimizer, weight).keys() == wanted


def test_asking_for_slots_makes_no_state() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    optimizer = SparseAdam([weight])
    assert row_slots(optimizer, weight) == {}
    assert not optimizer.state


def trained(make: Make = lambda p: Adagrad(p, lr=0.1)) -> tuple[nn.ModuleDict, Optimizer, dict[str, Any]]:
    model = build(sparse=False)
    model["out"] = nn.Linear(3, 1)
    optimizer = make(model.parameters())
    train(model, optimizer, 1, seed=1)
    return model, optimizer, optimizer_tree(optimizer, parameter_names(model), find_tables(model))


def test_the_tree_speaks_of_names_and_leaves_row_slots_out() -> None:
    _, optimizer, tree = trained()
    assert tree["class"] == "Adagrad"
    (group,) = tree["param_groups"]
    assert group["params"] == ["a.weight", "b.weight", "out.weight", "out.bias"]
    assert group["lr"] == 0.1
    assert tree["state"]["a.weight"].keys() == {"step"}
    assert tree["state"]["out.weight"].keys() == {"step", "sum"}
    assert tree["slots"] == {"a": ["sum"], "b": ["sum"]}
    assert tree["other"] == {}
    assert optimizer.param_groups[0]["params"][0].shape == (9, 3)


def test_state_that_belongs_to_no_parameter_is_kept() -> None:
    model, optimizer, _ = trained(lambda p: SGD(p, lr=0.1, momentum=0.5))
    optimizer.state["note"] = 7  # type: ignore[index]  # torch carries such state along
    names, tables = parameter_names(model), find_tables(model)
    tree = optimizer_tree(optimizer, names, tables)
    slots = {table.name: row_slots(optimizer, table.parameter) for table in tables}
    fresh = SGD(model.parameters(), lr=1)
    load_optimizer(fresh, names, tables, tree, slots)
    assert fresh.state["note"] == 7  # type: ignore[index]  # as above


def test_groups_are_found_by_their_names_in_any_order() -> None:
    model = build(sparse=False)
    a, b = model.parameters()
    first = SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}], lr=1)
    tree = optimizer_tree(first, parameter_names(model), find_tables(model))
    second = SGD([{"params": [b]}, {"params": [a]}], lr=1)
    load_optimizer(second, parameter_names(model), find_tables(model), tree, {})
    assert [group["lr"] for group in second.param_groups] == [0.2, 0.1]
    assert second.param_groups[0]["params"][0] is b


def test_groups_share_a_rate_where_they_did() -> None:
    """torch gives all groups the one tensor that it got, and its own files keep that."""
    model = build(sparse=False)
    names, tables = parameter_names(model), find_tables(model)

    def made(rate: float) -> Adam:
        return Adam([{"params": [one]} for one in model.parameters()], lr=torch.tensor(rate), foreach=False)

    first, second = made(0.1), made(0.2)
    load_optimizer(second, names, tables, optimizer_tree(first, names, tables), {})
    one, other = (group["lr"] for group in second.param_groups)
    assert one is other
    assert one == torch.tensor(0.1)
    apart = made(0.1)
    apart.param_groups[1]["lr"] = torch.tensor(0.3)
    load_optimizer(second, names, tables, optimizer_tree(apart, names, tables), {})
    assert [group["lr"].item() for group in second.param_groups] == pytest.approx([0.1, 0.3])


@pytest.mark.skipif(torch.__version__ < "2.6", reason="torch keeps no names of parameters")
def test_groups_keep_the_names_of_their_own_parameters() -> None:
    """Those that torch keeps, of parameters that may be in another order."""
    model = build(sparse=False)
    named = list(model.named_parameters())
    tree = optimizer_tree(SGD(named, lr=1), parameter_names(model), find_tables(model))
    turned, unnamed = SGD(named[::-1], lr=2), SGD(model.parameters(), lr=2)
    for optimizer in (turned, unnamed):
        load_optimizer(optimizer, parameter_names(model), find_tables(model), tree, {})
    (group,) = turned.param_groups
    assert (group["lr"], group["param_names"]) == (1, [name for name, _ in named[::-1]])
    assert "param_names" not in unnamed.param_groups[0]


def test_other_groups_are_refused_by_name_and_nothing_changes() -> None:
    model, _, tree = trained(lambda p: SGD(p, lr=0.1))
    a, _, _, bias = model.parameters()
    other = SGD([a, bias], lr=3)
    with pytest.raises(ModelMismatchError, match=r"lacks 'b\.weight', 'out\.weight'"):
        load_optimizer(other, parameter_names(model), find_tables(model), tree, {})
    assert other.param_groups[0]["lr"] == 3
    fewer = SGD([{"params": [*model.parameters()]}], lr=1)
    tree["param_groups"].append({**tree["param_groups"][0], "params": ["more"]})
    with pytest.raises(ModelMismatchError, match="lacks a group of 'more'"):
        load_optimizer(fewer, parameter_names(model), find_tables(model), tree, {})


def test_another_class_is_refused() -> None:
    model, _, tree = trained()
    with pytest.raises(ModelMismatchError, match=r"Adagrad.*Adam\b"):
        load_optimizer(Adam(model.parameters()), parameter_names(model), find_tables(model), tree, {})


def test_missing_slots_and_slots_of_other_sizes_are_refused() -> None:
    model, optimizer, tree = trained()
    names, tables = parameter_names(model), find_tables(model)
    slots = {table.name: row_slots(optimizer, table.parameter) for table in tables}
    with pytest.raises(ModelMismatchError, match=r"'b'.*\['sum'\]"):
        load_optimizer(optimizer, names, tables, tree, {"a": slots["a"]})
    with pytest.raises(ModelMismatchError, match=r"slot 'sum'.*9 rows"):
        load_optimizer(optimizer, names, tables, tree, {**slots, "a": {"sum": torch.zeros(4, 3)}})


def test_parameters_from_elsewhere_are_refused() -> None:
    model = build(sparse=False)
    optimizer = SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=0.1)
    with pytest.raises(UnsupportedModelError, match=r"SGD, parameter group 0.*\(7,\)"):
        optimizer_tree(optimizer, parameter_names(model), find_tables(model))


def test_none_one_or_several_optimizers() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert as_list(None) == []
    assert as_list(optimizer) == [optimizer]
    assert as_list((optimizer, optimizer)) == [optimizer, optimizer]
    with pytest.raises(StateError, match="str"):
        as_list(["adam"])  # type: ignore[list-item]  # the mistake that is tested


@pytest.mark.parametrize("others", [(), ([],)])
def test_settings_that_contain_themselves_are_refused_when_made(tmp_path: Path, others: Any) -> None:
    model = build(False)
    optimizer = Adam(model.parameters())
    me: list[Any] = [*others]
    me += [me, me]
    optimizer.param_groups[0]["me"] = me
    with pytest.raises(StateError, match=r"param_groups: nested deeper than .* or contains itself"):
        cnr_store.Checkpointer(tmp_path, model, optimizer)
