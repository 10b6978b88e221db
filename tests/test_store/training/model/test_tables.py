"""Finding tables, names, dense tensors and extra state; tensors to arrays and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import cnr_store
from cnr_store.errors import ModelMismatchError, UnsupportedModelError
from cnr_store.training.model import tensors
from cnr_store.training.model.dense_state import dense_items, dense_tensors, extra_state, named_state
from cnr_store.training.model.names import clean_name, parameter_names, state_names
from cnr_store.training.model.tables import find_tables
from cnr_store.training.model.tensors import (
    array_dtype,
    assign_rows,
    copy_rows,
    dense_numpy,
    dense_tensor,
    numpy_view,
)
from tests.test_store.support.tracked_table import gather


class Counter(nn.Module):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.value: object = {"seen": 0}

    def get_extra_state(self) -> object:
        return self.value

    def set_extra_state(self, state: object) -> None:
        self.value = state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(10, 4)
        self.towers = nn.ModuleDict({"item": nn.EmbeddingBag(6, 3, dtype=torch.bfloat16)})
        self.norm = nn.BatchNorm1d(3)
        self.counter = Counter()


def test_each_table_has_its_name_place_and_shape() -> None:
    model = Model()
    user, item = find_tables(model)
    assert (user.name, user.parameter_name, user.key) == ("user", "user.weight", "user.weight")
    assert (user.rows, user.dim, user.element) == (10, 4, "float32")
    assert user.parameter is model.user.weight
    assert user.modules == [model.user]
    assert (item.name, item.rows, item.dim, item.element) == ("towers.item", 6, 3, "bfloat16")
    assert not user.tied_names
    assert not user.shared_with


def test_tables_come_in_the_order_of_the_state_dict() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Embedding(2, 2)
            self.a = nn.Embedding(2, 2)

    assert [table.name for table in find_tables(Backwards())] == ["b", "a"]


def test_a_bare_embedding_is_called_weight() -> None:
    (table,) = find_tables(nn.Embedding(3, 2))
    assert table.name == table.parameter_name == table.key == "weight"


class Own(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        compiled,
        torch.optim.swa_utils.AveragedModel,
        lambda model: nn.DataParallel(compiled(model)),
    ],
    ids=["data_parallel", "compiled", "averaged", "nested"],
)
def test_wrapped_models_have_the_names_of_bare_ones(wrap: Any) -> None:
    model = Model()
    wrapped = wrap(model)
    assert [table.name for table in find_tables(wrapped)] == ["user", "towers.item"]
    assert [table.key for table in find_tables(wrapped)] == [
        key for key in wrapped.state_dict() if key.endswith(("user.weight", "item.weight"))
    ]
    bare = dense_tensors(model, find_tables(model)).keys()
    assert dense_tensors(wrapped, find_tables(wrapped)).keys() - {"n_averaged"} == bare
    assert extra_state(named_state(wrapped)) == {"counter._extra_state": {"seen": 0}}
    names = parameter_names(wrapped)
    assert set(names.values()) == set(parameter_names(model).values())


def test_names_stay_when_a_wrapper_of_ones_own_gets_a_metric() -> None:
    model = Own(Model())
    before = [*state_names(model).values()]
    model.metric = nn.L1Loss()
    model.register_buffer("seen", torch.zeros(1))
    assert [*state_names(model).values()] == ["seen", *before]
    assert [table.name for table in find_tables(model)] == ["module.user", "module.towers.item"]


def test_a_module_that_is_called_module_keeps_its_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Embedding(3, 2)
            self.other = nn.Embedding(3, 2)

    assert [table.name for table in find_tables(nn.DataParallel(Net()))] == ["module", "other"]


def test_clean_name_drops_only_whole_components() -> None:
    assert clean_name("my_orig_mod.a._orig_mod.b", ()) == "my_orig_mod.a.b"
    assert clean_name("module.a.module.b", {"module"}) == "a.module.b"


def test_names_that_collide_are_refused() -> None:
    model = nn.Module()
    model.add_module("a", nn.Embedding(2, 2))
    wrapper = nn.Module()
    wrapper.add_module("a", nn.Embedding(2, 2))
    model.add_module("_orig_mod", wrapper)
    with pytest.raises(UnsupportedModelError, match=r"'a\.weight' and '_orig_mod\.a\.weight'"):
        find_tables(model)
    with pytest.raises(UnsupportedModelError, match="rename"):
        state_names(model)


def test_tied_embeddings_are_one_table() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(4, 2), "b": nn.Embedding(4, 2, max_norm=1.0)})
    model["b"].weight = model["a"].weight
    (table,) = find_tables(model)
    assert (table.name, table.tied_names) == ("a", ("b.weight",))
    assert table.modules == [model["a"], model["b"]]
    assert not table.shared_with
    assert dense_tensors(model, [table]) == {}


def test_a_tied_output_layer_is_named() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(4, 2), "out": nn.Linear(2, 4)})
    model["out"].weight = model["emb"].weight
    (table,) = find_tables(model)
    assert (table.name, table.tied_names, table.shared_with) == ("emb", ("out.weight",), ["out"])
    assert list(dense_tensors(model, [table])) == ["out.bias"]


def test_parameters_over_the_same_memory_are_shared_and_neighbours_are_not() -> None:
    flat = torch.zeros(24)
    model = nn.ModuleDict({name: nn.Embedding(4, 2) for name in "abc"})
    model["a"].weight = nn.Parameter(flat[:8].view(4, 2))
    model["b"].weight = nn.Parameter(flat[:8].view(4, 2))
    model["c"].weight = nn.Parameter(flat[8:16].view(4, 2))
    assert [table.shared_with for table in find_tables(model)] == [["b.weight"], ["a.weight"], []]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: nn.Embedding(0, 4), "rows"),
        (lambda: nn.Embedding(4, 0), "columns"),
        (lambda: nn.Embedding(4, 4, device="meta"), "meta device"),
        (lambda: nn.Embedding(4, 4, dtype=torch.float64), "float64"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_tables_that_can_not_be_stored_are_refused_by_name(module: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"'deep\.bad'.*{why}"):
        find_tables(nn.ModuleDict({"deep": nn.ModuleDict({"bad": module()})}))


def test_a_computed_weight_is_no_table_and_its_source_is_dense() -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    model = nn.ModuleDict({"emb": nn.Embedding(4, 2)})
    parametrize.register_parametrization(model["emb"], "weight", Double())
    assert find_tables(model) == []
    assert list(dense_tensors(model, [])) == ["emb.parametrizations.weight.original"]


def test_dense_tensors_are_the_models_own_and_tied_ones_come_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    model["b"].weight = model["a"].weight
    dense = dense_tensors(model, find_tables(model))
    assert dense["a.weight"] is model["a"].weight
    assert dense["norm.running_mean"] is model["norm"].running_mean
    assert "b.weight" not in dense
    others = {name: owner for name, owner, _ in dense_items(model, []) if name != owner}
    assert others == {"b.weight": "a.weight"}


def test_buffers_that_are_not_persistent_are_left_out() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(2))
    module.register_buffer("temporary", torch.zeros(2), persistent=False)
    assert list(dense_tensors(module, [])) == ["kept"]


@pytest.mark.parametrize("tensor", [torch.zeros(2, device="meta"), torch.zeros(2, 2).to_sparse()])
def test_dense_tensors_without_plain_values_are_refused(tensor: torch.Tensor) -> None:
    module = nn.Module()
    module.register_buffer("odd", tensor)
    with pytest.raises(UnsupportedModelError, match="'odd'"):
        dense_tensors(module, [])


def test_lazy_layers_are_refused_until_they_have_run() -> None:
    module = nn.LazyLinear(2)
    with pytest.raises(UnsupportedModelError, match="'weight'"):
        dense_tensors(module, [])


def test_extra_state_is_given_back_whatever_it_is(tmp_path: Path) -> None:
    model, other = nn.DataParallel(Model()), Model()
    model.module.counter.value = torch.arange(3)
    cnr_store.save(tmp_path, model)
    cnr_store.load(tmp_path, other)
    assert str(other.counter.value) == "tensor([0, 1, 2])"
    assert "counter._extra_state" not in dense_tensors(model, find_tables(model))


def test_extra_state_of_a_module_with_two_names_is_given_back(tmp_path: Path) -> None:
    model, other = Model(), Model()
    for each in (model, other):
        each.add_module("again", each.counter)
    model.counter.value = {"seen": 3}
    assert extra_state(named_state(model)).keys() == {"counter._extra_state", "again._extra_state"}
    cnr_store.save(tmp_path, model)
    cnr_store.load(tmp_path, other)
    assert other.counter.value == {"seen": 3}


def test_extra_state_of_another_model_is_refused(tmp_path: Path) -> None:
    model = Model()
    del model.counter
    cnr_store.save(tmp_path, model)
    with pytest.raises(ModelMismatchError, match=r"counter\._extra_state"):
        cnr_store.load(tmp_path, Model())


# Tensors and arrays

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(9,), (9, 3), (9, 1)])
def test_gathered_rows_are_exact_and_can_be_assigned_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 10).abs().to(dtype)
    ids = np.array([8, 0, 3, 3])
    rows = gather(tensor, ids)
    assert rows.dtype == array_dtype(dtype)
    np.testing.assert_array_equal(rows, tensor[ids].to(torch.float64).numpy())
    wide = np.zeros((4, 2, *shape[1:]), array_dtype(dtype))
    copy_rows(tensor, ids, wide[:, 1])  # beside other columns
    np.testing.assert_array_equal(wide[:, 1], rows)
    assert not wide[:, 0].any()

    other = torch.zeros(shape, dtype=dtype)
    assign_rows(other, 2, gather(tensor, np.arange(2, 9)))
    assert torch.equal(other[2:], tensor[2:])
    assert not other[:2].any()


def test_gather_takes_no_rows_strided_tensors_and_parameters() -> None:
    tensor = nn.Parameter(torch.randn(3, 5).t())
    np.testing.assert_array_equal(gather(tensor, np.array([4, 1])), tensor.detach()[[4, 1]].numpy())
    assert gather(tensor, np.empty(0, np.int64)).shape == (0, 3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gather_keeps_the_bits_of_special_values(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[float("nan"), float("inf"), -0.0, torch.finfo(dtype).smallest_normal / 2]]).to(
        dtype
    )
    other = torch.zeros_like(tensor)
    assign_rows(other, 0, gather(tensor, np.array([0])))
    assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))


def test_views_share_memory() -> None:
    for dtype, seen in (
        (torch.float32, np.float32),
        (torch.bfloat16, np.uint16),
        (torch.float8_e4m3fn, np.uint8),
    ):
        tensor = torch.zeros(4).to(dtype)
        view = numpy_view(tensor)
        assert view.dtype == seen
        view[1] = 1
        assert tensor.view(torch.uint8).any()


@pytest.mark.parametrize(
    "dtype",
    [
        *FLOATS,
        torch.float64,
        torch.bool,
        torch.int32,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (20, 30)])
def test_dense_tensors_of_any_type_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    array, name = dense_numpy(tensor)
    assert array.shape == shape
    assert array.flags.c_contiguous
    assert (name is None) == (dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))
    back = dense_tensor(array, name)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_dense_arrays_are_copies_of_strided_conjugate_and_read_only_values() -> None:
    tensor = torch.randn(2, 3, dtype=torch.complex64).conj().t()
    array, _ = dense_numpy(tensor)
    np.testing.assert_array_equal(array, tensor.resolve_conj().numpy())
    array.flags.writeable = False
    back = dense_tensor(array, None)
    back.zero_()
    assert array.any()
    assert tensor.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16])
def test_few_values_are_copied_as_many_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    square = (torch.randn(6, 6) * 3).to(dtype)
    of_nan = torch.tensor([float("nan"), -0.0]).view(torch.int32).add_(1).view(torch.float32).to(dtype)
    values = [square, square.t(), square[::2, 1:], square[0, 0], square[:0], square.conj(), of_nan]
    few = [dense_numpy(each) for each in values]
    monkeypatch.setattr(tensors, "_FEW", -1)
    for (ours, name), value in zip(few, values, strict=True):
        other, other_name = dense_numpy(value)
        assert (ours.shape, ours.dtype, ours.tobytes(), name) == (
            other.shape,
            other.dtype,
            other.tobytes(),
            other_name,
        )
        assert ours.flags.c_contiguous
        assert ours.flags.writeable


def test_an_element_type_unknown_to_this_torch_is_named() -> None:
    with pytest.raises(ModelMismatchError, match="float3_e1m1"):
        dense_tensor(np.zeros(2, np.uint8), "float3_e1m1")
    with pytest.raises(ModelMismatchError, match="nn"):
        dense_tensor(np.zeros(2, np.uint8), "nn")


def test_sparse_values_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="sparse"):
        dense_numpy(torch.eye(2).to_sparse())
