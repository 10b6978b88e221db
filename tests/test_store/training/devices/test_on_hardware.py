"""What only a GPU can show: large tables, streams, short memory, a device that is lost.

Where there is none, tests that can be run at a small size on the CPU are, so that they are known to be sound.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_codecs import LosslessRows, RowCodec, UniformRows, parse
from cnr_codecs.protocol import encode_chunks
from cnr_store.training.devices.encode import encode, start_copy
from cnr_store.training.devices.staging import DeviceRows
from cnr_store.training.tracking.bitmap import rows_of
from cnr_store.training.tracking.table_tracker import RowBits
from cnr_store.writing.row_codes import encode_block
from tests.test_codecs import hard_rows
from tests.test_store.support.tracked_table import gather
from tests.test_store.training.devices.device import DEVICE
from tests.test_store.training.devices.test_encode import table_of

ON_GPU = DEVICE.type == "cuda"
_needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
pytestmark = pytest.mark.usefixtures("elsewhere")
_LAST = 40
"""Rows at the end of a large table."""


def large_table(rows: int, dim: int) -> torch.Tensor:
    """A table of float16 whose last rows break quantizers; a small one where there is no GPU."""
    if not ON_GPU:
        rows = 300
    elif torch.cuda.mem_get_info()[0] < (need := 3 * rows * dim):
        pytest.skip(f"needs {need >> 30} GiB of device memory")
    table = torch.empty(rows, dim, dtype=torch.float16, device=DEVICE)
    table[-_LAST:] = table_of(_LAST, dim, 7, "float16")
    return table


LARGE = [((1 << 27) + 5, 17, UniformRows("asymmetric", 4)), ((1 << 31) + 77, 1, LosslessRows())]


@pytest.mark.parametrize(("rows", "dim", "codec"), LARGE, ids=str)
def test_more_than_2_to_the_31_elements(rows: int, dim: int, codec: RowCodec) -> None:
    table = large_table(rows, dim)
    first = len(table) - _LAST
    ids = torch.arange(first, len(table), device=DEVICE)
    bits = RowBits(len(table), DEVICE)
    bits.mark(ids[::3])
    bits.mark(torch.tensor([0, len(table)], device=DEVICE))
    assert bits.saw_outside
    assert rows_of(bits.read(), len(table)).tolist() == [0, *ids[::3].tolist()]

    values = gather(table, ids.cpu().numpy())
    assert values.tobytes() == table[first:].cpu().numpy().tobytes()
    offsets = np.arange(_LAST)
    (wanted,) = encode_chunks(codec, values, offsets, [0, _LAST], _LAST, element="float16", seals=[0])
    if isinstance(codec, UniformRows):
        (found,) = encode_block(
            *(codec, encode(codec, table, ids).block(0, _LAST), offsets, [0, _LAST], _LAST),
            element="float16",
            seals=[0],
        )
        assert found == wanted
    table[first:] = 5
    before = table[first - 1].clone()
    assert DeviceRows(table).write(parse(wanted).segments, first)
    assert table[first:].cpu().numpy().tobytes() == hard_rows.decode(parse(wanted)).tobytes()
    assert table[first - 1].view(torch.int16).equal(before.view(torch.int16))


@pytest.mark.parametrize("name", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"])
def test_ids_of_each_type(name: str) -> None:
    bits, dtype = RowBits(100, DEVICE), getattr(torch, name)
    bits.mark(torch.tensor([1, 40, 99, 40]).to(dtype).to(DEVICE))
    assert rows_of(bits.read(), 100).tolist() == [1, 40, 99]
    assert not bits.saw_outside
    bits.mark(torch.tensor([100]).to(dtype).to(DEVICE))
    assert bits.saw_outside


class Job:
    """A table and a layer on the device, and their store."""

    def __init__(self, folder: Path, codec: RowCodec, rows: int = 64, dim: int = 8) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Embedding(rows, dim, device=DEVICE), nn.Flatten(), nn.Linear(4 * dim, 1, device=DEVICE)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options: dict[str, Any] = {"policy": "consecutive", "codec": {"*": codec}}
        self.checkpointer = cnr_store.Checkpointer(str(folder), self.model, self.optimizer, **options)
        self.ids = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)

    @property
    def table(self) -> torch.Tensor:
        return self.model[0].weight.detach()  # type: ignore[operator]

    def step(self, model: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        (model or self.model)(self.ids).float().square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, seed: int) -> None:
        self.ids.copy_(torch.randint(64, (3, 4), generator=torch.Generator().manual_seed(seed)))
        self.step()


class InMixedPrecision(Job):
    def train(self, seed: int) -> None:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            super().train(seed)


class WithNarrowIds(Job):
    def __init__(self, folder: Path, codec: RowCodec) -> None:
        super().__init__(folder, codec)
        self.ids = self.ids.int()


class OnAStream(Job):
    def train(self, seed: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            super().train(seed)
        torch.cuda.current_stream().wait_stream(stream)


class Compiled(Job):
    def step(self, model: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().step(torch.compile(self.model))


class Captured(Job):
    """Its steps are replays of a CUDA graph, which run no hooks."""

    graph: Any = None

    def train(self, seed: int) -> None:
        if self.graph is None:
            super().train(seed)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.model(self.ids).square().sum().backward()
                self.optimizer.step()
        self.ids.copy_(torch.randint(64, (3, 4), generator=torch.Generator().manual_seed(seed)))
        self.graph.replay()
        self.checkpointer.touch("0", self.ids)


WAYS = [
    Job,
    InMixedPrecision,
    WithNarrowIds,
    *(pytest.param(each, marks=_needs_gpu) for each in (OnAStream, Compiled, Captured)),
]


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_training(way: type[Job], tmp_path: Path) -> None:
    job = way(tmp_path, LosslessRows())
    with job.checkpointer as checkpointer:
        for step in range(3):
            job.train(step)
            record = checkpointer.save(step=step).result()
            assert record.kind == ("baseline" if step == 0 else "delta")
    other = Job(tmp_path, LosslessRows())
    with other.checkpointer as checkpointer:
        checkpointer.load()
    assert torch.equal(other.table, job.table)


@_needs_gpu
@pytest.mark.parametrize("codec", [UniformRows("asymmetric", 8), LosslessRows()], ids=str)
def test_a_save_and_a_load_are_in_order_with_the_stream_of_their_caller(
    codec: RowCodec, tmp_path: Path
) -> None:
    job, stream = Job(tmp_path, codec, rows=20_000, dim=64), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with job.checkpointer as checkpointer, torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 28)  # type: ignore[no-untyped-call]
        job.table.normal_()
        pending = checkpointer.save(step=0)
        kept = job.table.clone()
        job.table.zero_()
        pending.result()
        torch.cuda._sleep(1 << 28)  # type: ignore[no-untyped-call]
        job.table.fill_(9)  # before the load
        checkpointer.load()
        loaded = job.table.clone()
    stream.synchronize()
    wanted = hard_rows.decode(hard_rows.encode(codec, kept.cpu().numpy()))
    assert loaded.cpu().numpy().tobytes() == wanted.tobytes()


@_needs_gpu
def test_a_piece_is_as_it_was_when_it_was_given() -> None:
    """It is copied once what was queued has made it, and before its memory is used for something else."""
    work, waiting = torch.eye(2048, device=DEVICE), []
    for number in range(100):  # more than may wait
        for _ in range(20):
            work = work @ work
        made = torch.full((100,), number, device=DEVICE) + (work[0, :100] > 2)
        waiting.append(start_copy([made, made.half()]))
        del made
        torch.full((100,), -1, device=DEVICE)
    for number, wait in enumerate(waiting):
        for found in wait():
            np.testing.assert_array_equal(found, np.full(100, number))


@contextmanager
def room_of(nbytes: int) -> Iterator[None]:
    """Let torch take so many more bytes of the device than it has."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    whole = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / whole)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@_needs_gpu
