"""A model with tables on a device and in host memory is saved and loaded through one interface.

Where there is no GPU, a table in host memory says that it is on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cnr_store
from cnr_codecs import LosslessRows, RowCodec, Scheme, UniformRows
from cnr_store.training.devices import support
from cnr_store.training.tracking.table_tracker import RowBits
from tests.test_store.training.devices.device import DEVICE

ROWS, DIMS = 60, {"items": 6, "users": 3}
_PRETENDED = torch.device("cpu", 0)  # no tensor says so by itself


class There(nn.Parameter):
    """A parameter on a device, or one in host memory that says so."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _PRETENDED if DEVICE.type == "cpu" else super().device


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(support, "is_elsewhere", lambda device: device.index == 0)


class Used:
    """What went through a device: tables flagged there, arrays encoded there, loads decoded there."""

    def __init__(self, encoded: list[str], decoded: list[Scheme], monkeypatch: pytest.MonkeyPatch) -> None:
        self.flagged, self.encoded, self.decoded, mark = 0, encoded, decoded, RowBits.mark

        def marked(bits: RowBits, ids: torch.Tensor) -> bool:
            self.flagged += bits.host is None
            return mark(bits, ids)

        monkeypatch.setattr(RowBits, "mark", marked)


@pytest.fixture
def used(encoded: list[str], written: list[Scheme], monkeypatch: pytest.MonkeyPatch) -> Used:
    return Used(encoded, written, monkeypatch)


class Job:
    """A model with two tables, of which some are on the device, a dense layer, and its store."""

    def __init__(self, folder: Path, there: Sequence[str], codec: RowCodec) -> None:
        torch.manual_seed(3)
        self.model = nn.Module()
        self.tables = {name: nn.Embedding(ROWS, dim, sparse=True) for name, dim in DIMS.items()}
        for name, table in self.tables.items():
            if name in there:
                table.weight = There(table.weight.detach().to(DEVICE))
            self.model.add_module(name, table)
        self.top = nn.Linear(sum(DIMS.values()), 1)
        self.model.add_module("top", self.top)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        options: dict[str, Any] = {"policy": "consecutive", "codec": {"*": codec}}
        self.checkpointer = cnr_store.Checkpointer(str(folder), self.model, self.optimizer, **options)

    def train(self, seed: int) -> None:
        ids = torch.randint(ROWS, (5,), generator=torch.Generator().manual_seed(seed))
        found = [table(ids.to(table.weight.detach().device)).cpu() for table in self.tables.values()]
        self.top(torch.cat(found, 1)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().cpu().clone() for name, each in self.model.named_parameters()}


def run(folder: Path, there: Sequence[str], codec: RowCodec) -> dict[str, torch.Tensor]:
    """Save a whole version and two deltas, load them into another model, and go on."""
    job = Job(folder, there, codec)
    with job.checkpointer as checkpointer:
        for step in range(3):
            job.train(step)
            record = checkpointer.save(step=step).result()
            assert record.kind == ("baseline" if step == 0 else "delta")
    other = Job(folder, there, codec)
    with other.checkpointer as checkpointer:
        with torch.no_grad():
            for each in other.model.parameters():
                each.zero_()
        assert checkpointer.load().step == 2
        found = other.values()
        other.train(7)
        record = checkpointer.save(step=3).result()
        assert record.kind == "delta"
        assert record.rows <= 10
    return found


@pytest.mark.slow
@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("codec", [UniformRows("asymmetric", 4), LosslessRows()], ids=str)
@pytest.mark.parametrize("there", [["items"], ["users"], ["items", "users"]], ids=str)
def test_tables_in_both_kinds_of_memory(
    there: list[str], codec: RowCodec, tmp_path: Path, used: Used
) -> None:
    wanted = run(tmp_path / "host", [], codec)
    assert (used.flagged, used.encoded, used.decoded) == (0, [], [])
    found = run(tmp_path / "mixed", there, codec)
    assert used.flagged >= 4 * len(there)
    assert used.encoded == [f"tables/{name}/weight" for name in there] * 4 * (codec != LosslessRows())
    assert len(used.decoded) == len(there)
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name
    sizes = [
        sorted(each.stat().st_size for each in (tmp_path / folder).rglob("c/*/0"))
        for folder in ("host", "mixed")
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_a_version_is_loaded_wherever_the_tables_are(tmp_path: Path, used: Used) -> None:
    """A job goes on with its tables elsewhere than before."""
    codec = UniformRows("symmetric", 8)
    wanted = run(tmp_path, ["items"], codec)
    for there in ([], ["users"]):
        job = Job(tmp_path, there, codec)
        with job.checkpointer as checkpointer:
            checkpointer.load(version=2)
            assert all(torch.equal(each, wanted[name]) for name, each in job.values().items())
            job.train(9)
            assert checkpointer.save(step=9).result().kind == "delta"
