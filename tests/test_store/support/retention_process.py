"""Writers and collectors to be stopped or killed: one process that has imported everything, and forks them.

Run as a script. Each line on standard input is a command, answered by one line of JSON on standard output:

``{"job": "train", "collect" or "once", "url", "side", "seed", "at", "stop", "signal", "skew", ...}``
    Fork a job that sends itself the signal at its storage operation number `at` (null: never), or where `stop` says:
    when it has ``loaded``, has ``saved`` once, or is about to make its ``claim`` or an object of that name; its process
    id. Its clock is wrong by `skew` seconds.
``{"wait": process id}``
    Wait until it stops or ends: ``{"stopped"}`` or ``{"signal", "status"}``.
``{"wake": process id}``
    Let one that has stopped go on.

A job that ends by itself has the status 0; otherwise the reason is in ``side/failure-PROCESS``. What became of its
saves is in ``side/outcome-PROCESS``: the ids of the versions, then why it was superseded if it was.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cnr_codecs.plugins.zarr  # noqa: F401 - once here, rather than by zarr in each job
import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_codecs import LosslessRows, decode_into, parse
from cnr_store import SaveError, SupersededError
from tests.test_store.support import killed_trainer
from tests.test_store.support.fork_server import answer, commands
from tests.test_store.support.retention_helpers import Trainer
from tests.test_store.support.small_model import SHAPES, table_weight

Job = dict[str, Any]
TABLES = [f"{name}.weight" for name in SHAPES]


def digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """What a version holds of the tables; with 32 bits it must be what the job had."""
    return hashlib.sha256(b"".join(arrays[name].tobytes() for name in TABLES)).hexdigest()


def train(job: Job, backend: Backend) -> None:
    """Go on from the newest version, or `back` versions before it, and save so many times."""
    rules = {"keep_last": job["keep_last"]} if job["keep_last"] else {}
    trainer = Trainer(backend, seed=job["seed"], policy=job["policy"], bits=32, **rules)
    there = cnr_store.versions(backend)
    step = 0
    if there:
        try:
            step = trainer.checkpointer.load(there[max(0, len(there) - 1 - job["back"])]).step
        except cnr_store.VersionNotFoundError:
            step = trainer.checkpointer.load().step
    reach(job, "loaded")
    for _ in range(job["saves"]):
        step += 1
        trainer.train()
        weights = {f"{name}.weight": table_weight(trainer.model, name).detach().numpy() for name in SHAPES}
        try:
            note(job, trainer.checkpointer.save(step, metadata=digest(weights)).result(60).id)
        except SupersededError as error:
            note(job, str(error))
            break
        except SaveError:
            continue  # what it leant on went: the next one is whole
        reach(job, "saved")
    trainer.close()


def once(job: Job, backend: Backend) -> None:
    """Load with `cnr_store.load`, and save with `cnr_store.save`."""
    trainer = Trainer(backend, seed=job["seed"])
    options: dict[str, Any] = {"job": cnr_store.Job(rng=False), "bits": 32}
    if job["back"] is not None:
        cnr_store.load(backend, trainer.model, trainer.optimizers, **options)
    reach(job, "loaded")
    try:
        for step in range(job["saves"]):
            info = cnr_store.save(
                backend, trainer.model, trainer.optimizers, step, keep_last=job["keep_last"], **options
            )
            note(job, info.id)
            reach(job, "saved")
    except SupersededError as error:
        note(job, str(error))


def reach(job: Job, place: str) -> None:
    if job["stop"] == place:
        job["stop"] = None
        # To this thread, which goes no further before it stops.
        signal.pthread_kill(threading.get_ident(), signal.Signals[job["signal"]])


def note(job: Job, outcome: str) -> None:
    with (Path(job["side"]) / f"outcome-{os.getpid()}").open("a") as file:
        file.write(f"{outcome}\n")


def collect(job: Job, backend: Backend) -> None:
    cnr_store.gc(backend, keep_last=job["keep_last"], grace_seconds=job["grace_seconds"])


def _run(job: Job) -> None:
    def fault(operation: str, key: str, index: int) -> Fault:
        if index == job["at"]:
            os.kill(os.getpid(), signal.Signals[job["signal"]])
        if operation in ("put", "create"):
            reach(job, "claim" if key.startswith("writers/") else key.rpartition("/")[2])
        return None

    for file in ("failure", "outcome"):  # of an older process of the same id
        (Path(job["side"]) / f"{file}-{os.getpid()}").unlink(missing_ok=True)
    now = time.time
    time.time = lambda: now() + job["skew"]
    try:
        backend = FaultyBackend(open_backend(job["url"]), fault, reads=True)
        {"train": train, "collect": collect, "once": once}[job["job"]](job, backend)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - it must say why, and never become the parent
        (Path(job["side"]) / f"failure-{os.getpid()}").write_text(traceback.format_exc())
    finally:
        os._exit(1)


def _wait(process: int) -> dict[str, Any]:
    _, status = os.waitpid(process, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return {"stopped": True}
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"stopped": False, "signal": ended, "status": os.WEXITSTATUS(status) if not ended else None}


def warm_up() -> None:
    """Do once for all jobs what takes seconds: compiled code. No thread is started: forks stay sound."""
    killed_trainer.warm_up()
    rows = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    for offsets in (None, np.arange(4)):
        payload = parse(LosslessRows().encode_rows(rows, offsets, 8, element="float32"))
        decode_into(payload, np.empty((8, 16), np.float32), np.ones(8, np.uint8))


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled", UserWarning)
    warm_up()
    children = set()
    for command in commands():
        if "wait" in command:
            state = _wait(command["wait"])
            if not state["stopped"]:
                children.discard(command["wait"])
            answer(state)
        elif "wake" in command:
            os.kill(command["wake"], signal.SIGCONT)
            answer("woken")
        else:
            child = os.fork()
            if child == 0:
                _run(command)
            children.add(child)
            answer(child)
    for child in children:  # after a failed test
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
