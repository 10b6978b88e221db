"""Peak memory of one operation: `python -m benchmarks.storage_bench.peak OPERATION URL ROWS DIM`.

Prints by how many bytes the resident memory has risen above what it was before the operation, model included. Kernels
are compiled and threads started before, by the same operation on a small store.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import cnr_store

SNAPSHOT_BYTES = 32 << 20


class Model(nn.Module):
    """One table, its memory touched."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim, sparse=True)


def save(url: str, model: Model) -> None:
    cnr_store.save(url, model, step=1, bits=4, limits=cnr_store.Limits(snapshot_bytes=SNAPSHOT_BYTES))


def save_delta(url: str, model: Model) -> None:
    """Every twentieth row over what is there."""
    with cnr_store.Checkpointer(url, model, policy="consecutive", bits=4) as checkpointer:
        checkpointer.load()
        checkpointer.touch("table", torch.arange(0, model.table.num_embeddings, 20))
        checkpointer.save(2).result()


def load(url: str, model: Model) -> None:
    cnr_store.load(url, model)


def verify(url: str, model: Model) -> None:
    if not cnr_store.verify(url, deep=True).ok:
        raise SystemExit(f"{url} is damaged")


def compact(url: str, model: Model) -> None:
    cnr_store.compact(url)


OPERATIONS: dict[str, Callable[[str, Model], None]] = {
    "save": save,
    "save_delta": save_delta,
    "load": load,
    "verify": verify,
    "compact": compact,
}


def _resident_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def _rise(operation: Callable[[], None]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _resident_bytes("VmRSS")
    operation()
    return _resident_bytes("VmHWM") - before


def main(name: str, url: str, rows: int, dim: int) -> None:
    operation = OPERATIONS[name]
    with tempfile.TemporaryDirectory() as small:
        few = Model(5000, dim)
        save(small, few)
        save_delta(small, few)
        operation(small, few)
    model = Model(rows if name in ("save", "save_delta", "load") else 1, dim)
    print(_rise(lambda: operation(url, model)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
