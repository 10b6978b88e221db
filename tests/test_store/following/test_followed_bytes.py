"""How much is read for an update, and in which blocks it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_store import (
    Checkpointer,
    VersionInfo,
)
from cnr_store.reading import changed_rows
from tests.test_store.following.followed_runs import DIM, ROWS, Counting, Model, Run, only, rows_of


def test_blocks_are_bounded_and_each_row_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_rows, "BLOCK_BYTES", 1000)
    run = Run(tmp_path)
    held = run.save()
    run.save(*range(0, ROWS, 3))
    for update in (only(tmp_path, held), next(cnr_store.follow(tmp_path))):
        blocks = [block for block in update.blocks() if block.name == "users.weight"]
        assert all(block.values.nbytes <= 1000 for block in blocks)
        rows = np.concatenate([block.rows for block in blocks])
        assert (np.diff(rows) > 0).all()
        assert len(blocks) > len(rows) * DIM * 4 // 1000


def test_bytes_read_follow_the_delta_and_not_the_table(tmp_path: Path) -> None:
    read = {}
    for rows in (20_000, 320_000):
        run = Run(tmp_path / str(rows), rows=rows, bits=8)
        held = run.save()
        run.save(*range(0, 20_000, 100))
        counting = Counting(tmp_path / str(rows))
        assert rows_of(only(counting, held)) == list(range(0, 20_000, 100))
        read[rows] = counting.nbytes
    assert read[320_000] < read[20_000] * 1.5
    assert read[320_000] < 320_000 * DIM / 20


RELATIVE: Any = {"id": "cnr_lattice", "rms_step": 0.2, "relative": True}


def train_relative(model: Model, checkpointer: Checkpointer, random: np.random.Generator) -> VersionInfo:
    """Move one user of a hundred a little."""
    rows = np.flatnonzero(random.random(len(model.users.weight)) < 0.01)
    with torch.no_grad():
        model.users.weight[rows] += 0.1 * torch.randn(len(rows), DIM)
    checkpointer.touch("users", rows)
    return checkpointer.save(1).result()


@pytest.mark.slow
@pytest.mark.parametrize("new_call", [False, True], ids=["one iterator", "a call for each version"])
def test_codes_seen_before_are_not_read_again(tmp_path: Path, new_call: bool) -> None:
    """Rows relative to eight versions cost the bytes of the newest one."""
    model, random, counting = Model(rows=60_000), np.random.default_rng(0), Counting(tmp_path)
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(tmp_path, model, optimizer, policy="consecutive", codec={"users": RELATIVE}) as saving:
        saving.save(0).result()
        updates = cnr_store.follow(counting)
        update = next(updates)
        found = {block.name: block.values.copy() for block in update.blocks()}
        shares = []
        for _ in range(8):
            info, before = train_relative(model, saving, random), counting.nbytes
            update = next(cnr_store.follow(counting, update) if new_call else updates)
            for name, rows, values in update.blocks():
                if rows is not None:
                    found[name][rows] = values
            shares.append((counting.nbytes - before) / info.bytes)
            assert found["users.weight"].tobytes() == cnr_store.state_dict(tmp_path)["users.weight"].tobytes()
    assert max(shares) < 1.2


def test_codes_that_are_not_right_are_read_again(tmp_path: Path) -> None:
    model, random = Model(), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(tmp_path, model, optimizer, policy="consecutive", codec={"users": RELATIVE}) as saving:
        saving.save(0).result()
        updates = cnr_store.follow(tmp_path)
        list(next(updates).blocks())
        for _ in range(2):
            train_relative(model, saving, random)
            update = next(updates)
            update._seen._tables["tables/users/weight"]._codes[::3, 1] += 1
            expected = cnr_store.state_dict(tmp_path)["users.weight"]
            for name, rows, values in update.blocks():
                if name == "users.weight":
                    np.testing.assert_array_equal(values, expected[rows])
