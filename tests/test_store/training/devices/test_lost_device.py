"""A device that is lost at any moment of a save, or short of memory there.

Where there is no GPU, what is read of a model on the CPU is taken for reads from a device.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import cnr_store
from cnr_codecs import LosslessRows, RowCodec, UniformRows
from cnr_store.training.model import tensors
from cnr_store.training.model.trained_model import TrainedModel
from tests.test_store.support.tracked_table import gather
from tests.test_store.training.devices.device import DEVICE

ROWS, DIM = 40, 6
_ATEN = torch.ops.aten
_READS = {_ATEN.copy_, _ATEN._to_copy, _ATEN.index_select, _ATEN.index, _ATEN.clone}


pytestmark = pytest.mark.usefixtures("elsewhere")


class Model(nn.Module):
    """A table and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, DIM, device=DEVICE)
        self.top = nn.Linear(DIM, 64, device=DEVICE)


class Job:
    """A model whose optimizer keeps state for rows and for dense parameters, and its store."""

    def __init__(self, folder: Path, codec: RowCodec) -> None:
        torch.manual_seed(3)
        self.model = Model()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.5)
        options: dict[str, Any] = {"policy": "consecutive", "codec": {"*": codec}}
        self.checkpointer = cnr_store.Checkpointer(str(folder), self.model, self.optimizer, **options)

    def train(self, seed: int) -> None:
        ids = torch.randint(ROWS, (2,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        self.model.top(self.model.items(ids)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, and what the optimizer keeps for them."""
        kept = [each for state in self.optimizer.state.values() for each in state.values()]
        return [each.detach() for each in (*self.model.parameters(), *kept)]


class LostDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads of a job's tensors fail after so many that succeed."""

    def __init__(self, job: Job, after: int, error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = {each.untyped_storage().data_ptr() for each in job.tensors()}
        self._after, self._error, self.reads = after, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _READS:
            source = args[1 if func.overloadpacket is _ATEN.copy_ else 0]
            self.reads += source.untyped_storage().data_ptr() in self._memory
            if self.reads > self._after:
                raise self._error
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("codec", [LosslessRows(), UniformRows("asymmetric", 8)], ids=str)
def test_a_device_that_is_lost_at_any_read_fails_the_save(tmp_path: Path, codec: RowCodec) -> None:
    error = RuntimeError("CUDA error: device lost")
    job = Job(tmp_path, codec)
    with job.checkpointer as checkpointer:
        job.train(0)
        checkpointer.save(step=0).result()
        with LostDevice(job, 1 << 30, error) as counting:
            job.train(1)
            counting.reads = 0
            checkpointer.save(step=1).result()
        # Embedding, layer's weight and bias, and as much of the optimizer.
        assert counting.reads >= 6
        for after in range(counting.reads):
            job.train(2 + after)
            with LostDevice(job, after, error), pytest.raises(cnr_store.SaveError, match="device lost"):
                checkpointer.save(step=2).result()
        record = checkpointer.save(step=2).result()
        assert record.kind == "delta"
    other = Job(tmp_path, codec)
    with other.checkpointer as checkpointer:
        checkpointer.load()
    for found, wanted in zip(other.tensors(), job.tensors(), strict=True):
        bound = 0 if isinstance(codec, LosslessRows) else 0.05
        torch.testing.assert_close(found, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("place", ["generators", "caches"])
def test_a_device_that_is_lost_beside_its_tables_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: device lost")

    job = Job(tmp_path, LosslessRows())
    with job.checkpointer as checkpointer, monkeypatch.context() as patch:
        if place == "generators":
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_rng_state_all", lost)
        else:
            patch.setattr(TrainedModel, "_cached", lambda _: [SimpleNamespace(flush=lost)])
        with pytest.raises(cnr_store.SaveError, match=f"{place[:6]}.*device lost"):
            checkpointer.save(step=0).result()


class ShortMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device that has no room for more than so many rows at once."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self.refused = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (_ATEN.index_select, _ATEN._to_copy) and len(found) > self._rows:
            self.refused += 1
            raise torch.cuda.OutOfMemoryError("no memory")
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", [1, 7, 1 << 30])
def test_rows_are_gathered_in_pieces_where_memory_is_short(
    room: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_PIECE_BYTES", 16 * 4 * DIM)
    table = torch.randn(ROWS, DIM, device=DEVICE).to(dtype)
    ids = np.arange(ROWS)[::-2].copy()
    with ShortMemory(room) as device:
        found = gather(table, ids)
    assert bool(device.refused) == (room < 16)
    assert torch.equal(
        torch.from_numpy(found), table[torch.from_numpy(ids).to(DEVICE)].cpu().to(torch.float32)
    )
    tensors.copy_rows(table, slice(3, 30), found := np.empty((27, DIM), np.float32))
    assert torch.equal(torch.from_numpy(found), table[3:30].cpu().to(torch.float32))


def test_a_row_for_which_there_is_no_memory_fails_the_save(tmp_path: Path) -> None:
    job = Job(tmp_path, LosslessRows())
    with job.checkpointer as checkpointer:
        job.train(0)
        checkpointer.save(step=0).result()
        job.train(1)
        with ShortMemory(0), pytest.raises(cnr_store.SaveError, match="no memory"):
            checkpointer.save(step=1).result()
        assert checkpointer.save(step=1).result().rows
