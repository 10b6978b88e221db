"""Where a table is whole, or compared, people are told why, what it costs, and what makes versions smaller."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cnr_store
from cnr_store.catalog.catalog import open_record
from cnr_store.policies.whole_tables import ADVICE, PAGE
from tests.paths import ROOT
from tests.test_store.cli.command import cnr

ROWS = 3000


def train(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    sum(table(torch.arange(64)).square().mean() for table in model.values()).backward()
    optimizer.step()


def test_the_page_is_there() -> None:
    assert ADVICE.endswith(PAGE)
    assert (ROOT / PAGE.split("/blob/main/")[1]).is_file()


def test_all_rows_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.ModuleDict({"a": nn.Embedding(ROWS, 8), "b": nn.Embedding(ROWS, 8)})
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-3)
    options: Any = {"bits": 8, "state_bits": 8}
    with caplog.at_level(logging.INFO, "cnr_store"):
        with cnr_store.Checkpointer(tmp_path, model, optimizer, **options) as checkpointer:
            for step in range(2):
                train(model, optimizer)
                assert repr(checkpointer.explain()).endswith(ADVICE)
                checkpointer.save(step).result()
        first, *_, last = (each for each in caplog.messages if "whole" in each)
    assert first.startswith("2 tables are compared with what is stored: 'a', 'b': Adam")
    assert first.endswith(ADVICE)
    record = open_record(str(tmp_path), 1)[1]
    ((reason, found),) = record.policy["whole"].items()
    taken = sum(each.nbytes for path, each in record.arrays.items() if path.startswith("tables/"))
    assert (reason, found["count"]) == ("all of its rows changed", 2)
    assert found["delta_bytes"] == found["bytes"] == pytest.approx(taken, rel=0.25)
    assert record.policy["advice"] == ADVICE
    told = f"'a', 'b': {reason} ({found['bytes']:,} bytes, as a delta {found['bytes']:,})"
    assert last.endswith(f"; whole are {told}; see {PAGE}")
    assert told in cnr(capsys, "info", str(tmp_path))[1]


def test_what_a_delta_would_have_cost(tmp_path: Path) -> None:
    """Where a step no longer fits. A table that hooks watch needs no advice."""
    model = nn.ModuleDict({"a": nn.EmbeddingBag(ROWS, 8, sparse=True)})
    codec = {"id": "cnr_lattice", "rms_step": 0.1}
    with cnr_store.Checkpointer(tmp_path, model, codec=codec, policy="one-shot") as checkpointer:
        for step in range(3):
            assert ADVICE not in repr(checkpointer.explain()) or step == 2
            with torch.no_grad():
                model.get_parameter("a.weight")[: ROWS - 300] *= 3
            checkpointer.touch("a", range(ROWS - 300))
            checkpointer.save(step).result()
    (found,) = open_record(str(tmp_path), 2)[1].policy["whole"].values()
    assert found["delta_bytes"] == pytest.approx(0.9 * found["bytes"], rel=0.01)
