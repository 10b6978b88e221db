"""Loads of a part that was asked for in ways that can't be meant: one clear error, and the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_store import ModelMismatchError, OptionError


def make_model(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"user": nn.Embedding(20, 4), "item": nn.Embedding(10, 4), "top": nn.Linear(4, 2)})


def rows_of(model: nn.Module, table: str) -> torch.Tensor:
    return model.get_parameter(f"{table}.weight").detach()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    cnr_store.save(tmp_path / "store", make_model(0), bits=32)
    return tmp_path / "store"


@pytest.fixture
def model() -> Iterator[nn.ModuleDict]:
    """One that must stay as it is."""
    model = make_model(1)
    before = copy.deepcopy(model.state_dict())
    yield model
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tables": ["user", "item"], "rows": {"usr": range(3)}},
            "rows: 'usr' fits none of the tables chosen",
        ),
        ({"tables": "user", "rows": {"user": [1], "item": [1]}}, r"rows: 'item' fits none .*\['user'\]"),
        ({"tables": "*", "rows": {"user": [1]}}, "table 'item' is chosen, but rows=.* has none of it"),
        ({"tables": ["user", "item"], "rows": {}}, "table 'item' is chosen, but rows=.* has none of it"),
        ({"rows": {"usr": range(3)}}, "no table in .* matches 'usr'"),
    ],
)
@pytest.mark.parametrize("strict", ["raise", "ignore"])
def test_rows_are_chosen_of_the_tables_that_are(
    stored: Path, model: nn.Module, options: dict[str, Any], message: str, strict: Any
) -> None:
    with pytest.raises(ModelMismatchError, match=message):
        cnr_store.load(stored, model, strict=strict, **options)


def test_rows_by_pattern_beside_tables(stored: Path) -> None:
    model, source = make_model(1), make_model(0)
    before = rows_of(model, "user").clone()
    cnr_store.load(stored, model, tables="*", rows={"us*": [3], "*": [0, 9]})
    assert torch.equal(rows_of(model, "user")[3], rows_of(source, "user")[3])
    assert torch.equal(rows_of(model, "user")[[0, 9]], before[[0, 9]])
    assert torch.equal(rows_of(model, "item")[[0, 9]], rows_of(source, "item")[[0, 9]])


NO_ROWS: list[Any] = [
    [[1], [2, 3]],
    [[1]],
    [2**63],
    [2**64 - 1],
    [2**70],
    [-1, 2**63],
    np.array([2**64 - 1], np.uint64),
    torch.tensor([1.0], dtype=torch.bfloat16),
    torch.tensor([1.0], requires_grad=True),
    torch.tensor([0, 1]).to_sparse(),
    torch.tensor([1], device="meta"),
    torch.tensor([True]),
    np.ma.masked_array([1, 2], [False, True]),
    np.ma.masked_array([1, 2]),
    np.array([1], "m8[s]"),
    ["1"],
    {1, 2},
    iter([1]),
    None,
]


@pytest.mark.parametrize(
    "rows", [*({"user": each} for each in NO_ROWS), *NO_ROWS[:-1], {1: [1]}, {None: [1]}]
)
def test_what_is_no_choice_of_rows(stored: Path, model: nn.Module, rows: Any) -> None:
    with pytest.raises(OptionError, match=r"rows.*: give "):
        cnr_store.load(stored, model, rows=rows)
    with pytest.raises(OptionError, match=r"rows.*: give "):
        cnr_store.load(stored, model, tables="user", rows=rows)


@pytest.mark.parametrize("rows", [[2**62], np.array([2**63 - 1], np.uint64), [20]])
def test_rows_that_no_table_has(stored: Path, model: nn.Module, rows: Any) -> None:
    with pytest.raises(ModelMismatchError, match=f"row {int(rows[0])} was chosen"):
        cnr_store.load(stored, model, rows={"user": rows})


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[], (), range(0), np.array([], bool), torch.tensor([])])
def test_no_rows_are_none(stored: Path, model: nn.Module, rows: Any) -> None:
    cnr_store.load(stored, model, rows=rows)


@pytest.mark.parametrize(
    "names", [5, True, False, 3.0, [None], b"user", torch.tensor([1, 2]), torch.tensor(1)]
)
@pytest.mark.parametrize("option", ["tables", "tensors"])
def test_what_is_no_choice_of_names(stored: Path, model: nn.Module, option: str, names: Any) -> None:
    with pytest.raises(OptionError, match=rf"{option}=.*: give names, or patterns like 'user\*'"):
        cnr_store.load(stored, model, **{option: names})


def test_names_in_an_array(stored: Path, model: nn.Module) -> None:
    none: Any = np.array([])
    typo: Any = np.array(["usr"])
    cnr_store.load(stored, model, tables=none)
    with pytest.raises(ModelMismatchError, match=r"no table in .* matches 'usr'"):
        cnr_store.load(stored, model, tables=typo)
