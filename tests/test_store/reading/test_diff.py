"""`diff`: every row that differs, and no other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_codecs import LosslessRows
from cnr_store.policies.policy import PolicyName
from tests.test_store.chains.test_relative import RELATIVE


class Model(nn.Module):
    def __init__(self, rows: int = 3000) -> None:
        super().__init__()
        self.user = nn.Embedding(rows, 8, sparse=True)
        self.item = nn.Embedding(50, 4, sparse=True)
        self.top = nn.Linear(4, 2).to(torch.bfloat16)
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(1.5))


def _by_path(found: list[cnr_store.ArrayDiff]) -> dict[str, cnr_store.ArrayDiff]:
    return {each.path: each for each in found}


@pytest.mark.parametrize(
    ("policy", "options"),
    [(policy, {"bits": 32}) for policy in ("full", "one-shot", "consecutive")]
    + [("consecutive", {"codec": {"user": RELATIVE, "*": LosslessRows()}})],
)
def test_changed_rows_are_counted_bit_for_bit(
    tmp_path: Path, policy: PolicyName, options: dict[str, Any]
) -> None:
    model, url = Model(), str(tmp_path / "store")
    with cnr_store.Checkpointer(url, model, policy=policy, **options) as ckpt, torch.no_grad():
        ckpt.save(1).result()
        for step, rows in ((2, [3, 4, 2999]), (3, [4, 7])):
            model.user.weight[rows] += step
            ckpt.touch("user", [*rows, 11])  # row 11 is flagged and did not change
            model.scalar.add_(1)  # type: ignore[operator]
            ckpt.save(step).result()
        model.top.weight[1] = 0
        ckpt.save(4).result()
    found = _by_path(cnr_store.diff(url, 1, 3))
    user = found["tables/user/weight"]
    assert (user.status, user.rows, user.rows_changed) == ("changed", 3000, 4)
    values = [cnr_store.state_dict(url, step)["user.weight"].astype(np.float64) for step in (1, 3)]
    assert user.max_abs == np.abs(values[0] - values[1]).max()
    assert found["tables/item/weight"] == cnr_store.ArrayDiff("tables/item/weight", "equal", 50, 0, 0.0)
    assert found["dense/model/scalar"] == cnr_store.ArrayDiff("dense/model/scalar", "changed", 1, 1, 2.0)
    assert found["dense/model/none"].status == "equal"
    assert found["dense/model/top.weight"].status == "equal"
    later = _by_path(cnr_store.diff(url, 3))
    top = later["dense/model/top.weight"]
    assert (top.status, top.rows_changed, top.max_abs) == ("changed", 1, None)
    assert later["tables/user/weight"].status == "equal"
    assert _by_path(cnr_store.diff(url, 3, 1))["tables/user/weight"].rows_changed == 4


def test_arrays_that_come_go_or_change_their_shape(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    cnr_store.save(url, Model(), step=1, bits=32)
    grown = Model(4000)
    del grown.item
    grown.extra = nn.Linear(2, 2)
    cnr_store.save(url, grown, step=2, bits=32)
    found = {path: each.status for path, each in _by_path(cnr_store.diff(url, 1, 2)).items()}
    assert found["tables/user/weight"] == "reshaped"
    assert found["tables/item/weight"] == "removed"
    assert found["dense/model/extra.weight"] == "added"


def test_unequal_not_a_numbers_differ(tmp_path: Path) -> None:
    model, url = Model(), str(tmp_path / "store")
    with cnr_store.Checkpointer(url, model, bits=32) as ckpt, torch.no_grad():
        model.user.weight[5] = float("nan")
        ckpt.save(1).result()
        model.user.weight[5] = float("inf")
        ckpt.touch("user", [5])
        ckpt.save(2).result()
    user = _by_path(cnr_store.diff(url, 1))["tables/user/weight"]
    assert (user.status, user.rows_changed, user.max_abs) == ("changed", 1, 0.0)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (torch.tensor([2**53]), torch.tensor([2**53 + 1]), 1.0),
        (torch.tensor([2**63 - 1, 5]), torch.tensor([-(2**63), 5]), float(2**64)),
        (torch.tensor([3], dtype=torch.uint8), torch.tensor([250], dtype=torch.uint8), 247.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (
            torch.tensor([1e308], dtype=torch.float64),
            torch.tensor([-1e308], dtype=torch.float64),
            sys.float_info.max,
        ),
        (torch.tensor([np.inf, 1.0]), torch.tensor([1.0, 3.0]), 2.0),
    ],
)
def test_distances_are_those_of_the_type(tmp_path: Path, one: Any, other: Any, apart: float) -> None:
    model = nn.Module()
    model.register_buffer("values", one)
    cnr_store.save(tmp_path, model, step=1)
    model.register_buffer("values", other)
    cnr_store.save(tmp_path, model, step=2)
    (found,) = cnr_store.diff(tmp_path, 1)
    assert (found.status, found.max_abs) == ("changed", apart)
