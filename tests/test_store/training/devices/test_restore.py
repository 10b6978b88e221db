"""Rows that a load decodes on the device of their table equal those that the host decodes, bit for bit.

Where there is no GPU, tables on the CPU are taken for those of a device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import Transfer
from cnr_codecs import (
    FloatingRows,
    KMeansRows,
    LatticeRows,
    LosslessRows,
    RowCodec,
    Scheme,
    UniformRows,
)
from cnr_store.catalog.catalog import open_record
from cnr_store.chains import array_reader
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.training.devices import staging as decoding
from cnr_store.training.distributed.pieces import LocalPiece
from cnr_store.training.loading.restore import Fill, fill_all
from cnr_store.training.tracking.bitmap import Bitmap
from tests.test_store.chains.test_folded_meanwhile import ROWS as CHAINED_ROWS
from tests.test_store.chains.test_folded_meanwhile import chained, folding_at_first_read
from tests.test_store.chains.test_relative import count_relative
from tests.test_store.support.rowwise_optimizers import OwnRowWise
from tests.test_store.training.devices.conftest import stays_on_host
from tests.test_store.training.devices.device import DEVICE
from tests.test_store.training.devices.test_encode import DTYPES, table_of
from tests.test_store.training.devices.test_floating_cycles import OneSum

pytestmark = pytest.mark.usefixtures("elsewhere")
ROWS = 300
Values = dict[str, torch.Tensor]


class Job:
    """A table on the device, an optimizer with state for its rows, and their store."""

    def __init__(
        self, folder: Path, values: torch.Tensor, codec: RowCodec, optimizer: Any, **others: Any
    ) -> None:
        self.model = nn.Module()
        self.table = nn.Embedding(len(values), values.shape[1], sparse=True, _weight=values.clone())
        self.model.items = self.table
        self.optimizer = optimizer(self.model.parameters())
        options: dict[str, Any] = {
            "policy": "consecutive",
            "codec": {"*": codec},
            "tracking": cnr_store.Tracking(trusted_optimizers=[OwnRowWise, OneSum]),
        } | others
        self.checkpointer = cnr_store.Checkpointer(str(folder), self.model, self.optimizer, **options)

    def rows(self) -> Values:
        """The table, and what the optimizer keeps for its rows."""
        slots = self.optimizer.state[self.table.weight].items()
        return {"weight": self.table.weight.detach()} | {name: each for name, each in slots if each.ndim}


def save(folder: Path, values: torch.Tensor, codec: RowCodec, optimizer: Any, **options: Any) -> None:
    """A whole version, and two deltas whose rows overlap."""
    rng = np.random.default_rng(len(values[0]))
    job = Job(folder, values, codec, optimizer, **options)
    with job.checkpointer as checkpointer, torch.no_grad():
        for name, each in job.rows().items():
            if name != "weight":
                each.copy_(torch.from_numpy(rng.lognormal(size=each.shape)))
        for step in range(3):
            ids = torch.from_numpy(rng.permutation(ROWS)[: ROWS if step == 0 else 90]).to(DEVICE)
            for name, each in job.rows().items():
                if name == "weight":
                    each[ids[::2]] = each[ids[::2].flip(0)]
                    each[ids[1::2]] *= 1.25
                else:
                    each[ids] *= (1 + ids.view(-1, *[1] * (each.ndim - 1)) % 7 / 20).to(each)
            checkpointer.touch("items", ids)
            record = checkpointer.save(step=step).result()
            assert record.kind == ("baseline" if step == 0 else "delta")


def load(
    folder: Path, values: torch.Tensor, codec: RowCodec, optimizer: Any, **options: Any
) -> tuple[Values, list[Bitmap]]:
    """What a model of zeros holds after a load, and the rows that the load found in deltas."""
    changed, inner = [], Fill.changed

    def noted(self: Fill) -> Bitmap:
        changed.append(inner(self))
        return changed[-1]

    job = Job(folder, torch.zeros_like(values), codec, optimizer, **options)
    with job.checkpointer as checkpointer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fill, "changed", noted)
        checkpointer.load()
    return {name: each.cpu() for name, each in job.rows().items()}, changed


@contextmanager
def by_the_host() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnr_store.training.loading.restore.rows_there", lambda *_: None)
        yield


def check(folder: Path, values: torch.Tensor, codec: RowCodec, optimizer: Any, **options: Any) -> None:
    """Loads by the device and by the host leave the same bits, and find the same rows in deltas."""
    found, changed = load(folder, values, codec, optimizer, **options)
    with by_the_host():
        wanted, same = load(folder, values, codec, optimizer, **options)
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert each.any(), name
        assert torch.equal(found[name].view(torch.uint8), each.view(torch.uint8)), name
    assert [each.tolist() for each in changed] == [each.tolist() for each in same]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, initial_accumulator_value=0.25, eps=1e-4)


def row_wise(parameters: Any) -> torch.optim.Optimizer:
    return OwnRowWise(parameters, initial_accumulator_value=0.25)


def one_sum(parameters: Any) -> torch.optim.Optimizer:
    return OneSum(parameters)


BY_4_BITS = UniformRows("asymmetric", 4)
RELATIVE = LatticeRows(rms_step=0.1, relative=True)
INTEGERS: list[RowCodec] = [
    LatticeRows(rms_step=0.1),
    RELATIVE,
    FloatingRows(5),
    FloatingRows(3, relative=True),
]
CODECS = [BY_4_BITS, UniformRows("symmetric", 3), LosslessRows(), *INTEGERS]
TABLE, SUM = "tables/items/weight", "tables/items/sum"


def relative_rows(folder: Path, path: str = TABLE) -> list[int]:
    """How many rows of each version are relative."""
    return [count_relative(str(folder), each.id, path) for each in cnr_store.versions(str(folder))]


@pytest.mark.slow
@pytest.mark.some_by_day(7)
@pytest.mark.parametrize("element", sorted(DTYPES))
@pytest.mark.parametrize("dim", [1, 3, 17])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_chain_of_hard_rows(
    dim: int, element: str, codec: RowCodec, tmp_path: Path, written: list[Scheme]
) -> None:
    values = table_of(ROWS, dim, 11 * dim, element)
    if isinstance(codec, LatticeRows):  # its step is for all rows
        values[::2] = torch.randn(ROWS // 2, dim).to(values)
        values[1::2] = values[1::2].where(values[1::2].abs() < 9, torch.nan)
    save(tmp_path, values, codec, sgd)
    check(tmp_path, values, codec, sgd)
    assert Scheme.RAW in written  # rows with NaN are
    if codec in INTEGERS:
        assert Scheme.LATTICE in written
        is_relative = "relative" in codec.get_config()
        assert [each > 0 for each in relative_rows(tmp_path)] == [False, is_relative, is_relative]
    if isinstance(codec, UniformRows) and codec.is_worthwhile(dim, element):
        assert {Scheme.ASYMMETRIC, Scheme.SYMMETRIC} & {*written}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [adagrad, row_wise])
def test_state_that_follows_rows(optimizer: Any, tmp_path: Path, written: list[Scheme]) -> None:
    values = table_of(ROWS, 6, 3, "float32").nan_to_num(posinf=1, neginf=-1)
    save(tmp_path, values, BY_4_BITS, optimizer)
    check(tmp_path, values, BY_4_BITS, optimizer)
    assert len(written) > 1


@pytest.mark.slow
def test_many_threads_with_a_part_of_the_rows_each(
    tmp_path: Path, written: list[Scheme], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = table_of(ROWS, 7, 5, "bfloat16").repeat(14, 1)
    save(tmp_path, values, BY_4_BITS, sgd)
    monkeypatch.setattr(array_reader, "region_rows", lambda *_: 700)
    check(tmp_path, values, BY_4_BITS, sgd)
    assert len(written) > 6


@pytest.mark.slow
def test_memory_that_has_some_of_the_rows(
    tmp_path: Path, written: list[Scheme], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank has them whose table is shared."""
    values = table_of(ROWS, 6, 3, "float32")
    save(tmp_path, values, BY_4_BITS, sgd)
    whole, _ = load(tmp_path, values, BY_4_BITS, sgd)
    monkeypatch.setattr(array_reader, "region_rows", lambda *_: 64)
    reader = ArrayReader(*open_record(str(tmp_path), "latest"), "tables/items/weight")
    wide = torch.full((57, 9), 5.0, device=DEVICE)
    with Transfer(2, 4) as transfer:
        fill_all([Fill(reader, (LocalPiece(101, 0, wide[:, 2:8]),))], transfer)
    assert written
    assert torch.equal(wide[:, 2:8].cpu().view(torch.int32), whole["weight"][101:158].view(torch.int32))
    assert (wide[:, [0, 1, 8]] == 5).all()


