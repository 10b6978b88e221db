"""Readers under way while the version they read is folded and what it leaned on is removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store import Checkpointer, CorruptionError
from cnr_store.format import layout
from cnr_store.policies.policy import PolicyName
from cnr_store.reading.filesystem import CnrFileSystem

ROWS = 3000
CHUNK = "tables/weight/weight/c/0/0"


def chained(url: str, policy: PolicyName) -> str:
    """Store a version of a chain of four, pinned, and a newer one that shares nothing with it."""
    torch.manual_seed(1)
    model = nn.Embedding(ROWS, 8)
    with Checkpointer(url, model, policy=policy, bits=8) as checkpointer:
        for step in range(4):
            with torch.no_grad():
                model.weight[step * 10 : step * 10 + 40] += 1
            checkpointer.touch("weight", range(step * 10, step * 10 + 40))
            checkpointer.save(step).result()
    version = cnr_store.versions(url)[-1].id
    cnr_store.pin(url, version)
    cnr_store.save(url, nn.Embedding(ROWS, 8), step=9)
    return version


def fold_and_collect(url: str, version: str) -> None:
    assert cnr_store.compact(url, version).outcome == "folded"
    assert cnr_store.gc(url, keep_last=1, grace_seconds=0).removed


def folding_at_first_read(url: str, version: str) -> Backend:
    """The store, where the version is folded as soon as its rows are read."""
    done: list[bool] = []

    def fault(operation: str, key: str, index: int) -> Fault:
        if operation in ("get_range", "get_suffix") and not done:
            done.append(True)
            fold_and_collect(url, version)
        return None

    return FaultyBackend(open_backend(url), fault, reads=True)


def loaded(backend: Any, version: str, **options: Any) -> np.ndarray[Any, Any]:
    model = nn.Embedding(ROWS, 8)
    assert cnr_store.load(backend, model, version=version, **options).version.id == version
    values: np.ndarray[Any, Any] = model.weight.detach().numpy()
    return values


READS: dict[str, Callable[[Any, str], np.ndarray[Any, Any]]] = {
    "load": loaded,
    "load with fallback": lambda backend, version: loaded(backend, version, fallback=True),
    "state_dict": lambda backend, version: cnr_store.state_dict(backend, version)["weight"],
}


@pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
@pytest.mark.parametrize("name", READS)
def test_a_read_goes_on_in_the_fold(url: str, name: str, policy: PolicyName) -> None:
    version = chained(url, policy)
    expected = cnr_store.state_dict(url, version)["weight"]
    assert READS[name](folding_at_first_read(url, version), version).tobytes() == expected.tobytes()


def test_a_diff_goes_on_in_the_fold(url: str) -> None:
    version = chained(url, "consecutive")
    expected = cnr_store.diff(url, version)
    assert cnr_store.diff(folding_at_first_read(url, version), version) == expected


def test_a_diff_of_versions_that_share_rows_goes_on_in_the_fold(url: str) -> None:
    version = chained(url, "consecutive")
    second = cnr_store.versions(url)[1].id
    cnr_store.pin(url, second)
    expected = cnr_store.diff(url, second, version)
    assert cnr_store.diff(folding_at_first_read(url, version), second, version) == expected


def test_an_export_goes_on_in_the_fold(url: str, tmp_path: Path) -> None:
    version = chained(url, "consecutive")
    cnr_store.export(url, tmp_path / "before", version)
    cnr_store.export(folding_at_first_read(url, version), tmp_path / "meanwhile", version)
    assert (tmp_path / "meanwhile").read_bytes() == (tmp_path / "before").read_bytes()


def test_open_views_stay_as_they_are_cut(url: str) -> None:
    version = chained(url, "consecutive")
    expected = cnr_store.state_dict(url, version)
    view, files = cnr_store.view(url, version), CnrFileSystem(url, version=version)
    weight = cnr_store.open(url, version)["tables/weight/weight"]
    assert isinstance(weight, zarr.Array)
    before = view.document("tables/weight/weight"), files.cat_file(CHUNK)
    fold_and_collect(url, version)
    assert np.asarray(weight[:]).tobytes() == expected["weight"].tobytes()
    assert np.asarray(weight[17:23]).tobytes() == expected["weight"][17:23].tobytes()
    assert (view.document("tables/weight/weight"), files.cat_file(CHUNK)) == before


@pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
def test_training_goes_on_from_a_version_folded_while_it_was_loaded(url: str, policy: PolicyName) -> None:
    version = chained(url, policy)
    backend = folding_at_first_read(url, version)
    model = nn.Embedding(ROWS, 8)
    with Checkpointer(backend, model, policy=policy, bits=32) as checkpointer:
        checkpointer.load(version)
        for row in (5, 2000):
            with torch.no_grad():
                model.weight[row] += 1
            checkpointer.touch("weight", [row])
            checkpointer.save(10 + row).result()
            stored = cnr_store.state_dict(url)["weight"]
            assert stored.tobytes() == model.weight.detach().numpy().tobytes()


def test_what_is_lost_without_a_fold_is_still_damage(url: str) -> None:
    version = chained(url, "consecutive")
    view = cnr_store.view(url, version)
    backend = open_backend(url)
    first = cnr_store.versions(url)[0].id
    for key, _ in list(backend.list_keys(layout.version_key(first, "tables"))):
        backend.delete(key)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="is lost"):
            view.read(CHUNK, 32 * 200, 32 * 201)  # a row that no delta wrote
    with pytest.raises(CorruptionError, match="is lost"):
        cnr_store.state_dict(url, version)
