"""Writes the golden store of two ranks: `python -m tests.test_store.golden.golden_ranks`.

It is written once: one that exists is never written again. It holds what only many ranks write: a part of the state
for each, and slots that follow column shards. TorchRec is needed to write it, not to read it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import zarr

import cnr_store
from tests.test_store.golden.make_golden_stores import pack
from tests.test_store.ranks.support.rank_processes import preload, run_ranks
from tests.test_store.support.distributed.sharded_model import batch, sharded_model

FOLDER = Path(__file__).parent / "of_ranks"
STEPS = 3


def arrays(group: zarr.Group) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of a version, by its path."""
    return {
        path: np.asarray(each[...])
        for path, each in group.members(max_depth=None)
        if isinstance(each, zarr.Array)
    }


def train(url: str) -> None:
    """On each rank: save a baseline and deltas, one table of them in 4 bits."""
    model, rank = sharded_model(dist.get_world_size()), dist.get_rank()
    options: Any = {"policy": "consecutive", "bits": {"*.A": 4, "*": 32}}
    with cnr_store.Checkpointer(url, model, [model.fused_optimizer], **options) as checkpointer:
        for step in range(STEPS):
            loss, _ = model(batch(100 * step + rank))
            loss.backward()
            checkpointer.save(step, reader={"rank": rank, "taken": step}).result()


def main() -> None:
    if FOLDER.exists():
        sys.exit(f"{FOLDER} is there, and a golden store never changes")
    preload("torchrec", "tests.test_store.support.distributed.sharded_model")
    with tempfile.TemporaryDirectory() as place:
        outcomes = run_ranks(2, "tests.test_store.golden.golden_ranks:train", place, deadline_seconds=300)
        if any(each.error for each in outcomes):
            sys.exit(str(outcomes))
        FOLDER.mkdir()
        versions = cnr_store.versions(place)
        facts = [[info.id, info.step, info.kind, info.rows, info.bytes] for info in versions]
        (FOLDER / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")
        expected = {
            f"{info.step}/{path}": values
            for info in versions
            for path, values in arrays(cnr_store.open(place, info)).items()
        }
        np.savez_compressed(FOLDER / "expected.npz", **expected)  # type: ignore[arg-type]
        pack(Path(place), FOLDER / "store.zip")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
