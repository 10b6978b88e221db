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


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize(
    ("optimizer", "histories"),
    [
        ("EXACT_ADAGRAD", [(2, "rw tw cw dp"), (3, "tw cw dp dp"), (1, "cw dp rw tw"), (4, "dp rw tw cw")]),
        ("EXACT_ROWWISE_ADAGRAD", [(2, "dp rw tw dp"), (3, "dp dp dp rw"), (2, "rw tw dp dp")]),
        ("EXACT_SGD", [(2, "dp rw cw dp"), (1, "rw dp dp tw")]),
    ],
)
def test_what_optimizers_keep_moves_along(
    tmp_path: Path, optimizer: str, histories: list[tuple[int, str]]
) -> None:
    before = None
    for world, ways in histories:
        found = values(run_ranks(world, GO_ON, tmp_path, optimizer, ways, deadline_seconds=120))
        for each in found:
            if before is not None:
                assert each["loaded"] == before["trained"]
                assert each["over"] == before["trained over"]
        before = found[0]
        kept = [name for name in before["trained"] if name.endswith("kept")]
        assert len(kept) == (0 if optimizer == "EXACT_SGD" else 4)


def test_state_of_another_kind_is_refused_or_left_out(tmp_path: Path) -> None:
    first = values(run_ranks(2, GO_ON, tmp_path, "ADAGRAD_AND_SGD", "rw tw cw dp", deadline_seconds=120))
    for each in run_ranks(2, GO_ON, tmp_path, "ADAGRAD_AND_SGD", "dp tw cw rw", deadline_seconds=120):
        assert each.error == "ModelMismatchError"
        for text in (
            "table 'bags.embedding_bags.A'",
            "SGD steps it now",
            "table 'bags.embedding_bags.D'",
            "Shard the table as it was",
        ):
            assert text in each.text
        assert "parameter group" not in each.text
    for each in values(
        run_ranks(2, GO_ON, tmp_path, "ADAGRAD_AND_SGD", "dp tw cw rw", "ignore", deadline_seconds=120)
    ):
        weights = {name: bits for name, bits in each["loaded"].items() if name.endswith("weight")}
        assert weights.items() <= first[0]["trained"].items()
        assert {name for name in each["missing"] if "embedding_bags" in name} == {
            "state of 'bags.embedding_bags.A.weight'",
            "state of 'bags.embedding_bags.D.weight'",
        }


def test_state_moves_only_where_no_number_is_rounded(tmp_path: Path) -> None:
    """Fused optimizers keep float32 for tables of float16, and what is stepped has state of the table's type."""

    def run(url: Path, ways: str) -> Any:
        arguments = (url, "EXACT_ROWWISE_ADAGRAD", ways, "raise", True)
        return run_ranks(2, GO_ON, *arguments, deadline_seconds=120)

    values(run(tmp_path / "wide", "rw tw tw tw"))
    for each in run(tmp_path / "wide", "dp tw tw tw"):
        assert each.error == "ModelMismatchError"
        assert "['momentum1'] in float32 trained it" in each.text
        assert "RowWiseAdagrad steps it now, with 'sum' in torch.float16" in each.text
    before = values(run(tmp_path / "narrow", "dp dp tw tw"))
    for each in values(run(tmp_path / "narrow", "rw dp tw tw")):
        assert each["loaded"] == before[0]["trained"]


@pytest.mark.nightly
def test_numbers_a_row_stay_those_of_their_column_shards(tmp_path: Path) -> None:
    def run(world: int, ways: str, strict: str = "raise") -> Any:
        return run_ranks(world, GO_ON, tmp_path, "EXACT_ROWWISE_ADAGRAD", ways, strict, deadline_seconds=120)

    values(run(2, "cw dp rw dp"))
    before = values(run(3, "cw dp tw dp"))[0]["trained"]  # on a rank more
    refused = run(2, "dp cw rw dp")
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
    for each in values(run(1, "cw dp rw dp")):
        assert each["loaded"] == before
        before = each["trained"]
    for each in values(run(2, "dp cw rw dp", "ignore")):
        differing = {name for name, bits in each["loaded"].items() if before[name] != bits}
        assert differing == {f"bags.embedding_bags.{name}/kept" for name in "AB"}
        assert {*each["missing"]} == {
            "state of 'bags.embedding_bags.A.weight'",
            "bags.embedding_bags.B/momentum1",
        }
