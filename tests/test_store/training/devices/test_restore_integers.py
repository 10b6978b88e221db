"""Integers that a load turns into values on the device of their table give the values of the host, bit for bit.

Where there is no GPU, tables on the CPU are taken for those of a device.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import cnr_store
from cnr_codecs import RowCodec, Scheme
from tests.test_store.training.devices.device import DEVICE
from tests.test_store.training.devices.test_encode import DTYPES, table_of
from tests.test_store.training.devices.test_restore import (
    BY_4_BITS,
    RELATIVE,
    ROWS,
    SUM,
    TABLE,
    Job,
    adagrad,
    by_the_host,
    check,
    load,
    one_sum,
    relative_rows,
    row_wise,
    save,
    sgd,
)

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.slow
@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("element", sorted(DTYPES))
@pytest.mark.parametrize("optimizer", [adagrad, row_wise, one_sum])
def test_state_on_a_floating_grid(
    optimizer: Any, element: str, tmp_path: Path, written: list[Scheme]
) -> None:
    values = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE, DTYPES[element])
    save(tmp_path, values, RELATIVE, optimizer, state_bits={"*": "m3"})
    assert all(relative_rows(tmp_path, SUM)[1:])
    check(tmp_path, values, RELATIVE, optimizer, state_bits={"*": "m3"})
    assert written.count(Scheme.LATTICE) == 2


@pytest.mark.slow
def test_a_chain_of_several_codecs(tmp_path: Path, written: list[Scheme]) -> None:
    """Integers over packed codes over integers, as far as the store lets them be."""
    values = table_of(ROWS, 6, 3, "float32").nan_to_num(posinf=1, neginf=-1).clamp(-9, 9)
    job = Job(tmp_path, values, RELATIVE, sgd)
    with job.checkpointer as checkpointer, torch.no_grad():
        checkpointer.save(step=0).result()
    later: list[RowCodec] = [BY_4_BITS, RELATIVE]
    for step, codec in enumerate(later, 1):
        job = Job(tmp_path, torch.zeros_like(values), codec, sgd)
        with job.checkpointer as checkpointer, torch.no_grad():
            checkpointer.load()
            for again in range(2):
                ids = torch.arange(step, ROWS, 2 + step + again, device=DEVICE)
                job.rows()["weight"][ids] += 0.5
                checkpointer.touch("items", ids)
                checkpointer.save(step=2 * step + again).result()
    written.clear()
    check(tmp_path, values, RELATIVE, sgd)
    assert {Scheme.LATTICE, Scheme.ASYMMETRIC} <= {*written}


def error_of(folder: Path, values: torch.Tensor, codec: RowCodec) -> str:
    """What a load raises, by the device as by the host."""
    said = []
    for way in (nullcontext, by_the_host):
        with way(), pytest.raises(cnr_store.CorruptionError) as caught:
            load(folder, values, codec, sgd)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    assert said[0] == said[1]
    return said[0]


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("codec", [BY_4_BITS, RELATIVE], ids=str)
@pytest.mark.parametrize("newest", [False, True])
def test_a_damaged_chunk_is_an_error(codec: RowCodec, newest: bool, tmp_path: Path) -> None:
    values = table_of(ROWS, 6, 3, "float32").nan_to_num(posinf=1, neginf=-1).clamp(-9, 9)
    save(tmp_path, values, codec, sgd)
    version = [each.id for each in cnr_store.versions(str(tmp_path))][-1 if newest else 0]
    for path in (tmp_path / "versions" / version).rglob("c/0/0"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    assert f"version {version}, {TABLE}" in error_of(tmp_path, values, codec)


def test_relative_rows_that_come_out_wrong_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.writing.writer.check_parents", lambda *_: None)
    values = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    job = Job(tmp_path, values, RELATIVE, sgd)
    with job.checkpointer as checkpointer, torch.no_grad():
        checkpointer.save(step=0).result()
        ids = torch.arange(0, ROWS, 3, device=DEVICE)
        job.rows()["weight"][ids] += 0.3
        checkpointer.touch("items", ids)
        checkpointer._saves.finish_latest()
        codes = checkpointer._saves.planner._code_cache._known[TABLE].codes
        assert codes is not None
        codes[33, 3] += 1
        checkpointer.save(step=1).result()
    assert "do not come out as they were written" in error_of(tmp_path, values, RELATIVE)
