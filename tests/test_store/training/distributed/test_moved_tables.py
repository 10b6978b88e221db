"""Tables of TorchRec that are sharded in another way at each resume: some by fused optimizers, some stepped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_store.ranks.support.rank_processes import preload, run_ranks
from tests.test_store.training.distributed.test_ddp import values

pytestmark = pytest.mark.slow

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")
GO_ON = "tests.test_store.support.distributed.moving_tables:go_on"


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    preload("torchrec")


def test_tables_move_between_optimizers_that_keep_nothing(tmp_path: Path) -> None:
    before = None
    for world, ways in [(2, "dp rw cw dp"), (1, "rw dp dp tw")]:
        found = values(run_ranks(world, GO_ON, tmp_path, "EXACT_SGD", ways, deadline_seconds=120))
        for each in found:
            if before is not None:
                assert each["loaded"] == before["trained"]
                assert each["over"] == before["trained over"]
        before = found[0]
        assert not [name for name in before["trained"] if name.endswith("kept")]


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("optimizer", ["EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAGRAD_AND_SGD"])
def test_state_of_the_other_kind_is_refused_or_left_out(tmp_path: Path, optimizer: str) -> None:
    first = values(run_ranks(2, GO_ON, tmp_path, optimizer, "rw tw cw dp", deadline_seconds=120))
    for each in run_ranks(2, GO_ON, tmp_path, optimizer, "dp tw cw rw", deadline_seconds=120):
        assert each.error == "ModelMismatchError"
        for text in (
            "table 'bags.embedding_bags.A': an optimizer steps it now",
            "(momentum1) is not loaded",
            "table 'bags.embedding_bags.D': a fused optimizer trains it now",
            "Shard the table as it was",
        ):
            assert text in each.text
        assert "parameter group" not in each.text
    for each in values(
        run_ranks(2, GO_ON, tmp_path, optimizer, "dp tw cw rw", "ignore", deadline_seconds=120)
    ):
        weights = {name: bits for name, bits in each["loaded"].items() if name.endswith("weight")}
        assert weights.items() <= first[0]["trained"].items()
        assert {name for name in each["missing"] if "embedding_bags" in name} == {
            "state of 'bags.embedding_bags.A.weight'",
            "state of 'bags.embedding_bags.D.weight'",
        }


@pytest.mark.nightly
def test_numbers_a_row_stay_those_of_their_column_shards(tmp_path: Path) -> None:
    def run(world: int, ways: str, strict: str = "raise") -> Any:
        return run_ranks(world, GO_ON, tmp_path, "EXACT_ROWWISE_ADAGRAD", ways, strict, deadline_seconds=120)

    values(run(2, "cw tw rw dp"))
    before = values(run(3, "cw tw tw dp"))[0]["trained"]  # on a rank more
    refused = run(2, "tw cw rw dp")
    assert len({each.text for each in refused}) == 1
    for each in refused:
        assert each.error == "ModelMismatchError"
        assert (
            "'bags.embedding_bags.A' has column shards that begin at [0], and had some that began at [0, 4]"
            in each.text
        )
        assert (
            "'bags.embedding_bags.B' has column shards that begin at [0, 4], and had some that began at [0]"
            in each.text
        )
    for each in values(run(1, "cw tw rw dp")):
        assert each["loaded"] == before
        before = each["trained"]
    for each in values(run(2, "tw cw rw dp", "ignore")):
        differing = {name for name, bits in each["loaded"].items() if before[name] != bits}
        assert differing == {f"bags.embedding_bags.{name}/kept" for name in "AB"}
        assert {*each["missing"]} == {
            "bags.embedding_bags.A/momentum1",
            "bags.embedding_bags.B/momentum1",
        }
