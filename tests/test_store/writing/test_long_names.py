"""Names that take more than a key's segment may: of tables, slots and tensors; every reader finds them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
import xarray
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FoldingBackend
from cnr_store import Checkpointer, CorruptionError, UnsupportedModelError
from cnr_store.catalog.catalog import Catalog
from cnr_store.dcp import Reader, Writer
from cnr_store.format.layout import escape, weight_path
from tests.test_store.cli.command import cnr
from tests.test_store.support.tampering import Forgery
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
    options: dict[str, Any] = {
        "policy": "consecutive",
        "tracking": cnr_store.Tracking(trusted_optimizers=[Summing]),
    }
    with cnr_store.Checkpointer(url, model, optimizer, bits=32, **options) as checkpointer:
        for step in (1, 2):
            ids = torch.arange(step, 9)
            model[DENSE](model[TABLE](ids) * model[TWIN](ids)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save(step).result()
    return url, {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
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


def test_damaged_rows_are_named_by_them(stored: tuple[str, Any]) -> None:
    url, _ = stored
    record = Catalog(open_backend(url)).find()
    for shard in Path(url, record.key(weight_path(TABLE)), "c").rglob("*"):
        if shard.is_file():
            shard.write_bytes(bytes(shard.stat().st_size))
    model, optimizer = build()
    with cnr_store.Checkpointer(
        url, model, optimizer, tracking=cnr_store.Tracking(trusted_optimizers=[Summing])
    ) as checkpointer:
        assert checkpointer.load(salvage=True).salvaged.keys() == {TABLE}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_has_them_too(tmp_path: Path) -> None:
    state = {f"{TABLE}.weight": torch.randn(3000, 50), TABLE: torch.randn(3000, 50), DENSE: torch.randn(3)}
    save_checkpoint(state, storage_writer=Writer(tmp_path))
    found = {name: torch.zeros_like(values) for name, values in state.items()}
    load_checkpoint(found, storage_reader=Reader(tmp_path))
    assert all(torch.equal(found[name], values) for name, values in state.items())
    np.testing.assert_array_equal(cnr_store.rows(tmp_path, DENSE, [1]), state[DENSE][[1]])


def test_a_key_with_the_digest_of_another_name_is_refused(stored: tuple[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "forged"
    forgery = Forgery(Path(stored[0]), folder)
    ours, other = (
        Catalog(open_backend(folder)).find().stored_paths[weight_path(name)] for name in (TABLE, TWIN)
    )
    arrays = forgery.cnr["arrays"]
    arrays[ours]["name"], arrays[other]["name"] = arrays[other]["name"], arrays[ours]["name"]
    forgery.sign()
    with pytest.raises(CorruptionError, match="is no segment for the name '用户最近"):
        cnr_store.state_dict(folder)


def test_names_that_have_one_key_are_refused_at_once(tmp_path: Path) -> None:
    """Two of many spellings have one hash of 32 bits."""
    plain, seen = "abcdefghijklmnopqrst", dict[str, str]()
    for letters in itertools.product(*((each, each.upper()) for each in plain)):
        name = "".join(letters)
        if (key := escape(name).lower()) in seen and name != plain:
            break
        seen[key] = name
    names = (plain, seen[key], name)
    model = nn.ModuleDict({each: nn.Embedding(3, 2) for each in names})
    with pytest.raises(
        UnsupportedModelError, match=f"{names[1]}' and '{name}' have one key in tables: rename"
    ):
        Checkpointer(tmp_path, model)
    dense = nn.Module()
    for each in names:
        dense.register_parameter(each, nn.Parameter(torch.zeros(2)))
    with pytest.raises(UnsupportedModelError, match=f"{names[1]}' and '{name}' have one key in dense/model"):
        Checkpointer(tmp_path, dense)
    with Checkpointer(
        FoldingBackend(open_backend(tmp_path)), nn.ModuleDict(dict(list(model.items())[1:]))
    ) as made:
        made.save(0).result()
    with pytest.raises(UnsupportedModelError, match="surrogate"):
        Checkpointer(tmp_path, nn.ModuleDict({"\ud800": nn.Embedding(3, 2)}))
