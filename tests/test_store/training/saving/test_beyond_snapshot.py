"""Rows that don't fit into `snapshot_bytes`: training waits until they are encoded, and for nothing else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import cnr_store
from cnr_backends import Transfer, open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store.training.model import row_arrays
from cnr_store.training.model.tensors import rows_view
from cnr_store.writing import stage
from tests.test_store.support.faults import Weather

ROWS, DIM = 20_000, 16
TABLE_BYTES = ROWS * DIM * 4
CODECS: list[dict[str, Any]] = [
    {"bits": 4},
    {"bits": 32},
    {"codec": {"id": "cnr_uniform", "bits": 2, "bins": 25, "ratio": 0.9}},
    {"codec": {"id": "cnr_kmeans", "bits": 4}},
    {"codec": {"id": "cnr_lattice", "rms_step": 0.35}},
]


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype)
        self.b = nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype)


def _stored(store: Path, table: str, step: int) -> Any:
    array: Any = cnr_store.open(store, step)[f"tables/{table}/weight"]
    return array[:]


@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", CODECS, ids=str)
def test_rows_encoded_from_the_model_are_those_of_a_copy(
    tmp_path: Path, options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = Two(dtype)
    for name, nbytes in (("live", 0), ("staged", 1 << 30)):
        with cnr_store.Checkpointer(
            tmp_path / name,
            model,
            limits=cnr_store.Limits(snapshot_bytes=nbytes),
            policy="consecutive",
            **options,
        ) as saving:
            stats = []
            for step, full in enumerate((True, False)):
                saving.touch("a", torch.arange(0, ROWS, 3))
                pending = saving.save(step, full=full)
                pending.result()
                assert pending.stats is not None
                stats.append(pending.stats.live_bytes)
            assert all(stats) if name == "live" else not any(stats)
    for step in (0, 1):
        for table in ("a", "b"):
            live, staged = (_stored(tmp_path / name, table, step) for name in ("live", "staged"))
            np.testing.assert_array_equal(live, staged)


def test_training_waits_for_no_put(tmp_path: Path) -> None:
    """Puts are held up: `save` returns all the same, and what it wrote is that moment."""
    model, weather = Two(), Weather()
    backend = FaultyBackend(open_backend(tmp_path), weather)
    with cnr_store.Checkpointer(
        backend, model, bits=32, limits=cnr_store.Limits(snapshot_bytes=TABLE_BYTES)
    ) as saving:
        saving.save(0).result()
        weather.change(None, hold=True)
        pending = saving.save(1, full=True)
        assert not pending.done()
        before = model.a.weight.detach().clone(), model.b.weight.detach().clone()
        with torch.no_grad():
            model.a.weight.zero_()
            model.b.weight.zero_()
        weather.release()
        pending.result()
        assert pending.stats is not None
        assert pending.stats.live_bytes == TABLE_BYTES
    for table, rows in zip(("a", "b"), before, strict=True):
        np.testing.assert_array_equal(_stored(tmp_path, table, 1), rows.numpy())


def test_threads_of_torch_encode_what_training_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Counted(Transfer):
        def __init__(self, workers: int, *bounds: Any) -> None:
            super().__init__(workers, *bounds)
            made.append(workers)

    monkeypatch.setattr(stage, "Transfer", Counted)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with cnr_store.Checkpointer(
            tmp_path, Two(), limits=cnr_store.Limits(workers=1, snapshot_bytes=0)
        ) as saving:
            saving.save(0).result()
    finally:
        torch.set_num_threads(threads)
    assert 3 in made


def test_whole_rows_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[int] = []

    def view(tensor: torch.Tensor) -> Any:
        views.append(len(tensor))
        return rows_view(tensor)

    monkeypatch.setattr(row_arrays, "rows_view", view)
    model = Two()
    with cnr_store.Checkpointer(tmp_path, model, bits=4, limits=cnr_store.Limits(snapshot_bytes=0)) as saving:
        saving.save(0).result()
    assert len(views) == 2


def test_log_and_explain_say_why_training_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Two()
    optimizer = SGD(model.parameters(), lr=0.1)
    caplog.set_level(logging.INFO, "cnr_store")
    with cnr_store.Checkpointer(
        tmp_path, model, optimizer, bits=4, limits=cnr_store.Limits(snapshot_bytes=TABLE_BYTES)
    ) as saving:
        before = saving.explain()
        assert (before.live_bytes, before.whole_live_bytes, before.live_pace) == (0, TABLE_BYTES, None)
        assert str(before).splitlines()[3:] == [
            "A whole version holds training until 1.3 MB of rows are encoded that don't fit into snapshot_bytes, "
            "1.3 MB."
        ]
        saving.save(0).result()
        [line] = [each for each in caplog.messages if each.startswith("step 0:")]
        assert "ms (1.3 MB beyond snapshot_bytes were encoded), written" in line
        saving.touch("a", torch.arange(10))
        saving.touch("b", torch.arange(ROWS))
        after = saving.explain()
        assert after.live_bytes == TABLE_BYTES  # the ten rows of a leave no room for all of b
        assert after.live_pace is not None
        assert " s at the pace of the last one." in str(after).splitlines()[-1]
        assert str(after).splitlines()[-2].startswith("A delta now holds training until 1.3 MB of rows")
        pending = saving.save(1)
        pending.result()
        assert pending.stats is not None
        assert pending.stats.live_bytes == TABLE_BYTES
