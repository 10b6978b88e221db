"""Loads that folds and removals overtake: the saves after them hold every row that training has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store.policies.policy import PolicyName
from tests.nightly import NIGHT, TODAY

ROWS = 3000


class Model(nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.emb = nn.Embedding(rows, 4, sparse=True)

    def train_rows(self, optimizer: torch.optim.Optimizer, rows: list[int]) -> None:
        optimizer.zero_grad()
        self.emb(torch.tensor(rows)).square().sum().backward()
        optimizer.step()


def _history(url: str) -> None:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with cnr_store.Checkpointer(url, model, optimizer, policy="one-shot", bits=32) as checkpointer:
        checkpointer.save(1).result()
        model.train_rows(optimizer, [1, 2, 3, 4])
        checkpointer.save(2).result()


def _array(url: str, version: cnr_store.VersionInfo, path: str) -> Any:
    found = cnr_store.open(url, version)[path]
    assert isinstance(found, zarr.Array)
    return found[:]


class _Overtaker:
    """A fold's record and, if asked, the removal of all beneath it land before one operation of a load."""

    def __init__(self, url: str, at: int, remove: bool) -> None:
        self._url, self._at, self._remove = url, at, remove
        self.landed = False
        self.operations = 0
        self.armed = False

    def __call__(self, operation: str, key: str, index: int) -> None:
        if not self.armed:
            return
        if self.operations == self._at:
            self.landed = True
            cnr_store.compact(self._url, 2)
            if self._remove:
                base = cnr_store.versions(self._url)[0].id
                for name, _ in list(open_backend(self._url).list_keys(f"versions/{base}")):
                    open_backend(self._url).delete(name)
        self.operations += 1


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("policy", ["one-shot", "consecutive"])
@pytest.mark.parametrize("remove", [False, True])
def test_a_fold_that_lands_while_its_version_is_loaded_makes_no_save_forget_a_row(
    tmp_path: Path, policy: PolicyName, remove: bool
) -> None:
    at, loads, stride = (0, 0, 1) if NIGHT else (TODAY % 2, 0, 2)
    while True:
        url = str(tmp_path / str(at))
        _history(url)
        overtaker = _Overtaker(url, at, remove)
        model = Model()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        backend = FaultyBackend(open_backend(url), overtaker, reads=True)
        with cnr_store.Checkpointer(backend, model, optimizer, policy=policy, bits=32) as checkpointer:
            overtaker.armed = True
            try:
                checkpointer.load(2)
                loads += 1
            except cnr_store.CorruptionError:
                assert remove  # said aloud; the version can be loaded again
                checkpointer.load(2)
            overtaker.armed = False
            model.train_rows(optimizer, [9])
            saved = checkpointer.save(3).result()
        assert np.array_equal(
            cnr_store.state_dict(url, saved)["emb.weight"], model.emb.weight.detach().numpy()
        )
        sums = optimizer.state[model.emb.weight]["sum"].numpy()
        assert np.array_equal(_array(url, saved, "tables/emb/sum"), sums)
        if not overtaker.landed:
            assert at > 5
            break
        at += stride
    assert loads > 5 // stride


@pytest.mark.parametrize("rows", [ROWS, ROWS + 1000])
def test_a_parameter_that_was_replaced_is_stored_as_the_table_it_is(tmp_path: Path, rows: int) -> None:
    model, url = Model(), str(tmp_path / "store")
    with cnr_store.Checkpointer(url, model, policy="consecutive", bits=32) as checkpointer:
        checkpointer.save(1).result()
        model.emb.weight = nn.Parameter(torch.ones(rows, 4))
        checkpointer.save(2).result()
        with torch.no_grad():
            model.emb.weight[7] = 2
        checkpointer.touch("emb", [7])
        assert checkpointer.save(3).result().rows == 1
    loaded = Model(rows)
    cnr_store.load(url, loaded)
    assert torch.equal(loaded.emb.weight, model.emb.weight)
    assert cnr_store.state_dict(url).keys() == {"emb.weight"}
