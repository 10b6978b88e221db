"""Jobs of a storm: one process that has imported everything, and forks a job whenever it is told to.

Run as a script. Each line on standard input is a command, answered by one line of JSON on standard output:

``{"job": NAME, "url", "side", "seed", "keep_last", "policy", "max_chain", "skew_seconds"}``
    Fork a job; its process id. `skew_seconds` is how far its clock is off.
``{"reap": process id, "wait": bool}``
    Its end, as ``{"signal", "status"}``; null if it has not ended and `wait` is false.

A trainer appends a line of JSON to ``side/journal`` for each event: it loaded, it begins a save, the save is committed,
it was superseded. A job that fails writes why to ``side/failure-PROCESS``.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import cnr_codecs.plugins.zarr  # noqa: F401 - once here, rather than by zarr in each job
import cnr_store
from cnr_codecs import LatticeRows, LosslessRows, Pending, decode_into, parse
from cnr_store import Checkpointer, EmptyStoreError, SaveError, SupersededError, VersionNotFoundError
from tests.test_store.support.fork_server import answer, commands
from tests.test_store.support.lasting_store import DIM, ROWS, change, make_model, weight

Job = dict[str, Any]
LOAD_ATTEMPTS = 20
COMMON = 50
"""Rows that most changes fall on, so that deltas stay small."""
STEP = 0.125
RELATIVE = LatticeRows(step=STEP, relative=True)
"""It keeps every value: they are multiples of its step."""


def digest(model: nn.Module) -> str:
    """Of everything that a version holds of a model."""
    data = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()


class Journal:
    """What this process saw, for whoever checks the store afterwards."""

    def __init__(self, side: Path) -> None:
        self._file = os.open(side / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "process": os.getpid(), "at": time.monotonic(), **facts})
        os.write(self._file, line.encode() + b"\n")


def train(job: Job) -> None:
    """Load the newest version and save until somebody else takes over."""
    draw, journal = random.Random(job["seed"]), Journal(Path(job["side"]))
    model = make_model(job["seed"])
    weight(model).div_(STEP).round_().mul_(STEP).add_(0)  # no step has the sign of a zero
    checkpointer = Checkpointer(
        job["url"],
        model,
        **({"codec": RELATIVE} if draw.random() < 0.6 else {"bits": 32}),
        policy=job["policy"],
        keep_last=job["keep_last"],
        retention=cnr_store.Retention(max_chain=job["max_chain"]),
    )
    previous, step = _load(checkpointer, model)
    journal.write("loaded", version=previous)
    for _ in range(draw.randrange(1, 12)):
        time.sleep(draw.random() * 0.03)
        step += 1
        rows = [draw.randrange(COMMON if draw.random() < 0.9 else ROWS) for _ in range(5)]
        change(checkpointer, model, rows)
        journal.write("saving", previous=previous)
        try:
            info = checkpointer.save(step, metadata=digest(model)).result()
        except SupersededError:
            journal.write("superseded")
            break
        except SaveError:
            continue
        journal.write("committed", version=info.id, previous=info.previous)
        previous = info.id
    with suppress(SupersededError):
        checkpointer.close()


def _load(checkpointer: Checkpointer, model: nn.Module) -> tuple[str | None, int]:
    for _ in range(LOAD_ATTEMPTS):
        try:
            restored = checkpointer.load()
        except EmptyStoreError:
            return None, 0
        except VersionNotFoundError:
            continue  # retention removed it while it was read: there is a newer one
        assert restored.metadata == digest(model), f"{restored.version.id} is not what was saved"
        return restored.version.id, restored.step
    raise AssertionError("each version was removed while it was read")


def load(job: Job) -> None:
    """Read every version there is."""
    model = make_model(job["seed"])
    for info in reversed(cnr_store.versions(job["url"])):
        with suppress(VersionNotFoundError):
            restored = cnr_store.load(job["url"], model, version=info)
            assert restored.metadata == digest(model), f"{info.id} is not what was saved"


def collect(job: Job) -> None:
    with suppress(EmptyStoreError):
        cnr_store.gc(job["url"], keep_last=job["keep_last"], grace_seconds=job["seed"] % 2 * 3600)


def fold(job: Job) -> None:
    with suppress(EmptyStoreError, VersionNotFoundError, SaveError):
        cnr_store.compact(job["url"])


def repair(job: Job) -> None:
    with suppress(EmptyStoreError, VersionNotFoundError, SaveError, SupersededError):
        cnr_store.repair(job["url"])


def end_run(job: Job) -> None:
    with suppress(EmptyStoreError, SupersededError):
        cnr_store.gc(job["url"], end_run=True, grace_seconds=0)


JOBS: dict[str, Callable[[Job], None]] = {
    "train": train,
    "load": load,
    "collect": collect,
    "fold": fold,
    "repair": repair,
    "end_run": end_run,
}


def _run(job: Job) -> None:
    try:
        clock, skew = time.time, job["skew_seconds"]
        time.time = lambda: clock() + skew
        JOBS[job["job"]](job)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - it must say why, and never become the parent
        (Path(job["side"]) / f"failure-{os.getpid()}").write_text(traceback.format_exc())
    finally:
        os._exit(1)


def _reap(process: int, *, wait: bool) -> dict[str, int] | None:
    ended, status = os.waitpid(process, 0 if wait else os.WNOHANG)
    if not ended:
        return None
    return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, "status": status}


def warm_up() -> None:
    """Do once for all jobs what takes seconds: compiled code. No thread is started: forks stay sound."""
    rows = np.linspace(-1, 1, 4 * DIM, dtype=np.float32).reshape(4, DIM)
    for offsets in (None, np.arange(4)):
        payload = parse(LosslessRows().encode_rows(rows, offsets, 8, element="float32"))
        decode_into(payload, np.empty((8, DIM), np.float32), np.ones(8, np.uint8))
    need, pending = np.ones(4, np.uint8), Pending(4, DIM)
    for known in (np.ones(4, bool), np.zeros(4, bool)):
        data, *_ = RELATIVE.encode_over(rows, None, 4, np.zeros((4, DIM), np.int8), known, element="float32")
        decode_into(parse(data), np.empty((4, DIM), np.float32), need, 0, pending)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled", UserWarning)
    warm_up()
    for command in commands():
        if "reap" in command:
            answer(_reap(command["reap"], wait=command["wait"]))
            continue
        child = os.fork()
        if child == 0:
            _run(command)
        answer(child)


if __name__ == "__main__":
    main()
