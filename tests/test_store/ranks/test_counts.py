"""What `benchmarks/ranks.py` counts in one process is what real ranks do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.ranks_bench.rows import Model, TableShape
from benchmarks.ranks_bench.scaling import MAX_COMMIT_REQUESTS, MAX_EXPONENT, exponents, record, summary
from cnr_store.format import grid
from cnr_store.writing import exchange
from tests.nightly import at_night
from tests.test_store.ranks.support.counted_save import SIZES, save_rank, small_model
from tests.test_store.ranks.support.rank_processes import run_ranks


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(grid, name, size)


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 7])
@pytest.mark.parametrize("world", [1, at_night(2), 3, at_night(4)])
def test_recorded_ranks_count_what_real_ones_do(tmp_path: Path, world: int, every: int) -> None:
    outcomes = run_ranks(world, save_rank, f"file://{tmp_path / 'store'}", every)
    assert not any(outcome.error for outcome in outcomes), outcomes
    real = [outcome.value for outcome in outcomes]
    recorded = record(world, small_model(every))
    assert json.dumps(recorded, indent=1) == json.dumps(real, indent=1)
    assert len(real[0]["commit_requests"]) <= MAX_COMMIT_REQUESTS
    if world > 1:
        assert sum(rank["messages"] for rank in real) > 0


@pytest.mark.slow
def test_what_ranks_say_grows_no_faster_than_their_number() -> None:
    model = small_model(7)
    runs = [summary(world, model, record(world, model)) for world in (4, 8, 16, 32)]
    found = exponents(runs)
    assert found["rank 0's documents"] <= 1.05
    assert found["requests"] <= 1.05


@pytest.mark.slow
def test_messages_grow_no_faster_than_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark in small: ranks by a factor of 8, tables by as many, and bytes by 1,024 fewer."""
    monkeypatch.setattr(exchange, "ROUND_BYTES", exchange.ROUND_BYTES >> 10)
    tables = [TableShape(number, 473_000, 128, by_rows=True) for number in range(3)]
    tables += [TableShape(number, 4_000, 128, by_rows=False) for number in range(3, 33)]
    model = Model(tuple(tables), 100)
    runs = [summary(world, model, record(world, model)) for world in (16, 32, 64, 128)]
    found = exponents(runs)
    for name in ("requests", "messages", "rank 0's bytes"):
        assert found[name] <= MAX_EXPONENT, name
    # A rank sends its rows of an array to the owners of the shards that they lie in: two, where it straddles.
    for run in runs:
        assert run["messages"] <= run["ranks"] * 2 * 2 * 3
