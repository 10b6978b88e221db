"""What is told of a model that TorchRec shards. Needs TorchRec, which the tests' dependencies do not have."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.distributed.torchrec import FusedOptimizer, find_sharded
from cnr_store.training.model.names import named_modules
from tests.nightly import at_night
from tests.test_store.ranks.support.rank_processes import preload, run_ranks
from tests.test_store.support.distributed.ranks import group, run_checks
from tests.test_store.training.distributed.test_ddp import values

CHECKS = "tests.test_store.support.distributed.sharded_checks"
NAMES = [
    "tile",
    "tile adagrad",
    "tile sgd",
    "live",
    "steps",
    "steps adagrad",
    "steps sgd",
    "steps weighted",
    "no grad",
    "user",
    "save between",
    "told",
    "settings",
    "out of range",
    "pipeline",
    "variable",
    "refused",
    "nothing kept",
]

needs_torchrec = pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="needs TorchRec")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with group(str(tmp_path / "store"), 0, 1):
        yield


@pytest.mark.slow
@pytest.mark.some_by_day(9)
@needs_torchrec
@pytest.mark.filterwarnings("ignore")  # TorchRec's own
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", NAMES)
def test_in_one_process(name: str) -> None:
    checks = importlib.import_module(CHECKS).CHECKS
    assert list(checks) == NAMES
    checks[name]()


@needs_torchrec
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, at_night(3)])
def test_over_ranks(world: int) -> None:
    preload("torchrec")
    values(run_ranks(world, run_checks, CHECKS, deadline_seconds=300))


def test_a_model_without_torchrec_has_none() -> None:
    assert find_sharded(named_modules(nn.Sequential(nn.EmbeddingBag(3, 2)))) == []


class _Setting:
    """An enum's member of FBGEMM, or settings of it."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("kind", "settings", "slots"),
    [
        ("exact_sgd", {}, {}),
        ("exact_adagrad", {}, {"momentum1": False}),
        ("exact_row_wise_adagrad", {}, {"momentum1": True}),
        (
            "exact_row_wise_adagrad",
            {"weight_decay_mode": _Setting(name="COUNTER")},
            {"momentum1": True, "prev_iter": True, "row_counter": True},
        ),
        (
            "exact_row_wise_adagrad",
            {"weight_decay_mode": _Setting(name="DECOUPLE_GLOBAL")},
            {"momentum1": True, "prev_iter": True},
        ),
        ("adam", {}, {"momentum1": False, "exp_avg_sq": False}),
        (
            "adam",
            {"extra_optimizer_config": _Setting(use_rowwise_bias_correction=True)},
            {"momentum1": False, "exp_avg_sq": False, "row_counter": True},
        ),
        ("partial_row_wise_adam", {}, {"momentum1": False, "exp_avg_sq": True}),
    ],
)
def test_slots_follow_from_settings(kind: str, settings: dict[str, object], slots: dict[str, bool]) -> None:
    found = FusedOptimizer.of({"optimizer": _Setting(value=kind), **settings}, "t")
    assert (found.kind, found.slots) == (kind, slots)
    assert found.moves_untouched_rows() is None


def test_averaging_moves_all_rows() -> None:
    found = FusedOptimizer.of({"optimizer": _Setting(value="ensemble_row_wise_adagrad")}, "t")
    assert "averages all rows" in str(found.moves_untouched_rows())


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"^table 't' has the fused optimizer 'lars_sgd', .* use one of"
    ):
        FusedOptimizer.of({"optimizer": _Setting(value="lars_sgd")}, "t")