@pytest.mark.parametrize("room", [1 << 20, 24 << 20, 200 << 20])
@pytest.mark.parametrize("codec", [UniformRows("asymmetric", 4), LosslessRows()], ids=str)
def test_memory_that_is_short(codec: RowCodec, room: int, tmp_path: Path) -> None:
    """Saves and loads find their way, and training goes on."""
    rows, dim = 1 << 20, 64
    job = Job(tmp_path, codec, rows, dim)
    with job.checkpointer as checkpointer:
        job.train(0)
        with room_of(room):
            checkpointer.save(step=0).result()
        job.table[::4] += 1
        checkpointer.touch("0", torch.arange(0, rows, 4))
        with room_of(room):
            assert checkpointer.save(step=1).result().kind == "delta"
            wanted = hard_rows.decode(hard_rows.encode(codec, job.table.cpu().numpy()))
            checkpointer.load()
        job.train(2)
        checkpointer.load()
        assert job.table.cpu().numpy().tobytes() == wanted.tobytes()


LOSES_ITS_DEVICE = """
import sys, torch, cnr_store
model = torch.nn.Embedding(5000, 8, sparse=True, device="cuda")
checkpointer = cnr_store.Checkpointer(sys.argv[1], model, policy="consecutive")
checkpointer.save(step=0).result()
checkpointer.touch("weight", [1, 2])
torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]  # after this the device takes nothing more
for step in (1, 2):
    try:
        checkpointer.save(step=step).result()
    except cnr_store.SaveError as error:
        print("SaveError:", error, flush=True)
"""


@_needs_gpu
def test_a_device_that_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOSES_ITS_DEVICE, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.stdout.count("SaveError:") == 2, found.stdout + found.stderr
    (version,) = cnr_store.versions(str(tmp_path))
    assert version.step == 0
