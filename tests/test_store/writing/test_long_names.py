"""Names that take more than a key's segment may: of tables, slots and tensors; every reader finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
import xarray
from torch import nn

import cnr_store
from tests.test_store.cli.command import cnr
from tests.test_store.support.zarr_nodes import array_of

TABLE = "用户最近三十天内点击过的商品所属三级类目编号列" * 22
"""506 characters, of 9 bytes each once they are percent-encoded."""
TWIN, DENSE, SLOT = TABLE + "二", "塔" * 500, "动量" * 200
SEGMENT_BYTES = 200


class Summing(torch.optim.Optimizer):
    """Sums gradients under a key of many characters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # one overload is enough
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter].setdefault(SLOT, torch.zeros_like(parameter)).add_(parameter.grad)
                parameter -= 0.1 * parameter.grad


def build() -> tuple[nn.ModuleDict, Summing]:
    model = nn.ModuleDict({TABLE: nn.Embedding(900, 8), TWIN: nn.Embedding(900, 8), DENSE: nn.Linear(8, 1)})
    return model, Summing(model.parameters())


@pytest.fixture
def stored(tmp_path: Path) -> tuple[str, dict[str, np.ndarray[Any, Any]]]:
    """A store of two versions, and the weights of the second."""
    model, optimizer = build()
    url = str(tmp_path / "store")
    options: dict[str, Any] = {"policy": "consecutive", "trusted_optimizers": [Summing]}
    with cnr_store.Checkpointer(url, model, optimizer, bits=32, **options) as checkpointer:
        for step in (1, 2):
            ids = torch.arange(step, 9)
            model[DENSE](model[TABLE](ids) * model[TWIN](ids)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save(step).result()
    return url, {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def test_training_goes_on(stored: tuple[str, dict[str, np.ndarray[Any, Any]]]) -> None:
    url, weights = stored
    model, optimizer = build()
    with cnr_store.Checkpointer(url, model, optimizer, bits=32) as checkpointer:
        assert checkpointer.resume() == 2
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor, weights[name], err_msg=name)
    table = model[TWIN].weight
    assert isinstance(table, torch.Tensor)
    assert optimizer.state[table][SLOT].count_nonzero() == 8 * 8  # all rows that were looked up


def test_no_key_has_a_segment_that_a_disk_refuses(stored: tuple[str, Any]) -> None:
    names = [part for path in Path(stored[0]).rglob("*") for part in path.relative_to(stored[0]).parts]
    assert SEGMENT_BYTES - 3 < max(len(name.encode()) for name in names) <= SEGMENT_BYTES
    assert len({name.lower() for name in names}) == len(set(names))


def test_readers_find_them_by_their_names(stored: tuple[str, dict[str, np.ndarray[Any, Any]]]) -> None:
    url, weights = stored
    values = weights[f"{TWIN}.weight"]
    np.testing.assert_array_equal(cnr_store.rows(url, TWIN, [3, 5]), values[[3, 5]])
    np.testing.assert_array_equal(
        array_of(cnr_store.open(url), f"tables/{quote(TWIN)}/weight")[3:5], values[3:5]
    )
    opened = xarray.open_zarr(cnr_store.view(url), group=f"tables/{quote(TWIN)}", consolidated=False)
    np.testing.assert_array_equal(opened["weight"][3:5], values[3:5])
    found = cnr_store.state_dict(url)
    assert found.keys() == weights.keys()
    (_, update) = cnr_store.follow(url)
    assert {block.name for block in update.blocks()} == weights.keys()


def test_commands_know_them(
    stored: tuple[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url, _ = stored
    for name, *more in (("info", "2"), ("du",), ("diff", "1", "2"), ("cat", TWIN, "--rows", "1:3")):
        status, out, err = cnr(capsys, name, url, *more, "--json")
        assert (status, err) == (0, "")
        assert TWIN in json.dumps(json.loads(out), ensure_ascii=False) or quote(TWIN) in out, name
    assert cnr_store.verify(url, deep=True).ok
    assert cnr_store.compact(url, 2).links == 2
    assert cnr_store.verify(url, deep=True).ok


def test_they_are_exported(stored: tuple[str, dict[str, np.ndarray[Any, Any]]], tmp_path: Path) -> None:
    url, weights = stored
    cnr_store.export(url, tmp_path / "whole.zarr")
    group = xarray.open_datatree(tmp_path / "whole.zarr", engine="zarr", consolidated=False)
    place = group.attrs["names"][f"{TWIN}.weight"]
    np.testing.assert_array_equal(group[place], weights[f"{TWIN}.weight"])
    cnr_store.export(url, tmp_path / "whole.safetensors")
    assert (tmp_path / "whole.safetensors").stat().st_size > 900 * 8 * 4 * 2


def test_a_name_that_is_longer_than_a_segment_by_one(tmp_path: Path) -> None:
    for length in (SEGMENT_BYTES, SEGMENT_BYTES + 1):
        model = nn.ModuleDict({"n" * length: nn.Embedding(900, 8)})
        url = str(tmp_path / str(length))
        cnr_store.save(url, model)
        assert cnr_store.rows(url, "n" * length, [1]).shape == (1, 8)
        (folder,) = (Path(url) / "versions").glob("*/tables/*")
        assert ("~" in folder.name) == (length > SEGMENT_BYTES)
