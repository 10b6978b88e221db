"""Each reader that there is, on a quantized version at the end of a chain: it sees what `load` brings back."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import dask
import dask.array
import numpy as np
import pytest
import tensorstore
import torch
import xarray
import zarr
from torch import nn

import cnr_store
from cnr_store import Checkpointer, VersionInfo
from cnr_store.reading.server import serving

ROWS, DIM, DELTAS = 30_000, 16, 4
TABLE = "tables/users/weight"
Array = np.ndarray[Any, Any]


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.top(self.users(ids))
        return score


@dataclass(frozen=True)
class Place:
    """A store, the version that is read, and what `load` makes of it."""

    url: str
    options: dict[str, Any]
    version: VersionInfo
    expected: dict[str, Array]


def _train(url: str, options: dict[str, Any]) -> VersionInfo:
    """Write a baseline and deltas, and one more version that nobody asks for. Returns the last but one."""
    model = Model(0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    infos = []
    with Checkpointer(
        url, model, optimizer, policy="consecutive", bits=4, storage_options=options
    ) as checkpointer:
        for step in range(DELTAS + 2):
            optimizer.zero_grad()
            model(torch.randint(0, ROWS, (64, 8))).square().mean().backward()
            optimizer.step()
            infos.append(checkpointer.save(step).result())
    assert [info.kind for info in infos] == ["baseline"] + ["delta"] * (DELTAS + 1)
    return infos[DELTAS]


def _loaded(url: str, options: dict[str, Any], version: VersionInfo) -> dict[str, Array]:
    model = Model(1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    cnr_store.load(url, model, optimizer, version, storage_options=options)
    return {
        TABLE: model.users.weight.detach().numpy(),
        "tables/users/sum": optimizer.state[model.users.weight]["sum"].numpy(),
        "dense/model/top.weight": model.top.weight.detach().numpy(),
    }


@pytest.fixture(scope="module", params=["local", pytest.param("s3", marks=pytest.mark.server)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    if request.param == "local":
        url, options = f"file://{tmp_path_factory.mktemp('readers')}", {}
    else:
        server = request.getfixturevalue("s3_server")
        url, options = server.url(f"readers-{uuid.uuid4().hex}"), server.storage_options
    version = _train(url, options)
    return Place(url, options, version, _loaded(url, options, version))


def test_state_dict(place: Place) -> None:
    found = cnr_store.state_dict(place.url, place.version, **place.options)
    np.testing.assert_array_equal(found["users.weight"], place.expected[TABLE])
    np.testing.assert_array_equal(found["top.weight"], place.expected["dense/model/top.weight"])


def test_zarr(place: Place) -> None:
    group = cnr_store.open(place.url, place.version, **place.options)
    for path, expected in place.expected.items():
        array = group[path]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(np.asarray(array[:]), expected)
    rows = np.random.default_rng(0).integers(0, ROWS, 10)
    np.testing.assert_array_equal(np.asarray(group[TABLE][rows]), place.expected[TABLE][rows])  # type: ignore[index]


@pytest.mark.some_by_day(1)
def test_xarray(place: Place) -> None:
    view = cnr_store.view(place.url, place.version, **place.options)
    with xarray.open_datatree(view, engine="zarr", consolidated=False, chunks={}) as tree:  # type: ignore[arg-type]  # it does
        table = tree["tables/users"]
        assert table["weight"].dims == ("row", "dim")
        assert table["weight"].chunks is not None
        np.testing.assert_array_equal(table["weight"].values, place.expected[TABLE])
        np.testing.assert_array_equal(
            table["sum"].isel(row=slice(70, 90)), place.expected["tables/users/sum"][70:90]
        )


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_dask(place: Place, scheduler: str) -> None:
    group = cnr_store.open(place.url, place.version, **place.options)
    table = dask.array.from_zarr(group[TABLE], chunks=(ROWS // 3, DIM))  # type: ignore[no-untyped-call]  # dask's
    with dask.config.set(scheduler=scheduler, num_workers=2):
        values, largest = dask.compute(table, table.max(axis=1))  # type: ignore[attr-defined, no-untyped-call]  # dask's
        np.testing.assert_array_equal(values, place.expected[TABLE])
        np.testing.assert_array_equal(largest, place.expected[TABLE].max(axis=1))


def test_xarray_through_a_chained_url(place: Place) -> None:
    options = {"version": place.version.id, **({"s3": place.options} if place.options else {})}
    with xarray.open_datatree(
        f"cnr://::{place.url}", engine="zarr", consolidated=False, chunks={}, storage_options=options
    ) as tree:
        np.testing.assert_array_equal(tree["tables/users"]["weight"].values, place.expected[TABLE])
        np.testing.assert_array_equal(
            tree["dense/model"]["top.weight"], place.expected["dense/model/top.weight"]
        )


@pytest.mark.slow
def test_tensorstore_over_http(place: Place) -> None:
    with serving(place.url, place.version, storage_options=place.options) as url:
        for path, expected in place.expected.items():
            kvstore = {"driver": "http", "base_url": url, "path": f"/{path}/"}
            array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
            np.testing.assert_array_equal(array.read().result(), expected)
        rows = [5, ROWS - 1, 77]
        table = tensorstore.open({"driver": "zarr3", "kvstore": f"{url}/{TABLE}/"}, read=True).result()
        np.testing.assert_array_equal(table[rows].read().result(), place.expected[TABLE][rows])


def test_zarr_over_http(place: Place) -> None:
    with serving(place.url, place.version, storage_options=place.options) as url:
        group = zarr.open_group(url, mode="r")
        np.testing.assert_array_equal(np.asarray(group[TABLE][:]), place.expected[TABLE])  # type: ignore[index]
