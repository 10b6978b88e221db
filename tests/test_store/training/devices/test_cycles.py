"""Training whose tables lie on a device is saved, loaded and resumed as one whose tables lie in host memory.

Where there is no GPU, tables on the CPU are taken for those of a device.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cnr_store
from cnr_codecs import (
    FloatingRows,
    LatticeRows,
    LosslessRows,
    RowCodec,
    UniformRows,
    lattice_step,
    row_codec,
)
from cnr_store.training.devices import encode as encoding
from cnr_store.training.devices import staging
from tests.test_store.training.devices.conftest import stays_on_host
from tests.test_store.training.devices.device import DEVICE

ROWS, DIM = 40, 6
Values = dict[str, torch.Tensor]


pytestmark = pytest.mark.usefixtures("elsewhere")


class Model(nn.Module):
    """A table that is on the device, and with `mixed` one in host memory."""

    def __init__(self, dtype: torch.dtype, mixed: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype, device=DEVICE)
        self.users = nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype, device="cpu" if mixed else DEVICE)


class Job:
    """A model in training, and its store."""

    def __init__(
        self,
        folder: Path,
        codec: Any,
        dtype: torch.dtype = torch.float32,
        mixed: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(3)
        self.model = Model(dtype, mixed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        options = {"policy": "consecutive", "codec": {"*": codec}} | options
        self.checkpointer = cnr_store.Checkpointer(str(folder), self.model, self.optimizer, **options)

    def __enter__(self) -> Job:
        self.checkpointer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpointer.__exit__(*error)

    def train(self, seed: int) -> None:
        ids = torch.randint(ROWS, (5,), generator=torch.Generator().manual_seed(seed))
        looked = [table(ids.to(table.weight.device)).cpu() for table in (self.model.items, self.model.users)]
        torch.stack(looked).float().square().sum().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> Values:
        return {name: each.detach().cpu().clone() for name, each in self.model.named_parameters()}


def run(folder: Path, codec: Any, dtype: torch.dtype = torch.float32, mixed: bool = False) -> Values:
    """Save a whole version and two deltas, and load them into another model that goes on."""
    with Job(folder, codec, dtype, mixed) as job:
        for step in range(3):
            job.train(step)
            record = job.checkpointer.save(step=step).result()
            assert record.kind == ("baseline" if step == 0 else "delta")
    with Job(folder, codec, dtype, mixed) as other:
        with torch.no_grad():
            for each in other.model.parameters():
                each.zero_()
        assert other.checkpointer.load().step == 2
        found = other.values()
        other.train(7)
        other.checkpointer.save(step=3).result()
        return found


def shards(folder: Path) -> list[int]:
    """Sizes of all objects that hold rows."""
    return sorted(each.stat().st_size for each in folder.rglob("c/*/0"))


CYCLES = [
    (UniformRows("asymmetric", 2), torch.float32),
    (UniformRows("symmetric", 8), torch.float32),
    (UniformRows("adaptive", 2), torch.float32),
    (LatticeRows(step=lattice_step(0.01)), torch.float32),
    (UniformRows("asymmetric", 4), torch.bfloat16),
    (UniformRows("asymmetric", 3), torch.float16),
    (LatticeRows(step=lattice_step(0.01)), torch.bfloat16),
    (LatticeRows(rms_step=0.1), torch.float32),
    (LatticeRows(rms_step=0.1), torch.float16),
    (LatticeRows(rms_step=0.1, relative=True), torch.float32),
    (LatticeRows(step=lattice_step(0.01), relative=True), torch.bfloat16),
    (FloatingRows(3), torch.float16),
    (FloatingRows(5, relative=True), torch.float32),
]


@pytest.mark.slow
@pytest.mark.some_by_day(3)
@pytest.mark.parametrize(("codec", "dtype"), CYCLES, ids=str)
def test_what_is_loaded_equals_what_the_host_would_have_saved(
    codec: RowCodec, dtype: torch.dtype, tmp_path: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tmp_path / "device", codec, dtype)
    assert encoded == ["tables/items/weight", "tables/users/weight"] * 4
    stays_on_host(monkeypatch)
    wanted = run(tmp_path / "host", codec, dtype)
    assert len(encoded) == 8
    for name, values in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), values.view(torch.uint8)), name
    assert shards(tmp_path / "device") == shards(tmp_path / "host")


WEIGHTS = ["tables/items/weight", "tables/users/weight"]
BY_8_BITS = UniformRows("asymmetric", 8)


def test_what_no_device_takes_goes_by_the_host_which_is_logged_once(
    tmp_path: Path, encoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    staging._left_to_host.cache_clear()
    caplog.set_level(logging.DEBUG, "cnr_store")
    run(tmp_path / "lossless", LosslessRows())
    run(tmp_path / "kmeans", row_codec("cnr_kmeans"))
    assert encoded == []
    told = [each.getMessage() for each in caplog.records if "the host quantizes" in each.getMessage()]
    assert len(told) == len(set(told)) == 4


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_one_table_may_be_on_a_device_and_another_in_host_memory(tmp_path: Path, encoded: list[str]) -> None:
    run(tmp_path, BY_8_BITS, mixed=True)
    assert encoded == ["tables/items/weight"] * 4


def test_an_id_out_of_range_has_the_next_save_hold_the_whole_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path, BY_8_BITS) as job:
        job.checkpointer.save(step=0).result()
        (tracker,) = [
            each
            for each in job.checkpointer._coordinator._saves.tracker._trackers.values()
            if each.table.parameter is job.model.items.weight
        ]
        tracker.mark(torch.tensor([3, ROWS, -1, 1 << 40], device=DEVICE))
        record = job.checkpointer.save(step=1).result()
        assert record.rows == ROWS
        assert "items" in caplog.text
        assert "an id out of range was looked up" in caplog.text
        job.train(5)
        record = job.checkpointer.save(step=2).result()
        assert record.rows <= 10


def test_an_operation_that_fails_leaves_the_rows_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    wanted = run(tmp_path / "well", BY_8_BITS)
    encoded.clear()
    monkeypatch.setattr(encoding, "_quantized", fail)
    found = run(tmp_path / "failing", BY_8_BITS)
    assert encoded == []
    assert "could not be quantized" in caplog.text
    assert all(torch.equal(found[name], values) for name, values in wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize("place", ["copy", "gather", "flags"])
def test_a_device_that_is_lost_fails_the_save_and_no_row_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def lost(*_: object) -> Any:
        raise RuntimeError("CUDA error: device lost")

    codec = LosslessRows() if place == "gather" else BY_8_BITS
    with Job(tmp_path, codec) as job:
        job.train(0)
        job.checkpointer.save(step=0).result()
        job.train(1)
        with monkeypatch.context() as patch:
            if place == "copy":
                patch.setattr(encoding, "start_copy", lambda _: lost)
            elif place == "gather":
                patch.setattr("cnr_store.training.model.row_arrays.copy_rows", lost)
            else:
                patch.setattr("cnr_store.training.tracking.table_tracker._packed", lost)
            with pytest.raises(cnr_store.SaveError, match="device lost"):
                job.checkpointer.save(step=1).result()
        job.train(2)
        record = job.checkpointer.save(step=2).result()
        assert record.kind == "delta"
        wanted = job.values()
    with Job(tmp_path, codec) as other:
        other.checkpointer.load()
        bound = 0 if place == "gather" else 0.05
        for name, values in other.values().items():
            torch.testing.assert_close(values, wanted[name], rtol=0, atol=bound)


def test_encoded_bytes_count_for_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of which the codes fit, and the values would not, need no wait of training."""
    room = 2 * ROWS * (DIM + 10)
    for fits in (True, False):
        if not fits:
            stays_on_host(monkeypatch)
        with Job(tmp_path / str(fits), BY_8_BITS, limits=cnr_store.Limits(snapshot_bytes=room)) as job:
            pending = job.checkpointer.save(step=0)
            pending.result()
            assert pending.stats is not None
            assert (pending.stats.live_bytes == 0) == fits
