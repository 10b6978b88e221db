"""DistributedDataParallel: each rank has the whole model, and the ranks write one version of it together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.nightly import at_night
from tests.test_store.ranks.support.rank_processes import Outcome, preload, run_ranks
from tests.test_store.support.distributed import rank_training

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    preload(*rank_training.PRELOAD)


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned, which must have raised nothing."""
    assert [each.where for each in outcomes] == [""] * len(outcomes)
    return [each.value for each in outcomes]


@pytest.mark.parametrize(
    ("world", "kind", "sparse"), [(3, "sgd", True), at_night(2, "adagrad", False), (2, "adam", True)]
)
def test_every_number_of_ranks_loads_what_some_saved(
    tmp_path: Path, world: int, kind: str, sparse: bool
) -> None:
    saved = values(run_ranks(world, rank_training.train, tmp_path, "ddp", kind, sparse, 3))
    first, *later = saved[0]["rows"]
    assert first == 3 * rank_training.ROWS
    # Adam moves every row that was ever looked up.
    assert all(0 < rows <= (5 if kind == "adam" else 2) * world * 15 for rows in later), later
    for other in (1, 2, 3):
        loaded = values(run_ranks(other, rank_training.load_once, tmp_path, "ddp", kind, sparse))
        assert loaded == [saved[0]["trained"]] * other


@pytest.mark.parametrize(("kind", "sparse"), [("sgd", True), ("adagrad", False)])
def test_the_same_ranks_go_on_where_each_stood(tmp_path: Path, kind: str, sparse: bool) -> None:
    whole = values(run_ranks(2, rank_training.train, tmp_path / "whole", "ddp", kind, sparse, 4))
    before = values(run_ranks(2, rank_training.train, tmp_path / "parts", "ddp", kind, sparse, 2))
    after = values(run_ranks(2, rank_training.train, tmp_path / "parts", "ddp", kind, sparse, 2))
    for rank in (0, 1):
        assert after[rank]["start"] == after[rank]["count"] == 2
        assert after[rank]["loaded"] == before[rank]["trained"]
        assert after[rank]["random"] == before[rank]["next"]
        assert after[rank]["trained"] == whole[rank]["trained"]
    assert after[0]["random"] != after[1]["random"]
    assert max(after[0]["rows"]) <= 60  # deltas of what the others saved


def test_other_ranks_split_the_readers(tmp_path: Path) -> None:
    values(run_ranks(3, rank_training.train, tmp_path, "ddp", "sgd", True, 2))
    after = values(run_ranks(2, rank_training.train, tmp_path, "ddp", "sgd", True, 1))
    assert [each["count"] for each in after] == [2, 2]
    assert max(after[0]["rows"]) <= 60


def test_the_first_rank_alone_speaks_of_the_job(tmp_path: Path) -> None:
    saved = values(run_ranks(2, rank_training.train, tmp_path, "ddp", "adam", True, 2))
    again = values(run_ranks(2, rank_training.train, tmp_path, "ddp", "adam", True, 0))
    for ranks, expected in (
        (
            saved,
            [
                "holds no version",
                "table 'bags' is compared with what is stored: Adam",
                "step 1: ",
                "step 2: ",
            ],
        ),
        (again, ["loaded version"]),
    ):
        lines = ranks[0]["lines"]
        assert len(lines) == len(expected), lines
        assert all(text in line for line, text in zip(lines, expected, strict=True))
        assert ranks[1]["lines"] == []


def test_a_row_that_one_rank_flagged_is_written(tmp_path: Path) -> None:
    for found in values(run_ranks(3, rank_training.flags_of_one_rank, tmp_path)):
        assert found == [6, 0, 1, 2, 300, 301, 302]


def test_all_ranks_save_once_and_load_once(tmp_path: Path) -> None:
    found = values(run_ranks(2, rank_training.save_once, tmp_path))
    assert len(set(found[0]["saved"])) == 2
    assert all(each["loaded"] == each["saved"][1] for each in found)
    assert found[1]["lines"] == []
