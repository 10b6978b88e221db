"""The first save and load of a process that finds no compiled kernels, or finds them damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.small_disks import fill, small_disk

pytestmark = pytest.mark.slow

_TRAIN = """
import json, logging, sys, threading
import numba.core.event as events
import torch
import cnr_store

compiles = {"training": [], "elsewhere": []}

class Listener(events.Listener):
    def on_start(self, event):
        where = "training" if threading.current_thread() is threading.main_thread() else "elsewhere"
        compiles[where].append(stage)

    def on_end(self, event):
        pass

# Waiting for the compiler counts as well: whoever compiles, or asks whether it has been done, takes this lock.
events.register("numba:compiler_lock", Listener())
stage = "import"

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sparse = torch.nn.EmbeddingBag(3000, 16, sparse=True)
        self.dense = torch.nn.Embedding(3000, 16)
        self.small = torch.nn.Embedding(20, 4)
        self.top = torch.nn.Linear(36, 1)

    def forward(self, ids):
        return self.top(torch.cat([self.sparse(ids[:, None]), self.dense(ids), self.small(ids % 20)], 1)).sum()

def step(ids):
    model(ids).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()

model = Model()
sparse = [model.sparse.weight]
others = [each for each in model.parameters() if each is not model.sparse.weight]
optimizers = [torch.optim.Adagrad(sparse), torch.optim.Adam(others)]
stage = "construct"
limits = cnr_store.Limits(snapshot_bytes=int(sys.argv[2]))
checkpointer = cnr_store.Checkpointer(sys.argv[1], model, optimizers, bits=4, limits=limits)
stage = "step"
step(torch.arange(40))
step(torch.arange(40, dtype=torch.int32))
stage = "save"
first = checkpointer.save(1)
stage = "step"
step(torch.arange(60)[::2])
stage = "delta"
first.result()
second = checkpointer.save(2)
stage = "end"
second.result()
checkpointer.close()
at_save = {name: each.detach().clone() for name, each in model.state_dict().items()}
restored = cnr_store.Checkpointer(sys.argv[1], model, optimizers, bits=4)
restored.load()
off = max((model.state_dict()[name] - each).abs().max().item() for name, each in at_save.items())
print(json.dumps({"training": compiles["training"], "elsewhere": len(compiles["elsewhere"]), "off": off}))
"""
_DECODE = """
import logging
logging.basicConfig()
from cnr_codecs import cache_folders, compile_decoding
from cnr_codecs.kernels.decode import decode_float32
for _ in compile_decoding("float32"):
    pass
print(*cache_folders())
print(sum(decode_float32.stats.cache_hits.values()))
"""


def run(program: str, *arguments: str, **environment: str) -> tuple[list[str], str]:
    """What it printed, by lines, and its log."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def train(tmp_path: Path, snapshot_bytes: int = 1 << 30) -> Any:
    out, _ = run(
        _TRAIN, str(tmp_path / "store"), str(snapshot_bytes), NUMBA_CACHE_DIR=str(tmp_path / "cache")
    )
    return json.loads(out[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("snapshot_bytes", [0, 1 << 30])
def test_training_never_waits_for_the_compiler(tmp_path: Path, snapshot_bytes: int) -> None:
    """Nor does a job that finds the kernels compiled, whether or not its rows fit."""
    cold, warm = train(tmp_path), train(tmp_path, snapshot_bytes)
    for found in (cold, warm):
        assert found["training"] == []
        assert found["off"] < 0.5
    assert cold["elsewhere"] > warm["elsewhere"] > 0


@pytest.mark.nightly
def test_rows_that_do_not_fit_are_saved_once_the_kernels_are_compiled(tmp_path: Path) -> None:
    assert train(tmp_path, snapshot_bytes=0)["training"] == []


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that one process has filled."""
    folder = tmp_path_factory.mktemp("compiled")
    (_, hits), _ = run(_DECODE, NUMBA_CACHE_DIR=str(folder))
    assert hits == "0"
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_files_of_the_cache_are_compiled_anew(compiled: Path, tmp_path: Path, suffix: str) -> None:
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.rglob(f"*.{suffix}"):
        file.write_bytes(file.read_bytes()[:20])
    (_, hits), log = run(_DECODE, NUMBA_CACHE_DIR=str(tmp_path))
    assert hits == "0"
    assert "is damaged and compiled anew" in log
    (_, hits), log = run(_DECODE, NUMBA_CACHE_DIR=str(tmp_path))
    assert hits == "1"
    assert log == ""


@pytest.mark.nightly
def test_a_full_disk_fails_nothing(tmp_path: Path) -> None:
    with small_disk("tmpfs", tmp_path) as place:
        fill(place)
        (folders, hits), log = run(_DECODE, NUMBA_CACHE_DIR=str(place))
        assert hits == "0"
        assert str(place) not in folders or "can't be kept" in log


@pytest.mark.nightly  # it compiles everything
def test_no_folder_that_can_be_written_fails_nothing() -> None:
    (folders, hits), _ = run(
        _DECODE, NUMBA_CACHE_DIR="", NUMBA_CACHE_LOCATOR_CLASSES="_UserProvidedCacheLocator"
    )
    assert (folders, hits) == ("", "0")
