"""A job whose optimizer moves every row of replicas, alike on each rank, through a history of random operations."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store.errors import CheckpointError
from tests.test_store.ranks.support.shared_model import cut_small
from tests.test_store.training.saving.test_compared import FORMS as FORMS_OF_ONE
from tests.test_store.training.saving.test_compared import MAKERS, ROWS, Job

FORMS = FORMS_OF_ONE | {"auto": FORMS_OF_ONE["relative"] | {"state_bits": "auto"}}


def live(
    url: str, folder: Path, policy: Any, form: str, optimizer: str, seed: int, operations: int
) -> list[str]:
    """Train, write where nobody sees it, save, fail, skip, load and fold, at random, alike on all ranks.

    Returns the versions. Of each, the first rank leaves in `folder` what the model held.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world > 1:
        cut_small()
    random, job, fails, versions = np.random.default_rng(seed), Job(MAKERS[optimizer]), [-1], list[str]()

    may_commit = threading.Event()
    may_commit.set()

    def fault(operation: str, key: str, _: int) -> Any:
        if rank == 0 and operation == "create" and key.startswith("versions/"):
            may_commit.wait()
        return "before" if fails[0] == rank and operation == "put" and key.startswith("versions/") else None

    backend = FaultyBackend(open_backend(url), fault)
    options = FORMS[form] | {
        "policy": policy,
        "failures": cnr_store.Failures(retry_seconds=0, timeout_seconds=20),
        "tracking": cnr_store.Tracking(audit=False),
    }
    with cnr_store.Checkpointer(backend, job.model, job.optimizer, **options) as checkpointer:
        for number in range(operations):
            job.train(random, int(random.integers(1, 3)))
            kind, drawn = (
                random.choice(["none", "data", "fail", "load", "fold", "skip"]),
                random.integers(ROWS, size=2),
            )
            if kind == "data":
                job.weight.data[torch.from_numpy(drawn)] += 0.5
            elif kind == "fail" and versions:
                fails[0] = int(drawn[0]) % world
                with suppress(CheckpointError):
                    checkpointer.save(number, full=bool(drawn[1] % 2)).result()
                fails[0] = -1
                job.train(random)
            elif kind == "load" and versions:
                checkpointer.load(versions[int(drawn[0]) % len(versions)])
                job.train(random)
            elif kind == "fold" and versions and rank == 0:
                cnr_store.compact(url)
            if kind == "skip":
                may_commit.clear()
            pending = checkpointer.save(number)
            held: dict[str, Any] = {
                path.replace("/", " "): tensor.numpy().copy() for path, tensor in job.arrays().items()
            }
            if kind == "skip":
                job.train(random)
                assert checkpointer.save(number, overlap="skip").skipped
                may_commit.set()
            versions.append(pending.result().id)
            if rank == 0:
                np.savez(folder / f"{versions[-1]}.npz", **held)
    return versions
