"""What snapshots hold of the host's memory, and for how long; each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
import gc, json, sys, threading, time
import torch
import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend

ROWS, DIM = {rows}, {dim}
TABLE_MB = ROWS * DIM * 4 / 1e6

def resident(collect=True):
    if collect:
        gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

# What runs once, such as compiled kernels, is none of it.
small = torch.nn.Embedding(10_000, DIM)
cnr_store.save(sys.argv[1] + "/small", small, torch.optim.SGD(small.parameters(), lr=0.1), bits=8)

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0, False
    def run(self):
        while not self.over:
            self.most = max(self.most, resident(collect=False))  # which takes as long as a save
            time.sleep(0.002)

model = torch.nn.Embedding(ROWS, DIM, sparse=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before, found = resident(), {{}}
checkpointer = cnr_store.Checkpointer(
    sys.argv[1] + "/store", model, optimizer, bits=8, policy="consecutive", tracking=cnr_store.Tracking(audit=False)
)
"""
_WHOLE_AND_SMALL = """
peak = Peak()
peak.start()
checkpointer.save(0, full=True).result()
found["whole"] = resident() - before
for step in range(1, 8):
    model(torch.tensor([step])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step).result()
found["after small ones"] = resident() - before
checkpointer.save(100, full=True).result()
checkpointer.close()
peak.over = True
found["closed"], found["peak"] = resident() - before, peak.most - before
print(json.dumps(found))
"""
_WHOLE_ROW_BY_ROW = """
import tracemalloc
tracemalloc.start()
checkpointer.save(0, full=True).result()
with torch.no_grad():
    model.weight.add_(1)  # whole although nobody asked for it
checkpointer.save(1).result()
print(json.dumps({{"peak": (tracemalloc.get_traced_memory()[1]) / ROWS}}))
checkpointer.close()
"""


def measure(folder: Path, program: str, rows: int, dim: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", (_PROGRAM + program).format(rows=rows, dim=dim), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_memory_is_given_back(tmp_path: Path) -> None:
    """Of a table of 256 MB: kept for the next save, but not through small ones, nor once it is closed."""
    found = measure(tmp_path, _WHOLE_AND_SMALL, rows=1_000_000, dim=64)
    assert found["whole"] > 200, found
    assert found["after small ones"] < 100, found
    assert found["closed"] < 100, found
    assert found["peak"] < 256 + 150, found


def test_a_whole_save_takes_no_row_numbers(tmp_path: Path) -> None:
    """Bytes a row: a copy of the value takes 4, what is encoded and not put yet 4. Row numbers would be 8 more."""
    found = measure(tmp_path, _WHOLE_ROW_BY_ROW, rows=4_000_000, dim=1)
    assert found["peak"] < 4 + 4 + 2, found
