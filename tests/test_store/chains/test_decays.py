"""How far grids move: by what samples of optimizer state tell, whatever becomes of it between two saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, AdamW

import cnr_store
from cnr_backends import open_backend
from cnr_store import Checkpointer
from cnr_store.catalog.catalog import Catalog
from cnr_store.ranks.placement import Piece
from cnr_store.training.saving import planner
from tests.test_store.chains.test_moving_grids import FIRST, ROWS, SECOND, Job, entries_of, held, total
from tests.test_store.chains.test_relative import RELATIVE
from tests.test_store.ranks.support.spread_model import Cut, TableKind
from tests.test_store.ranks.support.thread_job import ThreadJob, find_spread_models, this_rank
from tests.test_store.training.saving.test_compared import stored

NAN, INF = float("nan"), float("inf")
AT_REST = 4 * 2.0**-149
"""Times .9 it is rounded to itself."""
DECAY = 0.9**3, 0.999**3
"""Of a moment, and of one of squares, in three steps."""


def kept(job: Job) -> dict[str, torch.Tensor]:
    """What the optimizer keeps for rows, by path."""
    state = job.optimizer.state[job.model.get_parameter("users.weight")]
    return {f"tables/users/{slot}": value for slot, value in state.items() if value.ndim}


def save(job: Job, checkpointer: Checkpointer, step: int) -> dict[str, Any]:
    """Save, compare what the version gives back with what its codecs make of the model, and return its entries."""
    version = checkpointer.save(step).result().id
    entries = entries_of(job.url, version)
    for path, tensor in kept(job).items():
        np.testing.assert_array_equal(held(job.url, version, path), stored(tensor, entries[path].codec), path)
    return dict(entries)


def totals(entries: Mapping[str, Any]) -> tuple[float, float]:
    """How far the grids of both moments have moved."""
    return total(entries[FIRST].move), total(entries[SECOND].move)


def saved_twice(job: Job, checkpointer: Checkpointer) -> dict[str, Any]:
    """The entries of the second version, whose grids have moved once."""
    for step in range(2):
        job.train()
        entries = save(job, checkpointer, step)
    assert totals(entries) == pytest.approx([1 / factor for factor in DECAY], rel=1e-5)
    return entries


def test_samples_that_tell_nothing_leave_grids_where_they_are(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.checkpointer() as checkpointer:
        for step, value in enumerate((0, 0, NAN, NAN, 1, 0, 1, INF, 1, -0.5)):
            for each in kept(job).values():
                each.fill_(value)
            assert totals(save(job, checkpointer, step)) == (1, 1)


def test_values_that_are_no_numbers_in_some_rows_tell_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.checkpointer() as checkpointer:
        for each in kept(job).values():
            each[: ROWS // 2] = NAN
        saved_twice(job, checkpointer)


def test_more_rows_that_are_looked_up_than_not_do_not_hide_the_factor(tmp_path: Path) -> None:
    """As they would from a median."""
    job = Job(tmp_path)
    job.train(np.arange(ROWS))
    with job.checkpointer() as checkpointer:
        save(job, checkpointer, 0)
        job.train(np.arange(ROWS * 7 // 10))
        entries = save(job, checkpointer, 1)
    assert totals(entries) == pytest.approx([1 / factor for factor in DECAY], rel=1e-5)
    assert entries[SECOND].rows < ROWS * 3 // 4


def test_rows_that_decay_no_further_do_not_hide_the_factor(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(np.arange(ROWS))
    with job.checkpointer() as checkpointer:
        kept(job)[FIRST][: ROWS * 7 // 10] = AT_REST
        save(job, checkpointer, 0)
        job.optimizer.zero_grad(set_to_none=False)
        for _ in range(3):
            job.optimizer.step()
        assert (kept(job)[FIRST][0] == AT_REST).all()
        entries = save(job, checkpointer, 1)
    assert total(entries[FIRST].move) == pytest.approx(1 / DECAY[0], rel=1e-5)
    assert entries[FIRST].rows == 0


def test_too_few_rows_of_one_factor_move_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    random = torch.Generator().manual_seed(0)
    with job.checkpointer() as checkpointer:
        for step in range(2):
            for each in kept(job).values():
                each[: ROWS // 10] *= 0.5
                each[ROWS // 10 :] = torch.rand(each[ROWS // 10 :].shape, generator=random) + 0.1
            entries = save(job, checkpointer, step)
        assert totals(entries) == (1, 1)


def test_betas_that_change_between_saves(tmp_path: Path) -> None:
    job, betas = Job(tmp_path), (0.5, 0.9)
    with job.checkpointer() as checkpointer:
        saved_twice(job, checkpointer)
        job.optimizer.param_groups[0]["betas"] = betas
        job.train()
        entries = save(job, checkpointer, 2)
    expected = [1 / (factor * beta**3) for factor, beta in zip(DECAY, betas, strict=True)]
    assert totals(entries) == pytest.approx(expected, rel=1e-5)
    assert max(entries[path].rows for path in (FIRST, SECOND)) <= 130


def test_values_that_grow_move_no_grid_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.checkpointer() as checkpointer:
        before = totals(saved_twice(job, checkpointer))
        for each in kept(job).values():
            each *= 1.7
        entries = save(job, checkpointer, 2)
        assert totals(entries) == before
        assert entries[FIRST].rows == int(kept(job)[FIRST].any(dim=1).sum())
        for each in kept(job).values():
            each *= 0.5
        entries = save(job, checkpointer, 3)
    assert totals(entries) == pytest.approx([2 * each for each in before], rel=1e-5)
    assert entries[FIRST].rows == 0


@pytest.mark.parametrize("has_gradients", [False, True])
def test_steps_without_a_backward(tmp_path: Path, has_gradients: bool) -> None:
    """Without gradients, an optimizer leaves all as it is; with gradients of zeros, all rows decay."""
    job = Job(tmp_path)
    with job.checkpointer() as checkpointer:
        before = totals(saved_twice(job, checkpointer))
        job.optimizer.zero_grad(set_to_none=not has_gradients)
        for _ in range(3):
            job.optimizer.step()
        entries = save(job, checkpointer, 2)
    factors = DECAY if has_gradients else (1, 1)
    expected = [each / factor for each, factor in zip(before, factors, strict=True)]
    assert totals(entries) == pytest.approx(expected, rel=1e-5)
    assert [entries[path].rows for path in (FIRST, SECOND)] == [0, 0]


MOMENTUM = "tables/users/momentum_buffer"


def with_momentum(url: Path, **options: Any) -> Job:
    job = Job(url, **options)
    job.optimizer = SGD(job.model.parameters(), lr=0.01, momentum=0.9)
    job.train(np.arange(0, ROWS, 2))
    return job


@pytest.mark.parametrize("state_bits", ["m3", 8])
def test_a_momentum_that_becomes_zero(tmp_path: Path, state_bits: Any) -> None:
    """What was kept stays as it is, and hooks tell of rows. A reader could not mix these with others beneath."""
    job = with_momentum(tmp_path)
    with job.checkpointer() as checkpointer:
        for step in range(2):
            job.train()
            moved = save(job, checkpointer, step)[MOMENTUM].move
    assert total(moved) == pytest.approx(1 / DECAY[0], rel=1e-5)
    job = with_momentum(tmp_path, state_bits=state_bits)
    with job.checkpointer() as checkpointer:
        checkpointer.load()
        job.optimizer.param_groups[0]["momentum"] = 0
        job.train()
        entry = save(job, checkpointer, 2)[MOMENTUM]
    if state_bits == "m3":
        assert (entry.kind, entry.move) == ("delta", moved)
        assert entry.rows <= 120
    else:
        assert (entry.kind, entry.move) == ("whole", (1, 0))


def test_a_scale_that_is_rounded_to_two(tmp_path: Path) -> None:
    """7/4 times 8/7 is found as a little less than 2."""
    job = Job(tmp_path)
    with job.checkpointer() as checkpointer:
        for step, value in enumerate((7, 4, 3.5)):
            for each in kept(job).values():
                each.fill_(value)
            entries = save(job, checkpointer, step)
    assert entries[FIRST].move == entries[SECOND].move == (1.0, 1)


FLOATING = {"id": "cnr_floating", "mantissa_bits": 3, "relative": True}


def test_weights_keep_their_grid(tmp_path: Path) -> None:
    """All rows that are not looked up are multiplied by one factor, as moments are."""
    job = Job(tmp_path, codec={"*": FLOATING})
    job.optimizer = AdamW(job.model.parameters(), lr=0.01, weight_decay=10)
    with job.checkpointer() as checkpointer:
        for step in range(3):
            job.train()
            entries = save(job, checkpointer, step)
    assert entries["tables/users/weight"].move == (1, 0)
    assert min(totals(entries)) > 1


@pytest.mark.parametrize(("dtype", "state_bits"), [(torch.float32, "m23"), (torch.bfloat16, "m3")])
def test_lossless_and_narrow_state_keep_their_grid(
    tmp_path: Path, dtype: torch.dtype, state_bits: Any
) -> None:
    job = Job(tmp_path, state_bits=state_bits)
    job.model.to(dtype)
    job.optimizer = Adam(job.model.parameters(), lr=0.01, betas=(0.5, 0.75))  # exact in few bits
    job.train(np.arange(0, ROWS, 2))
    with job.checkpointer() as checkpointer:
        for step in range(3):
            job.train()
            entries = save(job, checkpointer, step)
    assert totals(entries) == (1, 1)


KIND = TableKind("A", ROWS, 8, torch.float32, {"exp_avg_sq": False})
CUTS = {
    # One rank has no row, one has fewer than would tell a factor.
    "uneven": (3, [Piece(0, ROWS - 6, 0, 8, 0), Piece(ROWS - 6, 6, 0, 8, 2)], 0.9),
    # Of most ranks, though of few rows, the factor is another.
    "divided": (3, [Piece(0, 2800, 0, 8, 0), Piece(2800, 100, 0, 8, 1), Piece(2900, 100, 0, 8, 2)], 0.8),
}


@pytest.mark.parametrize(("cut", "poor"), [("uneven", None), ("divided", None), ("divided", 2)])
def test_ranks_agree_on_where_most_samples_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str, poor: int | None
) -> None:
    """Where one has no memory for codes, the grid stays."""
    find_spread_models(monkeypatch)
    monkeypatch.setattr(planner, "free_bytes", lambda: 0 if this_rank() == poor else 1 << 30)
    world, pieces, other = CUTS[cut]
    options: Any = {"codec": {"*": RELATIVE}, "state_bits": "m3", "policy": "consecutive"}
    options["tracking"] = cnr_store.Tracking(audit="all")
    path, url = "tables/ebc.embedding_bags.A/exp_avg_sq", str(tmp_path)
    with ThreadJob(url, world, [KIND], {"A": Cut((0,), tuple(pieces))}, **options) as job:
        truth = job.new_truth(np.random.default_rng(0))
        values = np.square(truth["A", "exp_avg_sq"]) + 1e-3
        for step in range(4):
            job.fill(truth | {("A", "exp_avg_sq"): values})
            job.save(step)
            values = np.concatenate([values[:2800] * np.float32(0.9), values[2800:] * np.float32(other)])
        entries = [Catalog(open_backend(url)).record(each.id).arrays for each in cnr_store.versions(url)]
        moved = [total(each[path].move) for each in entries]
        last = np.concatenate([values[:2800] / np.float32(0.9), values[2800:] / np.float32(other)])
        job.load()
        found = job.found()["A", "exp_avg_sq"]
    assert sorted(moved) == pytest.approx(
        [1, 1, 1, 1] if poor is not None else [0.9**-step for step in range(4)]
    )
    np.testing.assert_allclose(found, last, rtol=1 / 15)
