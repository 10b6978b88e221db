"""``codec="auto"``: which codec tables get in a training, and what the record says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_store import Checkpointer, OptionError
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.record import Record

ONCE = {"failures_per_node_hour": 1.0, "nodes": 1, "hours": 1}
ANY: dict[str, Any] = {"id": "auto", "fast_restore": False}
ROWS, DIM = 3_000, 16


class Model(nn.Module):
    """A large table and one of a fiftieth of it, and one too small for any but lossless codes."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Embedding(50 * ROWS, DIM, sparse=True)
        self.small = nn.Embedding(ROWS, DIM, sparse=True)
        self.tiny = nn.Embedding(8, DIM, sparse=True)


def record(url: Path, version: str) -> Record:
    return Catalog(open_backend(str(url))).record(version)


def codec(found: Record, table: str, slot: str = "weight") -> dict[str, Any]:
    return dict(found.arrays[f"tables/{table}/{slot}"].codec or {})


def test_lattice_for_a_small_share_of_the_model(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Model(), codec="auto", expected_restores=ONCE) as checkpointer:
        found = record(tmp_path, checkpointer.save(0).result().id)
    assert codec(found, "large") == {"id": "cnr_uniform", "scheme": "adaptive", "bits": 4}
    small = codec(found, "small")
    assert (small["id"], small["rms_step"], small["relative"]) == ("cnr_lattice", 0.35, True)
    assert codec(found, "tiny") == {"id": "cnr_rows"}
    assert found.policy["codec"] == {
        "rms_step": 0.35,
        "bits": 4,
        "reason": "1 restores are expected: at most 1",
    }


def test_every_large_table_where_restores_may_be_slow(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Model(), codec=ANY) as checkpointer:
        found = record(tmp_path, checkpointer.save(0).result().id)
    assert {codec(found, name)["rms_step"] for name in ("large", "small")} == {0.05}


@pytest.mark.slow
def test_state_goes_to_a_grid_only_if_asked(tmp_path: Path) -> None:
    for state in (False, True):
        torch.manual_seed(0)
        model, url = Model(), tmp_path / str(state)
        optimizer = torch.optim.Adagrad(model.parameters())
        options = {**ANY, "state": state}
        with Checkpointer(url, model, optimizer, codec=options, expected_restores=ONCE) as checkpointer:
            found = record(url, checkpointer.save(0).result().id)
        grid = {"id": "cnr_floating", "mantissa_bits": 3, "relative": True}
        expected = grid if state else {"id": "cnr_rows"}
        assert codec(found, "small", "sum") == expected
        assert codec(found, "tiny", "sum") == {"id": "cnr_rows"}


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "kept"), [(0.02, True), (30.0, False)])
def test_deltas_decide(tmp_path: Path, spread: float, kept: bool) -> None:
    """Rows that move far beyond what they were in the whole version take more than 4 bits a value on its steps."""
    torch.manual_seed(0)
    model, ids = Model(), []
    with Checkpointer(
        tmp_path, model, codec=ANY, expected_restores=ONCE, policy="consecutive"
    ) as checkpointer:
        for step in range(6):
            ids.append(checkpointer.save(step).result().id)
            with torch.no_grad():
                model.small.weight[:2_000] += spread * torch.randn(2_000, DIM)
            checkpointer.touch("small", torch.arange(2_000))
    kinds = [codec(record(tmp_path, each), "small")["id"] for each in ids]
    assert kinds[:4] == ["cnr_lattice"] * 4
    assert kinds[4:] == (["cnr_lattice"] if kept else ["cnr_uniform"]) * 2
    other = Model()
    cnr_store.load(tmp_path, other)
    assert not cnr_store.verify(str(tmp_path), deep=True).problems


@pytest.mark.slow
def test_more_restores_than_expected_give_the_finest_step(tmp_path: Path) -> None:
    model = Model()
    for _ in range(3):
        with Checkpointer(tmp_path, model, codec=ANY, expected_restores=ONCE) as checkpointer:
            if cnr_store.versions(tmp_path):
                checkpointer.load()
            version = checkpointer.save(0, full=True).result().id
    found = record(tmp_path, version)
    assert codec(found, "small")["rms_step"] == 0.05
    assert "2 restores are more than the 1 expected" in found.policy["codec"]["reason"]


def test_width_beside_auto_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="give the width in the codec's configuration alone"):
        Checkpointer(tmp_path, Model(), codec="auto", bits=4)


@pytest.mark.slow
def test_offers_follow_the_deltas_written(tmp_path: Path) -> None:
    """Relative rows take less than codecs estimate, so the policy would overrate what a delta costs."""
    torch.manual_seed(0)
    model, sizes = Model(), []
    offers: list[Any] = []
    with Checkpointer(tmp_path, model, codec=ANY, expected_restores=ONCE, policy="auto") as checkpointer:
        for step in range(4):
            info = checkpointer.save(step).result()
            found = record(tmp_path, info.id)
            sizes.append(found.arrays["tables/large/weight"].nbytes)
            offers.append(found.policy.get("offer"))
            with torch.no_grad():
                model.large.weight[:100_000] += 0.02 * torch.randn(100_000, DIM)
            checkpointer.touch("large", torch.arange(100_000))
    assert offers[1]["previous_bytes"] > 1.5 * sizes[1]
    assert offers[2]["previous_bytes"] < 1.1 * sizes[2]