def test_other_codecs_are_left_to_the_host(tmp_path: Path, written: list[Scheme]) -> None:
    codec, values = KMeansRows(bits=4), table_of(ROWS, 6, 3, "float32").nan_to_num(posinf=1, neginf=-1)
    save(tmp_path, values, codec, sgd)
    check(tmp_path, values, codec, sgd)
    assert not written


@pytest.mark.slow
@pytest.mark.parametrize("codec", [BY_4_BITS, FloatingRows(relative=True)], ids=str)
def test_segments_that_the_device_leaves(
    codec: RowCodec, tmp_path: Path, written: list[Scheme], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = table_of(ROWS, 6, 3, "float16")
    save(tmp_path, values, codec, sgd)
    monkeypatch.setattr(decoding.DeviceRows, "_takes", lambda _, each: each.scheme is Scheme.RAW)
    check(tmp_path, values, codec, sgd)
    assert not written


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("codec", [BY_4_BITS, FloatingRows(relative=True)], ids=str)
@pytest.mark.parametrize("after", [0, 2])
def test_memory_that_is_short_leaves_rows_to_the_host(
    codec: RowCodec,
    after: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = table_of(ROWS, 6, 3, "float32")
    save(tmp_path, values, codec, sgd)
    made, calls = decoding.DeviceRows._made, []

    def fail(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) > after:
            raise torch.cuda.OutOfMemoryError("no memory")
        return made(*arguments)

    monkeypatch.setattr(array_reader, "region_rows", lambda *_: 64)
    monkeypatch.setattr(decoding.DeviceRows, "_made", fail)
    with caplog.at_level(logging.WARNING):
        check(tmp_path, values, codec, sgd)
    assert calls
    assert "could not be decoded" in caplog.text


@pytest.mark.slow
def test_a_version_that_is_folded_while_it_is_loaded(
    tmp_path: Path, written: list[Scheme], monkeypatch: pytest.MonkeyPatch
) -> None:
    stays_on_host(monkeypatch)
    version = chained(str(tmp_path), "consecutive")
    expected = cnr_store.state_dict(str(tmp_path), version)["weight"]
    model = nn.Embedding(CHAINED_ROWS, 8, device=DEVICE)
    cnr_store.load(folding_at_first_read(str(tmp_path), version), model, version=version)
    assert model.weight.detach().cpu().numpy().tobytes() == expected.tobytes()
    assert written
