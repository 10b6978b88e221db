"""What only one rank may decide is that rank's, all of it; what must be alike and is not is an error on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

import cnr_store
from cnr_store.dcp import Reader
from tests.test_store.ranks.support.rank_processes import run_ranks
from tests.test_store.ranks.support.unlike_ranks import model


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("unlike"))


@pytest.fixture(scope="module")
def found(url: str) -> list[dict[str, Any]]:
    outcomes = run_ranks(2, "tests.test_store.ranks.support.unlike_ranks:run", url, deadline_seconds=120)
    assert not any(each.error for each in outcomes), [each.where for each in outcomes]
    assert cnr_store.versions(Path(url) / "other") == []
    assert [info.step for info in cnr_store.versions(Path(url) / "same")] == [1, 2]
    return [each.value for each in outcomes]


@pytest.mark.slow
def test_parameters_that_are_no_replicas_are_not_saved(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["other values"].startswith("SaveError")
        assert "parameter 'emb.weight' has other values on rank 1 than on rank 0" in each["other values"]


@pytest.mark.slow
def test_optimizer_state_of_ranks_that_step_apart_is_not_saved(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["other state"].startswith("SaveError")
        assert (
            "optimizer state 'exp_avg' of parameter 'weight' has other values on rank 1"
            in each["other state"]
        )


def test_optimizer_state_that_is_spread_over_the_ranks_is_not_saved(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["spread state"].startswith("SaveError")
        assert (
            "optimizer state 'momentum_buffer' of parameter 'weight' is not on rank 1" in each["spread state"]
        )


@pytest.mark.parametrize(("what", "option"), [("other tables", "selection"), ("other versions", "version")])
def test_loads_that_differ_are_refused_and_the_next_succeeds(
    found: list[dict[str, Any]], what: str, option: str
) -> None:
    assert found[0][what] == found[1][what]
    assert found[0][what].startswith(f"OptionError: load: {option} differs between ranks")
    assert [each["again"] for each in found] == ["", ""]
    assert [each["next"] for each in found] == ["", ""]


def test_buffers_and_objects_are_those_of_the_first_rank(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["buffers"] == [1.0, 1.0]
        assert each["object"] == [2000, 0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_that_train_apart_save_apart(url: str, found: list[dict[str, Any]]) -> None:
    for rank in range(len(found)):
        saved = cnr_store.state_dict(f"{url}/group {rank}")
        for name, values in model(rank).state_dict().items():
            assert np.array_equal(saved[name], values), name
        for way in ("dcp", "alone"):
            state = {"rank": -1}
            torch_load(state, storage_reader=Reader(f"{url}/{way} {rank}"), no_dist=True)
            assert state == {"rank": rank}
